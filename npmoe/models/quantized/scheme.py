"""What every scheme says of a quantised matrix, and what the readers share."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from npmoe.formats.quant_tensor import QuantTensor

FLOATS = ("F32", "BF16", "F16")

Shape = tuple[int, ...]
FindShape = Callable[[str], Shape | None]
"""Suffix of a module's tensor -> its shape in the checkpoint, None where it is not there."""
Arrays = dict[str, np.ndarray]
"""Suffix -> array, for the tensors that `Scheme.tensors` names."""


class Expected(NamedTuple):
    """A tensor of a module: suffix, shape and legal dtype words."""

    suffix: str
    shape: Shape
    words: tuple[str, ...]


class Scheme(ABC):
    """How one matrix `[N, K]` lies in a checkpoint, in tensors named MODULE.SUFFIX.

    markers: suffixes of which a quantised module has one. unread: suffixes that may be there and do
    not change a weight (scales with which others round activations).
    """

    markers: tuple[str, ...]
    unread: tuple[str, ...] = ()

    @property
    @abstractmethod
    def format(self) -> str:
        """The format of the QuantTensor that `read` makes."""

    @property
    @abstractmethod
    def words(self) -> str:
        """For people, such as "AWQ int4, groups of 128"."""

    def has(self, find: FindShape) -> bool:
        """Whether a module is quantised, by the tensors that it has."""
        return any(find(suffix) is not None for suffix in self.markers)

    @abstractmethod
    def group(self, columns: int) -> int:
        """Neighbours in a row that share a scale."""

    @abstractmethod
    def tensors(self, rows: int, columns: int, find: FindShape) -> list[Expected]:
        """What a quantised module of that shape must have.

        Raises ValueError where a matrix of that shape cannot be stored so.
        """

    @abstractmethod
    def read(self, arrays: Arrays, rows: int, columns: int) -> QuantTensor:
        """The matrix, exactly. Raises ValueError, saying why, for values that contradict the
        config."""


def either(found: Shape | None, *legal: Shape) -> Shape:
    """The legal shape that a tensor has, else the first of them, which its error will name."""
    return found if found in legal else legal[0]


def exact_scales(scales: np.ndarray) -> np.ndarray:
    """Scales of any float type as fp16 where it holds every one exactly, else float32."""
    wide = np.ascontiguousarray(scales, np.float32)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float16)
    return narrow if np.array_equal(narrow.astype(np.float32), wide) else wide


def whole(what: str, count: int, unit: int) -> int:
    """`count / unit`; ValueError where that is no whole number."""
    if count % unit:
        raise ValueError(f"{count} {what} are not a multiple of {unit}")
    return count // unit
