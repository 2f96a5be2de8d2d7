"""The forward pass on the CPU: what it says of activations that are no numbers."""

from dataclasses import replace

import numpy as np
import pytest

from npmoe.errors import NumericalError
from npmoe.models.loader import load_model
from npmoe.models.stored import open_model
from tests.helpers import GOLDEN, Session

IDS = np.array([5, 3, 9, 3], np.int32)


@pytest.mark.parametrize("kv", ["bf16", "fp32", "k8v4:rotated"])
def test_keys_and_values_that_are_not_finite_are_named(kv: str) -> None:
    """By a token whose embedding is infinite, and by a norm, in every token of its layer; four
    tokens came before."""
    model = load_model(open_model(GOLDEN / "qwen3_moe"), {}, "cpu", quiet=True)
    session = Session(model, kv)
    session.step(it=IDS)
    codes = model.weights["embed_tokens"].codes.copy()
    codes[9] = 0x7F80  # infinity in bf16
    model.weights["embed_tokens"] = replace(model.weights["embed_tokens"], codes=codes)
    with pytest.raises(NumericalError, match="layer 0: a key or value of position 6 is NaN"):
        session.step(it=IDS)
    model.layers[1].weights["input_layernorm"][0] = np.nan
    with pytest.raises(NumericalError, match="layer 1: a key or value of position 8 is NaN"):
        session.step(it=IDS[:2])
