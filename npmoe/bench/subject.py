"""What is measured: a checkpoint, or a named shape with random weights made on the device."""

from dataclasses import dataclass
from os import PathLike
from typing import Any

from npmoe.bench.random_model import random_weights
from npmoe.bench.shapes import SHAPES
from npmoe.config import WEIGHT_PARTS, KVCacheConfig, WeightsPolicy
from npmoe.dtypes import gigabytes
from npmoe.errors import OutOfMemory
from npmoe.kv.storage import check_kv_format
from npmoe.models.cache import sequence_bytes, token_bytes
from npmoe.models.conversion import cannot_be, format_bytes, running_bytes
from npmoe.models.families import read_model
from npmoe.models.gpu import check_gpu_support
from npmoe.models.loader import load_model
from npmoe.models.memory import need_of
from npmoe.models.parameters import TABLE, VECTOR, Parameter
from npmoe.models.specs import ModelSpec
from npmoe.models.stored import OpenModel, open_model, stored_formats
from npmoe.runtime.device import free_memory


@dataclass(frozen=True)
class Subject:
    """A model before its weights are there.

    raw: its config.json, without what `npmoe convert` adds. native: part -> format of its matrices
    unless the policy says otherwise. opened: the checkpoint, None for a shape.
    """

    name: str
    raw: dict[str, Any]
    spec: ModelSpec
    parameters: list[Parameter]
    native: dict[str, str]
    opened: OpenModel | None = None

    def formats(self, policy: WeightsPolicy) -> dict[str, str]:
        """Part -> format under a policy, embedding and router included."""
        return {part: policy.get(part, name) for part, name in self.native.items()}

    def chosen(self, policy: WeightsPolicy) -> WeightsPolicy:
        """The formats of the parts that a user chooses."""
        return {p: name for p, name in self.formats(policy).items() if p in WEIGHT_PARTS}

    def chosen_briefly(self, policy: WeightsPolicy) -> str | dict[str, str]:
        """`chosen`, or the one format where all parts have the same."""
        formats = self.chosen(policy)
        return next(iter(formats.values())) if len(set(formats.values())) == 1 else formats


def named_shape(name: str) -> Subject:
    """One of SHAPES. Raises ValueError for another name."""
    if name not in SHAPES:
        raise ValueError(f"shape = {name!r}: legal shapes are {', '.join(SHAPES)}")
    return from_config(SHAPES[name], name)


def from_config(raw: dict[str, Any], name: str) -> Subject:
    """The model of a config.json; matrices in bf16 but where its family stores experts as MXFP4."""
    _, spec, parameters = read_model(raw, name)
    native = {}
    for p in parameters:
        if p.part != VECTOR:
            native[p.part] = "mxfp4" if p.fused_layout == "mxfp4" else "bf16"
    return Subject(name, raw, spec, parameters, native)


def checkpoint(path: str | PathLike, ignored: tuple[str, ...] = ()) -> Subject:
    """A checkpoint by its headers. Raises CheckpointError and UnsupportedModel."""
    opened = open_model(path, ignored)
    raw = {k: v for k, v in opened.checkpoint.config.items() if k not in ignored}
    if opened.own_formats is not None or opened.quantization is not None:
        del raw["quantization_config"]
    name = opened.checkpoint.folder.name
    formats = stored_formats(opened)
    return Subject(name, raw, opened.spec, opened.parameters, formats, opened)


def check_subject(
    subject: Subject,
    policy: WeightsPolicy,
    kv: KVCacheConfig,
    tokens: int,
    device: str,
    sequences: int = 1,
) -> None:
    """Whether the device runs it and holds its weights beside `tokens` of KV cache, of so many
    sequences, each with its recurrent state, and copies in windows, where there are any.

    Raises UnsupportedModel for what has no kernel, ValueError for a format that cannot hold a
    matrix, and OutOfMemory with what would fit.
    """
    check_kv_format(kv, subject.spec.head_dim)
    if device == "cuda":
        check_gpu_support(subject.spec, subject.native, policy, kv)
    cache = kv_bytes(subject.spec, kv) * tokens
    cache += sequences * sequence_bytes(subject.spec, kv, prefill_chunk=1)
    free = free_memory(device)
    if subject.opened is None:
        weights = weight_bytes(subject, policy, device)
    else:
        need = need_of(subject.opened, policy, kv, device)
        weights = need.weights + max(need.passing, need.staying)
    if weights + cache > free:
        raise OutOfMemory(
            f"{subject.name}: {gigabytes(weights)} of weights and {gigabytes(cache)} of KV cache "
            f"for {tokens:,} tokens, {gigabytes(free)} are free; "
            + _what_fits(subject, free, weights, cache, device)
        )


def weights_of(subject: Subject, policy: WeightsPolicy, device: str, quiet: bool) -> dict[str, Any]:
    """Prepared weights by parameter name: of the checkpoint, or random."""
    if subject.opened is not None:
        return load_model(subject.opened, policy, device, quiet).weights
    return random_weights(subject.parameters, subject.formats(policy), device, quiet)


def kv_bytes(spec: ModelSpec, kv: KVCacheConfig) -> float:
    """Bytes of cache that one token takes in all layers."""
    return token_bytes(spec, kv)


def weight_bytes(subject: Subject, policy: WeightsPolicy, device: str) -> float:
    """Bytes of all matrices on a device, where 4-bit codes take a byte on the CPU."""
    formats = subject.formats(policy)
    total = 0.0
    for p in subject.parameters:
        if p.part == VECTOR:
            continue
        expands = device == "cpu" and p.part != TABLE
        try:
            total += (running_bytes if expands else format_bytes)(formats[p.part], p.shape)
        except ValueError as error:
            raise cannot_be(p, formats[p.part], error) from None
    return total


def _what_fits(subject: Subject, free: float, weights: float, cache: float, device: str) -> str:
    """Advice for an OutOfMemory: smaller weights, else a smaller cache, else another shape."""
    least = weights if subject.opened else weight_bytes(subject, _all_fp4(subject), device)
    smaller = f"weights fp4 ({gigabytes(least)})" if least < weights else "these weights"
    if least < weights and least + cache <= free:
        return f"{smaller} would fit"
    if least < free:
        tokens = int((free - least) / kv_bytes(subject.spec, KVCacheConfig("fp4", "fp4")))
        return f"{smaller} and a KV cache in fp4 of {tokens:,} tokens would fit"
    others = map(named_shape, SHAPES)
    fitting = [o.name for o in others if weight_bytes(o, _all_fp4(o), device) < free]
    if fitting:
        return f"with weights fp4 {' and '.join(fitting)} would fit"
    return "none of the named shapes would fit; pass a checkpoint"


def _all_fp4(subject: Subject) -> WeightsPolicy:
    return {part: "fp4" for part in subject.native if part in WEIGHT_PARTS}
