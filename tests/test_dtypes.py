"""Words shared by all layers."""

import ml_dtypes
import numpy as np
import pytest

import npmoe
from npmoe.dtypes import SAFETENSORS_DTYPES, array_namespace, gigabytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (23_000, "23 kB"),
        (1_400_000_000, "1.4 GB"),
        (234_567_890, "235 MB"),
        (12_345_678_901_234, "12346 GB"),
    ],
)
def test_sizes_as_text(count: int, text: str) -> None:
    assert gigabytes(count) == text


def test_sizes_of_safetensors_dtypes() -> None:
    sizes = {8: ("F64", "I64"), 4: ("F32", "I32"), 2: ("F16", "BF16", "I16")}
    by_word = {word: size for size, words in sizes.items() for word in words}
    assert {w: d.itemsize for w, d in SAFETENSORS_DTYPES.items()} == {
        **dict.fromkeys(SAFETENSORS_DTYPES, 1),
        **by_word,
    }
    assert SAFETENSORS_DTYPES["BF16"] == ml_dtypes.bfloat16


def test_the_namespace_of_numpy_arrays_is_numpy() -> None:
    assert array_namespace(np.zeros(1)) is np
    assert array_namespace(np.zeros(1, ml_dtypes.bfloat16)) is np


def test_every_public_name_that_npmoe_promises_exists() -> None:
    for name in npmoe.__all__:
        assert getattr(npmoe, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = npmoe.nonsense
