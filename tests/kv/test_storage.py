"""The arrays of the cache: what is written is what is read, in every format."""

from dataclasses import replace

import numpy as np
import pytest

from npmoe.config import KVCacheConfig
from npmoe.errors import UnsupportedModel
from npmoe.formats.floats import decode_bf16, encode_bf16
from npmoe.formats.groups import Encoded
from npmoe.formats.kv_cache import GROUPED_KV_FORMATS
from npmoe.kv.storage import KVCache, kv_bytes_per_token
from npmoe.ops.quantize import NotFinite, read_kv_pages, write_kv_pages
from tests.cases import KV_FORMATS, KV_PAIRS
from tests.helpers import make_pages, normal


def as_cached(x: np.ndarray, kv_format: str, group_size: int = 32) -> np.ndarray:
    """x after a round trip through the format."""
    if kv_format == "fp32":
        return x
    if kv_format == "bf16":
        return decode_bf16(encode_bf16(x))
    encode, decode = GROUPED_KV_FORMATS[kv_format]
    return decode(Encoded(*encode(x, group_size)))


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_reading_gives_what_was_written_through_shuffled_pages(kv_format: str) -> None:
    pages = make_pages(kv_format, num_pages=5, heads=2, head_dim=64, page_size=4)
    table = np.array([3, 0, 4], np.int32)
    x = normal(10, 2, 64)
    positions = np.arange(10)
    slots = table[positions // 4] * 4 + positions % 4
    write_kv_pages(pages, x[:7], slots[:7])
    write_kv_pages(pages, x[7:], slots[7:])
    np.testing.assert_array_equal(read_kv_pages(pages, table, 10), as_cached(x, kv_format))
    np.testing.assert_array_equal(read_kv_pages(pages, table, 5), as_cached(x[:5], kv_format))


def test_a_token_lies_in_its_slot() -> None:
    pages = make_pages("fp32", num_pages=3, heads=2, head_dim=16, page_size=4)
    x = normal(1, 2, 16)
    write_kv_pages(pages, x, np.array([9], np.int32))  # 9 = page 2, offset 1
    np.testing.assert_array_equal(pages.codes[2, :, 1], x[0])
    assert np.count_nonzero(pages.codes) == x.size


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_slot_minus_one_is_skipped(kv_format: str) -> None:
    pages = make_pages(kv_format, num_pages=2, heads=2, head_dim=32, page_size=4)
    x = normal(3, 2, 32)
    write_kv_pages(pages, x, np.array([-1, 5, -1], np.int32))
    read = read_kv_pages(pages, np.array([0, 1]), 8)
    np.testing.assert_array_equal(read[5], as_cached(x[1:2], kv_format)[0])
    assert not np.delete(read, 5, axis=0).any()
    before = [a.copy() for a in pages.arrays()]
    write_kv_pages(pages, x, np.full(3, -1, np.int32))
    for was, now in zip(before, pages.arrays(), strict=True):
        np.testing.assert_array_equal(now, was)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(kv_format: str, rotated: bool, value: float) -> None:
    """Its token is named, and nothing stored; a token that is not cached does not count."""
    pages = make_pages(kv_format, num_pages=1, heads=1, head_dim=32)
    x = np.ones((4, 1, 32), np.float32)
    x[0] = x[2, 0, 5] = value
    with pytest.raises(NotFinite, match=r"token 2: .* NaN or infinite") as raised:
        write_kv_pages(replace(pages, rotated=rotated), x, np.array([-1, 0, 1, 2]))
    assert raised.value.row == 2
    assert not any(a.any() for a in pages.arrays())


def test_what_e4m3_scales_cannot_hold_is_refused_before_it_is_stored() -> None:
    pages = make_pages("nvfp4", num_pages=1, heads=1, head_dim=32)
    with pytest.raises(ValueError, match="needs the scale 500, E4M3 ends at 448"):
        write_kv_pages(pages, np.full((1, 1, 32), 3000, np.float32), np.array([0]))
    assert not any(a.any() for a in pages.arrays())


@pytest.mark.parametrize("pair", KV_PAIRS, ids="/".join)
def test_copy_page_copies_every_layer_and_array(pair: tuple[str, str]) -> None:
    cache = KVCache(2, 3, 4, 2, 32, KVCacheConfig(*pair))
    for i, layer in enumerate(cache.layers):
        for pages in layer:
            write_kv_pages(pages, normal(4, 2, 32, seed=i), np.arange(4, dtype=np.int32))
    cache.copy_page(0, 2)
    for pages in (pages for layer in cache.layers for pages in layer):
        for a in pages.arrays():
            np.testing.assert_array_equal(a[2], a[0])
            assert a[0].any()
            assert not a[1].any()


@pytest.mark.parametrize("pair", KV_PAIRS, ids="/".join)
@pytest.mark.parametrize("group_size", [16, 32, 64])
def test_bytes_per_token_are_those_of_the_arrays(pair: tuple[str, str], group_size: int) -> None:
    config = KVCacheConfig(*pair, group_size)
    cache = KVCache(3, 5, 8, 2, 64, config)
    assert cache.nbytes == kv_bytes_per_token(config, 2, 64) * 3 * 5 * 8


def test_bytes_per_token_by_hand() -> None:
    # 8 heads of 128: 1,024 elements each of K and V. fp4: half a byte, and 2 bytes for every 32.
    assert kv_bytes_per_token(KVCacheConfig("bf16", "bf16"), 8, 128) == 4096
    assert kv_bytes_per_token(KVCacheConfig("fp4", "fp4"), 8, 128) == 2 * (512 + 64)
    assert kv_bytes_per_token(KVCacheConfig("mxfp4", "nvfp4"), 8, 128) == 2 * (512 + 32)
    assert kv_bytes_per_token(KVCacheConfig("fp8", "int4_asym"), 8, 128) == 1024 + 64 + 512 + 96


def test_keys_and_values_of_different_width() -> None:
    """A rope key of 64 and a latent of 512, one head, as DeepSeek-V3 has in each of 61 layers."""
    config = KVCacheConfig("bf16", "fp4")
    cache = KVCache(3, 5, 8, 1, (64, 512), config)
    keys, values = cache.layers[2]
    assert keys.codes.shape == (5, 1, 8, 64)
    assert values.codes.shape == (5, 1, 8, 256)
    assert values.scales.shape == (5, 1, 8, 16)
    assert kv_bytes_per_token(config, 1, (64, 512)) == 2 * 64 + 256 + 2 * 16
    assert cache.nbytes == kv_bytes_per_token(config, 1, (64, 512)) * 3 * 5 * 8
    assert 61 * kv_bytes_per_token(KVCacheConfig(), 1, (64, 512)) == 61 * 2 * 576


def test_the_width_that_a_group_does_not_divide_is_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"fp8: head_dim = 16 .*group_size = 32; .*16$"):
        KVCache(1, 1, 16, 1, (16, 32), KVCacheConfig("fp8", "fp4"))
    with pytest.raises(UnsupportedModel, match=r"int8: head_dim = 40 .*use fp32 or bf16"):
        KVCache(1, 1, 16, 1, (16, 40), KVCacheConfig("bf16", "int8"))
    assert KVCache(1, 1, 16, 1, (16, 32), KVCacheConfig("bf16", "fp4")).nbytes > 0


def test_a_group_that_does_not_divide_head_dim_is_refused_with_what_would_fit() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"fp4.*head_dim = 80.*group_size = 32.*group_size 16"
    ):
        KVCache(1, 1, 16, 1, 80, KVCacheConfig("bf16", "fp4"))
    for name in ("mxfp4", "nvfp4"):
        with pytest.raises(UnsupportedModel, match=rf"{name}: head_dim = 80 .*group_size 16$"):
            KVCache(1, 1, 16, 1, 80, KVCacheConfig(name, "bf16"))
    with pytest.raises(UnsupportedModel, match="use fp32 or bf16"):
        KVCache(1, 1, 16, 1, 24, KVCacheConfig("fp4", "fp4", 16))
    assert KVCache(1, 1, 16, 1, 80, KVCacheConfig("bf16", "fp32")).nbytes > 0


def test_layers_are_views_of_what_copy_pages_copies() -> None:
    cache = KVCache(2, 4, 4, 2, 32, KVCacheConfig("bf16", "fp4"))
    for layer, value in zip(cache.layers, (1, 2), strict=True):
        for a in (a for pages in layer for a in pages.arrays()):
            a[0], a[1] = value, value + 10
    cache.copy_pages([(0, 2), (1, 3)])
    for layer, value in zip(cache.layers, (1, 2), strict=True):
        for a in (a for pages in layer for a in pages.arrays()):
            assert [np.unique(page).tolist() for page in a[2:]] == [[value], [value + 10]]
    cache.copy_pages([])


@pytest.mark.parametrize("copies", [[(0, 1), (1, 2)], [(0, 2), (1, 2)], [(0, 0)]])
def test_copies_whose_order_would_matter_are_refused(copies: list[tuple[int, int]]) -> None:
    cache = KVCache(1, 3, 4, 1, 32, KVCacheConfig("bf16", "bf16"))
    with pytest.raises(ValueError, match="a target must be nothing else besides"):
        cache.copy_pages(copies)
