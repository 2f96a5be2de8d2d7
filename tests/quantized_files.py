"""Matrices as others quantise them, made by hand: bytes of a file and the values they mean.

Each `pack_*` takes (rng, rows, columns) and gives suffix -> (dtype word, array), and the values in
float64. Codes, scales and zero points are random, so that every position differs.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.helpers import GOLDEN, read_safetensors, write_safetensors

Stored = dict[str, tuple[str, np.ndarray]]
Pack = Callable[[np.random.Generator, int, int], tuple[Stored, np.ndarray]]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of an int32 holds


def e4m3(rng: np.random.Generator, *shape: int, positive: bool = False) -> np.ndarray:
    """Random codes, none of them NaN."""
    codes = rng.integers(0x20, 0x7F, shape).astype(np.uint8)
    return codes if positive else codes | (rng.integers(0, 2, shape) << 7).astype(np.uint8)


def meaning(codes: np.ndarray) -> np.ndarray:
    """What E4M3 codes mean."""
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def float_scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """float32, all bits used."""
    return rng.uniform(1e-4, 1e-3, shape).astype(np.float32)


def spread(scales: np.ndarray, block: tuple[int, ...], shape: tuple[int, int]) -> np.ndarray:
    """The scale of every element."""
    full = np.kron(scales.astype(np.float64), np.ones(block))
    return full[: shape[0], : shape[1]]


def fp8_blocks(*block: int) -> Pack:
    """`weight_scale_inv` for blocks of rows and columns; the last ones may be cut off."""

    def pack(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        codes = e4m3(rng, rows, columns)
        scales = float_scales(rng, -(-rows // block[0]), -(-columns // block[1]))
        stored = {"weight": ("F8_E4M3", codes), "weight_scale_inv": ("F32", scales)}
        return stored, meaning(codes) * spread(scales, block, codes.shape)

    return pack


def pack_fp8_rows(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    """A bf16 scale a row."""
    codes = e4m3(rng, rows, columns)
    scales = float_scales(rng, rows, 1).astype(ml_dtypes.bfloat16)
    stored = {"weight": ("F8_E4M3", codes), "weight_scale": ("BF16", scales)}
    return stored, meaning(codes) * scales.astype(np.float64)


def pack_fp8_tensor(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    """A scale a matrix, and the activations' scale, which is not to be read."""
    codes, scale = e4m3(rng, rows, columns), float_scales(rng)
    other = np.array(7, np.float32)
    stored = {
        "weight": ("F8_E4M3", codes),
        "weight_scale": ("F32", scale),
        "input_scale": ("F32", other),
    }
    return stored, meaning(codes) * np.float64(scale)


def _pack_nvfp4(rng: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, ...]:
    """Packed codes, block scales, and what both mean."""
    codes = rng.integers(0, 16, (rows, columns))
    scales = e4m3(rng, rows, columns // 16, positive=True)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return packed, scales, E2M1[codes] * spread(meaning(scales), (1, 16), codes.shape)


def pack_modelopt(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    """`weight_scale_2` multiplies; of so few bits that products are exact in float32."""
    packed, scales, values = _pack_nvfp4(rng, rows, columns)
    factor = np.array(rng.integers(1, 4096) / 2.0**23, np.float32)
    stored = {
        "weight": ("U8", packed),
        "weight_scale": ("F8_E4M3", scales),
        "weight_scale_2": ("F32", factor),
        "input_scale": ("F32", np.array(3, np.float32)),
    }
    return stored, values * np.float64(factor)


def pack_compressed_nvfp4(
    rng: np.random.Generator, rows: int, columns: int
) -> tuple[Stored, np.ndarray]:
    """`weight_global_scale` divides; a power of two, whose reciprocal is exact."""
    packed, scales, values = _pack_nvfp4(rng, rows, columns)
    divisor = np.array([2.0 ** rng.integers(11, 16)], np.float32)
    stored = {
        "weight_packed": ("U8", packed),
        "weight_scale": ("F8_E4M3", scales),
        "weight_global_scale": ("F32", divisor),
        "input_global_scale": ("F32", np.array([5], np.float32)),
    }
    return stored, values / np.float64(divisor[0])


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes `[M, C]` -> int32 `[M, C bits / 32]`, the first in the lowest bits."""
    each = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // each), np.uint32)
    for i in range(each):
        words |= codes[:, i::each].astype(np.uint32) << np.uint32(bits * i)
    return words.view(np.int32)


@dataclass(frozen=True)
class Integers:
    """Random integers and what they mean: (codes - zeros) * scales, zeros and scales by group."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    index: np.ndarray
    values: np.ndarray

    @classmethod
    def make(
        cls, rng: np.random.Generator, shape: tuple[int, int], bits: int, group: int, **options: Any
    ) -> "Integers":
        """options: symmetric, reordered, low (of the zeros), dtype (of the scales)."""
        rows, columns = shape
        groups, top = columns // group, 1 << bits
        codes = rng.integers(0, top, shape)
        zeros = rng.integers(options.get("low", 0), top, (rows, groups))
        if options.get("symmetric"):
            zeros[:] = top // 2
        scales = rng.uniform(0.5, 1, (rows, groups)) / top / 4
        scales = scales.astype(options.get("dtype", np.float16))
        index = np.arange(columns) // group
        if options.get("reordered"):
            index = rng.permutation(index)
        values = (codes - zeros[:, index]) * scales.astype(np.float64)[:, index]
        return cls(codes, zeros, scales, index.astype(np.int32), values)


def compressed_ints(bits: int, group: int | None, symmetric: bool, **options: Any) -> Pack:
    """compressed-tensors `pack-quantized`; group None: a scale a row."""

    def pack(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        options.setdefault("dtype", ml_dtypes.bfloat16)
        made = Integers.make(
            rng, (rows, columns), bits, group or columns, symmetric=symmetric, **options
        )
        word = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[made.scales.dtype.name]
        stored = {
            "weight_packed": ("I32", pack_words(made.codes, bits)),
            "weight_scale": (word, made.scales),
            "weight_shape": ("I64", np.array([rows, columns])),
        }
        if not symmetric:
            zeros = np.ascontiguousarray(pack_words(made.zeros.T, bits).T)
            stored["weight_zero_point"] = ("I32", zeros)
        if options.get("reordered"):
            stored["weight_g_idx"] = ("I32", made.index)
        return stored, made.values

    return pack


def pack_awq(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    """AWQ gemm, groups of 32."""
    made = Integers.make(rng, (rows, columns), 4, 32)
    order = np.concatenate([np.array(AWQ_ORDER) + i for i in range(0, rows, 8)])
    stored = {
        "qweight": ("I32", pack_words(made.codes.T[:, order], 4)),
        "qzeros": ("I32", pack_words(made.zeros.T[:, order], 4)),
        "scales": ("F16", np.ascontiguousarray(made.scales.T)),
    }
    return stored, made.values


def gptq(bits: int, group: int | None, offset: int = 1, index: bool = True, **options: Any) -> Pack:
    """GPTQ; offset: a zero point less what is stored. index: whether there is a `g_idx`."""

    def pack(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, np.ndarray]:
        shape = (rows, columns)
        made = Integers.make(rng, shape, bits, group or columns, low=offset, **options)
        stored = {
            "qweight": ("I32", np.ascontiguousarray(pack_words(made.codes, bits).T)),
            "qzeros": ("I32", pack_words(made.zeros.T - offset, bits)),
            "scales": ("F16", np.ascontiguousarray(made.scales.T)),
        }
        if index:
            stored["g_idx"] = ("I32", made.index)
        return stored, made.values

    return pack


IGNORED = ("lm_head", "model.layers.0.mlp.gate", "model.layers.2.mlp.gate")


def compressed_config(stored: str, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors with one group."""
    weights = {"dynamic": False, "symmetric": True, "observer": "minmax"} | weights
    own = {"targets": ["Linear"], "weights": weights, "input_activations": None} | group
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": own | {"output_activations": None}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    }


def gptq_config(bits: int = 4, group: int = 32, **options: Any) -> dict[str, Any]:
    """`quantization_config` of GPTQ."""
    base = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False}
    return base | {"sym": False, "damp_percent": 0.1, "true_sequential": True} | options


def ints(bits: int, **options: Any) -> dict[str, Any]:
    """`weights` of a group of compressed-tensors."""
    return {"num_bits": bits, "type": "int"} | options


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
ROUNDED = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class Case:
    """One way to quantise. format, block: of the QuantTensor of an expert's `down_proj`, `[64, 32]`
    or, in gate and up, `[64, 64]`; None where any."""

    name: str
    config: dict[str, Any]
    pack: Pack
    format: str
    down_block: tuple[int, int] = (1, 1)
    word: str = field(default="")


def fp8_config(*block: int) -> dict[str, Any]:
    """`quantization_config` of blocks."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": list(IGNORED),
    }


CASES = [
    Case(
        "fp8-blocks",
        fp8_config(24, 32),
        fp8_blocks(24, 32),
        "fp8",
        (24, 32),
        "FP8, blocks of 24x32",
    ),
    Case(
        "fp8-even-blocks",
        fp8_config(32, 32),
        fp8_blocks(32, 32),
        "fp8",
        (32, 32),
        "FP8, blocks of 32x32",
    ),
    Case(
        "fp8-rows",
        compressed_config(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            input_activations=ROUNDED,
        ),
        pack_fp8_rows,
        "fp8",
        (1, 32),
        "FP8, a scale a matrix or a row",
    ),
    Case(
        "fp8-tensor",
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.mlp.gate"]},
        pack_fp8_tensor,
        "fp8",
        (64, 32),
        "FP8, a scale a matrix or a row",
    ),
    Case(
        "nvfp4-modelopt",
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "*.mlp.gate"],
        },
        pack_modelopt,
        "nvfp4",
        (1, 16),
        "NVFP4 of ModelOpt",
    ),
    Case(
        "nvfp4-compressed",
        compressed_config("nvfp4-pack-quantized", NVFP4, input_activations=NVFP4),
        pack_compressed_nvfp4,
        "nvfp4",
        (1, 16),
        "NVFP4 of compressed-tensors",
    ),
    Case(
        "w4a16",
        compressed_config("pack-quantized", ints(4, strategy="group", group_size=32)),
        compressed_ints(4, 32, symmetric=True),
        "int4",
        (1, 32),
        "compressed-tensors int4, groups of 32",
    ),
    Case(
        "w4a16-asymmetric",
        compressed_config(
            "pack-quantized", ints(4, strategy="group", group_size=16, symmetric=False)
        ),
        compressed_ints(4, 16, symmetric=False),
        "int4_asym",
        (1, 16),
        "compressed-tensors int4 with zero points, groups of 16",
    ),
    Case(
        "w4a16-float32-scales",
        compressed_config("pack-quantized", ints(4, strategy="group", group_size=32)),
        compressed_ints(4, 32, symmetric=True, dtype=np.float32),
        "int4",
        (1, 32),
        "compressed-tensors int4, groups of 32",
    ),
    Case(
        "w4a16-asymmetric-float32-scales",
        compressed_config(
            "pack-quantized", ints(4, strategy="group", group_size=16, symmetric=False)
        ),
        compressed_ints(4, 16, symmetric=False, dtype=np.float32),
        "int4_asym",
        (1, 16),
        "compressed-tensors int4 with zero points, groups of 16",
    ),
    Case(
        "w8a16-float32-scales",
        compressed_config("pack-quantized", ints(8, strategy="group", group_size=32)),
        compressed_ints(8, 32, symmetric=True, dtype=np.float32),
        "int8",
        (1, 32),
        "compressed-tensors int8, groups of 32",
    ),
    Case(
        "w4a16-reordered",
        compressed_config(
            "pack-quantized", ints(4, strategy="group", group_size=16, actorder="group")
        ),
        compressed_ints(4, 16, symmetric=True, reordered=True),
        "fp32",
        (1, 1),
        "compressed-tensors int4, groups of 16 in any order",
    ),
    Case(
        "w8a16",
        compressed_config("pack-quantized", ints(8, strategy="channel")),
        compressed_ints(8, None, symmetric=True),
        "int8",
        (1, 32),
        "compressed-tensors int8, rows",
    ),
    Case(
        "awq",
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["mlp.gate"],
        },
        pack_awq,
        "int4_asym",
        (1, 32),
        "AWQ int4 with zero points, groups of 32",
    ),
    Case(
        "gptq",
        gptq_config(),
        gptq(4, 32),
        "int4_asym",
        (1, 32),
        "GPTQ int4 with zero points, groups of 32",
    ),
    Case(
        "gptq-v2",
        gptq_config(checkpoint_format="gptq_v2"),
        gptq(4, 32, offset=0, index=False),
        "int4_asym",
        (1, 32),
        "GPTQ int4 with zero points, groups of 32",
    ),
    Case(
        "gptq-symmetric",
        gptq_config(sym=True, dynamic={"-:.*mlp.gate$": {}}),
        gptq(4, 32, symmetric=True),
        "int4",
        (1, 32),
        "GPTQ int4, groups of 32",
    ),
    Case(
        "gptq-reordered",
        gptq_config(group=16, desc_act=True),
        gptq(4, 16, reordered=True),
        "fp32",
        (1, 1),
        "GPTQ int4 with zero points, groups of 16 in any order",
    ),
    Case(
        "gptq-int8",
        gptq_config(8, -1, sym=True, desc_act=True),
        gptq(8, None, symmetric=True),
        "int8",
        (1, 32),
        "GPTQ int8, rows",
    ),
    Case(
        "gptq-int8-asymmetric",
        gptq_config(8),
        gptq(8, 32),
        "fp32",
        (1, 1),
        "GPTQ int8 with zero points, groups of 32",
    ),
]

GOLDEN_CASES = (
    "fp8-even-blocks",
    "nvfp4-compressed",
    "w4a16-float32-scales",
    "w4a16-asymmetric-float32-scales",
    "w8a16-float32-scales",
)
"""Those whose logits tests/golden/make_quantized.py asks transformers for."""


def make_quantized(
    folder: Path, case: Case, base: str = "qwen3_moe", seed: int = 0
) -> tuple[Path, dict[str, np.ndarray]]:
    """A golden checkpoint whose attention and MLPs are quantised; and module -> values.

    Beside it, in `FOLDER-plain`, the same values in float32.
    """
    tensors = read_safetensors(GOLDEN / base / "model.safetensors")
    plain, values, rng = dict(tensors), {}, np.random.default_rng(seed)
    for name, (_, shape, _) in list(tensors.items()):
        if ".layers." not in name or len(shape) != 2 or name.endswith(".gate.weight"):
            continue
        module = name.removesuffix(".weight")
        stored, values[module] = case.pack(rng, *shape)
        del tensors[name]
        for suffix, (word, array) in stored.items():
            tensors[f"{module}.{suffix}"] = (word, list(array.shape), array.tobytes())
        plain[name] = ("F32", shape, values[module].astype(np.float32).tobytes())
    config = json.loads((GOLDEN / base / "config.json").read_text())
    for target, content, extra in (
        (folder, tensors, {"quantization_config": case.config}),
        (folder.with_name(folder.name + "-plain"), plain, {}),
    ):
        shutil.copytree(GOLDEN / base, target)
        write_safetensors(target / "model.safetensors", content)
        (target / "config.json").write_text(json.dumps(config | extra))
    return folder, values
