"""The recurrent states of linear attention layers: one slot for each sequence, no pages.

A state stands for every token that its sequence has put in, so it cannot be shared by a prefix nor
taken back by a token: it is copied with a fork, and starts from zeros at a sequence's first token.
"""

from dataclasses import dataclass

import numpy as np

from npmoe.dtypes import Array


@dataclass(frozen=True)
class RecurrentState:
    """One layer's states.

    conv float32 `[slots, W - 1, C]`: the last inputs of its convolution. memory float32
    `[slots, Hv, Dk, Dv]`: what the delta rule has written.
    """

    conv: Array
    memory: Array

    def clear(self, slots: Array) -> None:
        """Zeroes these slots, int32 `[n]`."""
        self.conv[slots], self.memory[slots] = 0, 0


class RecurrentStates:
    """`layers[i]` holds the states of the i-th linear attention layer."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        conv_shape: tuple[int, int],
        memory_shape: tuple[int, int, int],
    ) -> None:
        """conv_shape: (W - 1, C); memory_shape: (Hv, Dk, Dv)."""
        grid = (num_layers, num_slots)
        self._conv = np.zeros((*grid, *conv_shape), np.float32)
        self._memory = np.zeros((*grid, *memory_shape), np.float32)
        self.layers = list(map(RecurrentState, self._conv, self._memory))

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return self._conv.nbytes + self._memory.nbytes

    def copy(self, source: int, target: int) -> None:
        """Copies one slot's state in every layer."""
        self._conv[:, target] = self._conv[:, source]
        self._memory[:, target] = self._memory[:, source]
