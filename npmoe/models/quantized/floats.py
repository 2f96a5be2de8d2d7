"""FP8 (E4M3) and NVFP4 matrices as they lie in checkpoints.

Sources: the quantizers of transformers (`fp8`), NVIDIA ModelOpt, and the compressed-tensors format
(https://github.com/vllm-project/compressed-tensors).
"""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from npmoe.formats.quant_tensor import QuantTensor
from npmoe.models.quantized.scheme import (
    FLOATS,
    Arrays,
    Expected,
    FindShape,
    Scheme,
    either,
    whole,
)

NVFP4_GROUP = 16


@dataclass(frozen=True)
class Fp8(Scheme):
    """E4M3 codes times scales, which multiply whatever their name: `weight_scale_inv` too.

    block: rows and columns under one scale; None for one scale a matrix or one a row, as its shape
    says.
    """

    block: tuple[int, int] | None = None
    format = "fp8"
    markers = ("weight_scale_inv", "weight_scale")
    unread = ("input_scale",)

    @property
    def words(self) -> str:
        """For people."""
        if self.block is None:
            return "FP8, a scale a matrix or a row"
        return f"FP8, blocks of {self.block[0]}x{self.block[1]}"

    def group(self, columns: int) -> int:
        """Columns of a block, or all."""
        return columns if self.block is None else self.block[1]

    def tensors(self, rows: int, columns: int, find: FindShape) -> list[Expected]:
        """Codes and scales."""
        name = self._scale_name(find)
        shape = either(find(name), (rows, 1), (rows,), (1,), (), (1, 1))
        if self.block is not None:
            height, width = self.block
            shape = (-(-rows // height), -(-columns // width))
        return [
            Expected("weight", (rows, columns), ("F8_E4M3",)),
            Expected(name, shape, (*FLOATS, "F8_E8M0")),
        ]

    def _scale_name(self, find: FindShape) -> str:
        return next((name for name in self.markers if find(name) is not None), self.markers[0])

    def read(self, arrays: Arrays, rows: int, columns: int) -> QuantTensor:
        """Float32 scales hold every type that a file may have."""
        scales = next(a for name, a in arrays.items() if name != "weight").astype(np.float32)
        block = self.block
        if block is None:
            block = (1 if scales.size == rows else rows, columns)
            scales = scales.reshape(-1, 1)
        codes = arrays["weight"].view(np.uint8)
        return QuantTensor("fp8", (rows, columns), codes, scales, block=block)


class _Nvfp4(Scheme):
    """E2M1 codes, an E4M3 scale for 16 columns and a float32 one for all."""

    format = "nvfp4"
    codes_name: str
    global_name: str

    def group(self, columns: int) -> int:
        """16."""
        return NVFP4_GROUP

    def tensors(self, rows: int, columns: int, find: FindShape) -> list[Expected]:
        """Codes, scales, global scale."""
        groups = whole("columns", columns, NVFP4_GROUP)
        return [
            Expected(self.codes_name, (rows, columns // 2), ("U8",)),
            Expected("weight_scale", (rows, groups), ("F8_E4M3",)),
            Expected(self.global_name, either(find(self.global_name), (), (1,)), ("F32",)),
        ]

    def read(self, arrays: Arrays, rows: int, columns: int) -> QuantTensor:
        """As the bytes are."""
        stored = arrays[self.global_name].reshape(()).astype(np.float32)
        if not (np.isfinite(stored) and stored > 0):
            raise ValueError(f"{self.global_name} = {float(stored)}, expected a number > 0")
        return QuantTensor(
            "nvfp4",
            (rows, columns),
            arrays[self.codes_name],
            arrays["weight_scale"].view(np.uint8),
            global_scale=self._multiplier(stored),
            block=(1, NVFP4_GROUP),
        )

    @abstractmethod
    def _multiplier(self, stored: np.ndarray) -> np.ndarray:
        """The factor that a stored global scale means."""


class ModelOptNvfp4(_Nvfp4):
    """NVIDIA ModelOpt: `weight_scale_2` multiplies."""

    words = "NVFP4 of ModelOpt"
    codes_name, global_name = "weight", "weight_scale_2"
    markers = ("weight_scale_2", "weight_scale")
    unread = ("input_scale",)

    def _multiplier(self, stored: np.ndarray) -> np.ndarray:
        return stored


class CompressedNvfp4(_Nvfp4):
    """compressed-tensors: `weight_global_scale` divides. Its reciprocal is rounded to float32 once,
    as every product with it would be."""

    words = "NVFP4 of compressed-tensors"
    codes_name, global_name = "weight_packed", "weight_global_scale"
    markers = ("weight_packed", "weight_global_scale")
    unread = ("input_global_scale",)

    def _multiplier(self, stored: np.ndarray) -> np.ndarray:
        return np.asarray(np.float32(1) / stored)
