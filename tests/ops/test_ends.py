"""The plain steps around the layers: embed, output, lm_head."""

import numpy as np
import pytest

from npmoe.formats import quantize
from npmoe.ops.embed import embed
from npmoe.ops.linear import prepare_linear
from npmoe.ops.lm_head import lm_head
from npmoe.ops.norm import rms_norm_ref
from npmoe.ops.output import add_output
from tests.cases import WEIGHT_FORMATS
from tests.helpers import normal, relative_error


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_embed_gives_the_rows_of_the_table(format: str) -> None:
    table = quantize(normal(10, 32), format)
    out = embed(table, np.array([9, 0, 9], np.int32))
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, table.dequantize()[[9, 0, 9]])


def test_a_head_with_a_bias_and_no_norm() -> None:
    weight = prepare_linear(quantize(np.array([[1, 0], [1, 1]], np.float32), "fp32"))
    logits = lm_head(np.array([[2, 3]], np.float32), None, 0.0, weight, np.array([10, 20]))
    assert logits.tolist() == [[12, 25]]


def test_embed_gives_an_array_of_its_own() -> None:
    table = quantize(normal(10, 32), "fp32")
    kept = table.codes.copy()
    x = embed(table, np.arange(10))
    x += 1
    np.testing.assert_array_equal(table.codes, kept)


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_add_output_joins_heads_and_adds_to_the_residual(num_tokens: int) -> None:
    attended, o_proj, bias = normal(num_tokens, 4, 8), normal(64, 32, seed=1), normal(64, seed=2)
    residual = normal(num_tokens, 64, seed=3)
    kept = residual.copy()
    add_output(residual, attended, quantize(o_proj, "fp32"), bias)
    want = kept + attended.reshape(num_tokens, 32) @ o_proj.T + bias
    assert relative_error(residual, want) < 2e-6
    add_output(residual, np.zeros_like(attended), quantize(o_proj, "fp32"), None)
    assert relative_error(residual, want) < 2e-6


def test_lm_head_by_hand() -> None:
    # rms of (3, 4, 0, 0) is 2.5.
    weight = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [1, -1, 0, 0]], np.float32)
    norm = np.array([2.5, 5, 1, 1], np.float32)
    got = lm_head(np.array([[3, 4, 0, 0]], np.float32), norm, 0.0, quantize(weight, "fp32"))
    np.testing.assert_allclose(got, [[3, 8, -5]], rtol=1e-6)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_lm_head_of_a_vocabulary_that_is_no_multiple_of_64(format: str) -> None:
    x, norm = normal(3, 64), normal(64, seed=1)
    weight = quantize(normal(301, 64, seed=2), format)
    got = lm_head(x, norm, 1e-6, prepare_linear(weight))
    assert relative_error(got, rms_norm_ref(x, norm, 1e-6) @ weight.dequantize().T) < 5e-6
    assert got.shape == (3, 301)
    assert lm_head(x[:0], norm, 1e-6, prepare_linear(weight)).shape == (0, 301)
