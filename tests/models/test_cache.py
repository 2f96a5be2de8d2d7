"""What a model keeps of its sequences, layer by layer."""

from dataclasses import replace

import pytest

from npmoe.config import KVCacheConfig, KVWindows
from npmoe.kv.states import RecurrentState
from npmoe.models.cache import ModelCache, num_state_slots, token_bytes
from npmoe.models.families import read_model
from tests.golden.golden_cases import CASES

FP32 = KVCacheConfig("fp32", "fp32")


def cache_of(name: str) -> ModelCache:
    """Five pages of 4 tokens, two slots."""
    return ModelCache(read_model(CASES[name], "")[1], 5, 4, FP32, num_slots=2)


def test_layers_have_pages_or_states_in_the_models_order() -> None:
    cache = cache_of("qwen3_next")
    kinds = [isinstance(layer, RecurrentState) for layer in cache.layers]
    assert kinds == [True, False, True]
    assert cache.layers[1] is cache.pages[0]
    assert len(cache.pages) == 1


def test_without_states_the_layers_are_the_pages() -> None:
    cache = cache_of("qwen3_moe")
    assert cache.layers is cache.pages
    cache.copy_state(0, 1)  # nothing to copy


def test_latent_layers_have_pages_of_two_widths() -> None:
    """Rope key of 16 and latent of 32 elements; also where other layers keep states."""
    latent = read_model(CASES["deepseek_v3"], "")[1].layers[0].attention
    cache = cache_of("deepseek_v3")
    assert cache.layers is cache.pages
    assert [p.codes.shape for p in cache.pages[1]] == [(5, 1, 4, 16), (5, 1, 4, 32)]
    spec = read_model(CASES["qwen3_next"], "")[1]
    first, second, last = spec.layers
    mixed = replace(spec, layers=(first, replace(second, attention=latent), last))
    assert (mixed.num_kv_layers, mixed.num_kv_heads, mixed.rope_dim) == (1, 1, 16)
    assert token_bytes(mixed, FP32) == (16 + 32) * 4
    cache = ModelCache(mixed, 5, 4, FP32)
    assert [isinstance(layer, RecurrentState) for layer in cache.layers] == [True, False, True]
    assert [p.codes.shape[-1] for p in cache.pages[0]] == [16, 32]


def test_copies_of_a_slot_are_copied_with_its_state() -> None:
    """3 + 5 + 8 tokens in bf16 for each of two slots, beside the one layer with pages."""
    spec = read_model(CASES["qwen3_next"], "")[1]
    config = replace(FP32, windows=KVWindows(3, 5))
    cache = ModelCache(spec, 5, 4, config, num_slots=2, prefill_chunk=8)
    states, (keys, values), _ = cache.layers
    assert isinstance(states, RecurrentState)
    assert keys is cache.pages[0][0]
    for half, value in ((keys, 7), (values, 9)):
        copies = half.copies
        assert (copies.first, copies.recent) == (3, 5)
        assert copies.pages.codes.shape == (2, 2, 16, 32)
        copies.pages.codes[0] = value
    states.conv[0] = 1
    cache.copy_state(0, 1)
    assert (keys.copies.pages.codes[1] == 7).all()
    assert (values.copies.pages.codes[1] == 9).all()
    assert states.conv[1].all()
    assert cache.has_slots
    assert not cache_of("qwen3_moe").has_slots


def test_a_state_is_copied_and_a_page_is() -> None:
    cache = cache_of("qwen3_next")
    first, (keys, _), last = cache.layers
    assert isinstance(first, RecurrentState)
    assert isinstance(last, RecurrentState)
    first.conv[0], last.memory[0], keys.codes[3] = 1, 2, 3
    cache.copy_state(0, 1)
    cache.copy_page(3, 4)
    assert (first.conv[1].max(), last.memory[1].min(), keys.codes[4].min()) == (1, 2, 3)
    assert not first.memory.any()


@pytest.mark.parametrize(("name", "pages", "states"), [("qwen3_moe", 3, 0), ("qwen3_next", 1, 2)])
def test_bytes(name: str, pages: int, states: int) -> None:
    spec = read_model(CASES[name], "")[1]
    per_token = pages * 2 * spec.num_kv_heads * spec.head_dim * 4
    assert token_bytes(spec, FP32) == per_token
    assert spec.state_bytes == states * 4 * (3 * 128 + 4 * 16 * 16)
    assert cache_of(name).nbytes == 5 * 4 * per_token + 2 * spec.state_bytes
    assert num_state_slots(16) == 17
