"""Bytes that a step must read, counted by hand for a small model."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from npmoe.bench.random_model import random_cache, random_weights
from npmoe.bench.subject import Subject, checkpoint, named_shape
from npmoe.bench.traffic import Traffic, address, step_traffic
from npmoe.config import KVCacheConfig
from npmoe.kv.states import RecurrentState
from npmoe.models.cache import ModelCache
from tests.helpers import GOLDEN


@pytest.fixture
def tiny(tiny_shape: None) -> Subject:
    return named_shape("tiny")


def made(
    subject: Subject, weights: str, kv: str, batch: int, context: int
) -> tuple[Traffic, dict[str, Any], ModelCache]:
    formats = subject.formats(dict.fromkeys(("experts", "attention", "lm_head"), weights))
    arrays = random_weights(subject.parameters, formats, "cpu")
    cache = random_cache(subject.spec, KVCacheConfig.parse(kv), 8, 16, "cpu", num_slots=batch)
    args = (subject.spec, subject.parameters, arrays, cache, batch, context, "cpu")
    return step_traffic(*args), arrays, cache


def test_a_token_in_bf16(tiny: Subject) -> None:
    traffic, arrays, cache = made(tiny, "bf16", "bf16", 1, 100)
    qkv, output = 4 * 64 * 256, 256 * 128
    experts = 2 * 3 * 128 * 256  # two of eight, gate and up and down
    vectors = 2 * (2 * 256 + 2 * 64) + 256
    matrices = 2 * (qkv + output + 8 * 256 + experts) + 512 * 256 + 256  # one row of the table
    kv = 2 * 100 * 2 * 64 * 2
    assert traffic.total == 2 * matrices + 4 * vectors + kv
    arguments = (arrays["layers.1.gate_up_proj"].codes, np.zeros(3), None, 5)
    assert traffic.of(arguments) == 2 * 2 * 2 * 128 * 256
    assert traffic.of([cache.layers[0][1].codes]) == 100 * 64 * 2
    assert traffic.of([arrays["layers.0.input_layernorm"]]) == 256 * 4


def test_four_bits_on_the_cpu_take_a_byte_and_the_scale(tiny: Subject) -> None:
    traffic, arrays, cache = made(tiny, "fp4", "fp4", 1, 100)
    assert traffic.of([arrays["lm_head"].codes]) == 512 * 256 * (1 + 2 / 32)
    assert traffic.of([cache.layers[1][0].codes]) == 100 * 64 * (0.5 + 2 / 32)


def test_a_batch_reads_more_experts_but_each_once(tiny: Subject) -> None:
    traffic, arrays, _ = made(tiny, "bf16", "bf16", 4, 100)
    chosen = 1 - (1 - 2 / 8) ** 4
    assert traffic.of([arrays["layers.0.down_proj"].codes]) == 8 * 128 * 256 * 2 * chosen
    assert traffic.of([arrays["lm_head"].codes]) == 512 * 256 * 2
    assert traffic.of([arrays["embed_tokens"].codes]) == 4 * 256 * 2


def test_a_window_bounds_what_is_read(tiny: Subject) -> None:
    first, second = tiny.spec.layers
    narrow = replace(second, attention=replace(second.attention, window=32))
    spec = replace(tiny.spec, layers=(first, narrow))
    traffic, _, cache = made(replace(tiny, spec=spec), "bf16", "bf16", 1, 100)
    assert traffic.of([cache.layers[0][0].codes]) == 100 * 64 * 2
    assert traffic.of([cache.layers[1][0].codes]) == 32 * 64 * 2


def test_latents_and_rope_keys_are_counted_at_their_widths() -> None:
    traffic, _, cache = made(checkpoint(GOLDEN / "deepseek_v3"), "bf16", "bf16", 2, 100)
    rope_keys, latents = cache.layers[1]
    assert traffic.of([rope_keys.codes]) == 2 * 100 * 16 * 2
    assert traffic.of([latents.codes]) == 2 * 100 * 32 * 2
    assert (latents.codes[3] == latents.codes[0]).all()
    assert latents.codes.any()


def test_pages_are_filled(tiny: Subject) -> None:
    for pages in made(tiny, "bf16", "fp4", 1, 100)[2].layers[1]:
        assert all((a[3] == a[0]).all() for a in pages.arrays())
        assert all(a.any() for a in pages.arrays())
        assert address(pages.codes) != address(pages.arrays()[1])


def test_copies_in_windows_are_read_instead(tiny: Subject) -> None:
    """Of 100 tokens the first 4 and the last 10 in bf16, from the copies of each sequence."""
    kv = "fp4:rotated:windows=4,10"
    traffic, _, cache = made(tiny, "bf16", kv, 3, 100)
    keys = cache.layers[1][0]
    assert traffic.of([keys.codes]) == 3 * (100 - 14) * 64 * (0.5 + 2 / 32)
    assert traffic.of([keys.copies.pages.codes]) == 3 * 14 * 64 * 2
    assert (keys.copies.pages.codes[2] == keys.copies.pages.codes[0]).all()
    assert keys.copies.pages.codes.any()


def test_recurrent_states_are_read_whole() -> None:
    subject = checkpoint(GOLDEN / "qwen3_next")
    traffic, _, cache = made(subject, "bf16", "bf16", 3, 100)
    states = [layer for layer in cache.layers if isinstance(layer, RecurrentState)]
    assert states
    for state in states:
        assert traffic.of([state.conv, state.memory]) == state.conv.nbytes + state.memory.nbytes
        assert len(state.memory) == 3
        assert state.memory.any()
    pages = next(layer for layer in cache.layers if not isinstance(layer, RecurrentState))
    assert traffic.of([pages[0].codes]) == 3 * 100 * pages[0].codes[0, :, 0].nbytes
