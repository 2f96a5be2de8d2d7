"""`quantization_config`: which modules are quantised and how, read strictly.

A module counts as quantised where the checkpoint has its scheme's tensors; a module that the
config leaves out must not have them. Schemes that also round activations (FP8 and NVFP4, dynamic
or static) are read as weights alone, since activations are not rounded here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from npmoe.checkpoint import read_json
from npmoe.config import ConfigReader
from npmoe.errors import CheckpointError, UnsupportedModel
from npmoe.models.quantized.floats import CompressedNvfp4, Fp8, ModelOptNvfp4
from npmoe.models.quantized.integers import Awq, Gptq, PackedInts
from npmoe.models.quantized.scheme import FindShape, Scheme

MODELOPT_FILE = "hf_quant_config.json"
CACHE_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale")
"""Scales of others' 8-bit caches; ours has its own."""

Matches = Callable[[str, str], bool]
"""(pattern of a list, module) -> whether it is meant."""


@dataclass(frozen=True)
class Quantization:
    """What a config says. groups: target patterns and the scheme of what they match.

    ignored: patterns of the modules that are not quantised, to be compared by `matches`.
    """

    where: str
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignored: tuple[str, ...]
    matches: Matches

    def scheme(self, module: str, find: FindShape) -> Scheme | None:
        """How a module is stored; None where it is not quantised.

        Raises CheckpointError for a module that is listed as left out and has quantised tensors.
        """
        scheme = next((s for targets, s in self.groups if _targeted(targets, module)), None)
        if scheme is None or not scheme.has(find):
            return None
        for pattern in self.ignored:
            if self.matches(pattern, module):
                raise CheckpointError(
                    f"{self.where}: {module} is left out by {pattern!r}, and the checkpoint has "
                    f"{scheme.words} tensors for it"
                )
        return scheme

    def may_stay_unread(self, name: str) -> bool:
        """Whether a tensor only serves to round activations or a cache as others do."""
        suffix = name.rpartition(".")[2]
        return suffix in CACHE_SCALES or any(suffix in s.unread for _, s in self.groups)


def read_quantization(raw: Any, folder: Path) -> Quantization | None:
    """`quantization_config` of config.json, or ModelOpt's own file beside it; None for neither.

    Raises UnsupportedModel for methods and options that are not implemented, by name.
    """
    where = f"{folder / 'config.json'}: quantization_config"
    if raw is None and (folder / MODELOPT_FILE).is_file():
        where = str(folder / MODELOPT_FILE)
        raw = {"quant_method": "modelopt", **read_json(folder / MODELOPT_FILE)}
        raw |= raw.pop("quantization", None) or {}
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{where} = {raw!r}, expected an object")
    method = raw.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise UnsupportedModel(
            f"{where}: quant_method {method!r} is not implemented (npmoe reads "
            f"{', '.join(METHODS)}, and mxfp4 for gpt_oss)"
        )
    reader = ConfigReader(raw, where)
    reader.ignore("quant_method")
    groups, ignored, matches = METHODS[method](reader)
    reader.finish()
    return Quantization(where, groups, ignored, matches)


Groups = tuple[tuple[tuple[str, ...], Scheme], ...]
Read = tuple[Groups, tuple[str, ...], Matches]
EVERY = ("Linear",)


def _read_fp8(reader: ConfigReader) -> Read:
    reader.expect("fmt", "e4m3", "float8_e4m3fn")
    reader.expect("activation_scheme", "dynamic", "static")
    reader.expect("scale_fmt", "ue8m0", "float")
    reader.ignore("kv_cache_scheme", "is_checkpoint_fp8_serialized")
    block = reader.take("weight_block_size", default=None)
    ignored = (*_names(reader, "modules_to_not_convert"), *_names(reader, "ignored_layers"))
    scheme = Fp8(None if block is None else _block(reader, "weight_block_size", block))
    return ((EVERY, scheme),), ignored, _within


def _read_modelopt(reader: ConfigReader) -> Read:
    reader.ignore("producer", "kv_cache_quant_algo", "kv_cache_scheme", "config_groups")
    reader.ignore("quantization_status", "quant_library", "version")
    reader.expect("quant_algo", "NVFP4", "FP8")
    algorithm = reader.take("quant_algo")
    reader.expect("group_size", *((16,) if algorithm == "NVFP4" else ()))
    reader.expect("pre_quant_scale", False)
    reader.expect("has_zero_point", False)
    ignored = (*_names(reader, "exclude_modules"), *_names(reader, "ignore"))
    scheme = ModelOptNvfp4() if algorithm == "NVFP4" else Fp8()
    return ((EVERY, scheme),), ignored, fnmatch_or_regex


def _read_awq(reader: ConfigReader) -> Read:
    bits = reader.take("bits", "w_bit")
    reader.expect("bits", 4)
    reader.expect("w_bit", 4)
    reader.expect("version", "gemm", "GEMM")
    reader.expect("zero_point", True)
    reader.ignore("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config")
    group = _group_size(reader, "group_size", "q_group_size")
    ignored = _names(reader, "modules_to_not_convert")
    return ((EVERY, Awq(bits, group, symmetric=False)),), ignored, _within


GPTQ_NEUTRAL = (
    *("damp_percent", "damp_auto_increment", "true_sequential", "meta", "dataset", "tokenizer"),
    *("model_name_or_path", "model_file_base_name", "batch_size", "use_exllama", "exllama_config"),
    *("max_input_length", "cache_block_outputs", "use_cuda_fp16", "model_seqlen", "backend"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "disable_exllama"),
    *(
        "modules_in_block_to_quantize",
        "mse",
        "lm_head",
        "pad_token_id",
        "static_groups",
        "act_group_aware",
    ),
)


def _read_gptq(reader: ConfigReader) -> Read:
    reader.expect("bits", 4, 8)
    reader.expect("checkpoint_format", "gptq", "gptq_v2")
    reader.expect("pack_dtype", "int32")
    reader.expect("is_marlin_format", False)
    reader.expect("hyb_act", False)
    reader.ignore(*GPTQ_NEUTRAL)
    dynamic = reader.take("dynamic", default={})
    if not isinstance(dynamic, dict) or any(not str(key).startswith("-:") for key in dynamic):
        raise UnsupportedModel(
            f"{reader.where}: dynamic = {dynamic!r} is not implemented (npmoe implements modules "
            "left out, '-:')"
        )
    group = _group_size(reader, "group_size")
    reordered = bool(reader.take("desc_act", default=False)) and group is not None
    scheme = Gptq(
        reader.take("bits"),
        group,
        symmetric=bool(reader.take("sym", default=True)),
        reordered=reordered and not reader.take("static_groups", default=False),
        zero_offset=0 if reader.take("checkpoint_format", default="gptq") == "gptq_v2" else 1,
    )
    ignored = tuple(f"re:{str(key)[2:]}" for key in dynamic)
    _check_patterns(reader.where, list(ignored))
    ignored += _names(reader, "modules_to_not_convert")
    return ((EVERY, scheme),), ignored, fnmatch_or_regex


def _read_compressed(reader: ConfigReader) -> Read:
    reader.ignore("kv_cache_scheme", "global_compression_ratio", "quantization_status", "version")
    reader.expect("quantization_status", "compressed", "frozen")
    reader.expect("transform_config", {})
    sparsity = reader.take("sparsity_config", default={}) or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise UnsupportedModel(f"{reader.where}: sparsity_config = {sparsity!r} is not implemented")
    stored = reader.take("format", default=None)
    raw_groups = reader.take("config_groups")
    if not isinstance(raw_groups, dict) or not raw_groups:
        raise UnsupportedModel(f"{reader.where}: config_groups = {raw_groups!r}, expected groups")
    groups = tuple(
        _compressed_group(f"{reader.where}: {name}", group, stored)
        for name, group in raw_groups.items()
    )
    return groups, _names(reader, "ignore"), fnmatch_or_regex


def _compressed_group(where: str, raw: Any, stored: str | None) -> tuple[tuple[str, ...], Scheme]:
    if not isinstance(raw, dict) or not isinstance(raw.get("weights"), dict):
        raise UnsupportedModel(f"{where} = {raw!r}, expected an object with weights")
    group = ConfigReader(raw, where)
    group.expect("output_activations")
    targets = _names(group, "targets")
    own = group.take("format", default=stored)
    weights = ConfigReader(group.take("weights"), f"{where}: weights")
    weights.ignore("observer", "observer_kwargs", "num_bits", "scale_dtype", "zp_dtype")
    weights.expect("dynamic", False)
    bits, kind = weights.take("num_bits"), weights.take("type", default="int")
    strategy, symmetric = weights.take("strategy"), weights.take("symmetric", default=True)
    activations = group.take("input_activations", default=None)
    if own == "pack-quantized" and kind == "int" and bits in (4, 8) and activations is None:
        scheme: Scheme = _packed_ints(weights, bits, strategy, bool(symmetric))
    elif own == "nvfp4-pack-quantized" and (kind, bits) == ("float", 4) and symmetric:
        weights.expect("strategy", "tensor_group", "group")
        weights.expect("group_size", 16)
        weights.expect("actorder", False)
        scheme = CompressedNvfp4()
    elif (
        own in ("float-quantized", "naive-quantized") and (kind, bits) == ("float", 8) and symmetric
    ):
        weights.expect("strategy", "tensor", "channel", "block")
        weights.expect("group_size")
        weights.expect("actorder", False)
        block = weights.take("block_structure", default=None)
        is_block = strategy == "block"
        scheme = Fp8(_block(weights, "block_structure", block) if is_block else None)
    else:
        rounded = "" if activations is None else f", input_activations = {activations!r}"
        raise UnsupportedModel(
            f"{where}: format {own!r} with {bits}-bit {kind} weights (symmetric = {symmetric!r})"
            f"{rounded} is not implemented"
        )
    weights.finish()
    group.finish()
    return targets, scheme


def _packed_ints(weights: ConfigReader, bits: int, strategy: str, symmetric: bool) -> PackedInts:
    weights.expect("strategy", "group", "channel")
    group = _group_size(weights, "group_size") if strategy == "group" else None
    weights.ignore("group_size", "block_structure")
    order = weights.take("actorder", default=None)
    weights.expect("actorder", "group", "weight", "static", "dynamic", False)
    reordered = order in ("group", "dynamic") and group is not None
    return PackedInts(bits, group, symmetric, reordered)


def _group_size(reader: ConfigReader, *names: str) -> int | None:
    """Columns under one scale; None for all, which files write as -1."""
    if reader.take(*names) == -1:
        return None
    size: int = reader.take_int(*names, least=2)
    if size % 2:
        raise UnsupportedModel(f"{reader.where}: {names[0]} = {size}, expected an even number")
    return size


def _block(reader: ConfigReader, name: str, value: Any) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise UnsupportedModel(f"{reader.where}: {name} = {value!r}, expected [rows, columns]")


def _names(reader: ConfigReader, key: str) -> tuple[str, ...]:
    names = reader.take(key, default=[])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedModel(f"{reader.where}: {key} = {names!r}, expected a list of names")
    _check_patterns(reader.where, names)
    return tuple(names)


def _check_patterns(where: str, names: list[str]) -> None:
    for name in names:
        try:
            re.compile(name[3:] if name.startswith("re:") else "")
        except re.error as error:
            raise UnsupportedModel(f"{where}: {name!r} is no regular expression: {error}") from None


def _targeted(targets: tuple[str, ...], module: str) -> bool:
    return any(target in EVERY or fnmatch_or_regex(target, module) for target in targets)


def fnmatch_or_regex(pattern: str, module: str) -> bool:
    """`re:` and a regular expression from the start, or a name in which * stands for anything."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatchcase(module, pattern)


def _within(pattern: str, module: str) -> bool:
    """Whether the pattern's parts between dots are, in this order, parts of the module's name."""
    return f".{pattern.strip('.')}." in f".{module}."


METHODS: dict[str, Callable[[ConfigReader], Read]] = {
    "fp8": _read_fp8,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed,
}
