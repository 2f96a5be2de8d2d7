"""Floating-point codes of four and eight bits: E2M1 and E4M3 (finite only, saturating).

A code is sign, exponent, mantissa. With bias b and m mantissa bits, exponent field e > 0 means
2^(e-b) * (1 + mantissa / 2^m), and e = 0 the subnormals 2^(1-b) * mantissa / 2^m.
Sources: OCP Microscaling Formats v1.0 (E2M1, E4M3, E8M0); OCP 8-bit Floating Point v1.0 (E4M3).
"""

from dataclasses import dataclass

import numpy as np

from npmoe.dtypes import Array, array_namespace


@dataclass(frozen=True)
class MiniFloat:
    """One format: field widths, bias, and the largest finite magnitude, which is saturated to."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float

    @property
    def sign_bit(self) -> int:
        """The sign's place value in a code."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def encode(self, x: Array) -> Array:
        """float32 `[...]`, finite -> uint8 codes `[...]`, round to nearest even, saturating."""
        xp = array_namespace(x)
        m, lowest = self.mantissa_bits, 1 - self.bias
        magnitude = xp.minimum(xp.abs(x), xp.float32(self.largest))
        _, exponent = xp.frexp(magnitude)  # magnitude = f * 2^exponent with 0.5 <= f < 1
        ulp = xp.where(magnitude > 0, xp.maximum(exponent - 1, lowest), lowest) - m
        steps = xp.rint(xp.ldexp(magnitude, -ulp)).astype(xp.int32)  # 0 .. 2^(m+1) units of 2^ulp
        # In units of its ulp a normal number is 2^m + mantissa, so the exponent field adds up and a
        # carry out of the mantissa moves on to the next exponent by itself.
        code = ((ulp + m - lowest) << m) + steps
        return (code + xp.where(xp.signbit(x), self.sign_bit, 0)).astype(xp.uint8)

    def table(self) -> np.ndarray:
        """float32 value of every code, `[2 * sign_bit]`; codes beyond `largest` are NaN."""
        code = np.arange(2 * self.sign_bit)
        m = self.mantissa_bits
        field = (code & (self.sign_bit - 1)) >> m
        mantissa = code & ((1 << m) - 1)
        steps = np.where(field > 0, mantissa + (1 << m), mantissa)
        value = np.ldexp(steps.astype(np.float32), np.maximum(field, 1) - self.bias - m)
        value[value > self.largest] = np.nan
        return np.where(code & self.sign_bit, -value, value).astype(np.float32)


E2M1 = MiniFloat(exponent_bits=2, mantissa_bits=1, bias=1, largest=6.0)
E4M3 = MiniFloat(exponent_bits=4, mantissa_bits=3, bias=7, largest=448.0)

E2M1_VALUES = E2M1.table()
E4M3_VALUES = E4M3.table()
E8M0_VALUES = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


def decode_table(codes: Array, table: np.ndarray) -> Array:
    """uint8 codes `[...]` -> float32 `[...]` by `table`."""
    xp = array_namespace(codes)
    return xp.take(xp.asarray(table), codes)
