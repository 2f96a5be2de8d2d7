"""cuda_src/attention.cu on the CPU: what it writes to the cache, and attention over the cache."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from npmoe.config import RopeConfig
from npmoe.formats.hadamard import hadamard
from npmoe.models.attention_split import AttentionSplit, head_groups
from npmoe.models.decode import EMPTY, KV_CODES
from npmoe.ops.attention import paged_attention_ref
from npmoe.ops.norm import rms_norm_ref
from npmoe.ops.quantize import (
    KVPages,
    from_kernel_pages,
    read_kv_pages,
    to_kernel_pages,
    write_kv_pages,
)
from npmoe.ops.rope import rope_cos_sin, rope_frequencies, rope_ref
from tests.cuda.build import kernel, launch
from tests.cuda.support import Memory, run_all_orders, same_bits
from tests.helpers import make_pages, relative_error

EPS = 1e-6
ERROR = dict.fromkeys(KV_CODES, 1e-3) | {"bf16": 3e-5}
"""By the format of values: weights have 11 bits, or 16 over bf16."""
ARRAYS = ("codes", "scales", "zeros")  # of KVPages
NO_PAGE = 1 << 28  # a block table's entry that may not be used


@dataclass(frozen=True)
class Heads:
    """What a kernel is specialised to."""

    heads: int
    kv_heads: int
    dim: int
    page: int
    k_format: str
    v_format: str
    group: int = 32
    rotated: bool = False
    window: int = 0
    sinks: bool = False


SPECIALISATIONS = (
    Heads(8, 1, 128, 16, "bf16", "bf16"),
    Heads(8, 2, 64, 16, "fp4", "fp4"),
    Heads(2, 2, 128, 32, "fp4", "bf16"),
    Heads(7, 1, 64, 8, "bf16", "fp4"),
    Heads(8, 1, 128, 64, "fp4", "fp4"),
)
LENGTHS = [  # blocks a cluster, splits, length of each sequence with its new token
    (1, 1, (1, 65)),  # no combining
    (1, 2, (700, 1555)),  # a warp's ring goes round
    (1, 4, (63, 128, 129, 257, 300)),
    (1, 32, (2, 640, 2048)),  # the last one fills all splits
    (8, 8, (1, 129)),  # a cluster whose blocks are idle, and one whose last has a token
    (8, 24, (128, 257, 700)),  # one cluster, two, and three with idle blocks in the last
]
SANITIZED = SPECIALISATIONS[2:4]
OTHER_FORMATS = (
    Heads(8, 2, 128, 16, "int8", "int4"),
    Heads(5, 1, 64, 8, "int8", "int8"),
    Heads(2, 2, 64, 16, "fp8", "nvfp4", 64),
    Heads(8, 1, 128, 32, "nvfp4", "fp8"),
    Heads(3, 1, 128, 16, "int4_asym", "int4_asym"),
    Heads(4, 2, 64, 12, "int4_asym", "mxfp4"),
    Heads(6, 1, 128, 16, "mxfp4", "int4_asym", 64),
    Heads(8, 2, 128, 16, "fp4", "fp4", 64),
    Heads(8, 2, 128, 16, "fp4", "fp4", 16),
    Heads(4, 1, 64, 16, "int8", "fp8", 16),
    Heads(8, 1, 128, 32, "nvfp4", "nvfp4", 16),
    Heads(2, 1, 128, 12, "int4_asym", "mxfp4", 16),
    Heads(4, 1, 64, 16, "mxfp4", "int4_asym", 16),
    Heads(4, 1, 64, 16, "int4", "int4", 16),
    Heads(8, 2, 128, 16, "fp4", "nvfp4", 128),
    Heads(4, 1, 128, 8, "mxfp4", "int4_asym", 128),
    Heads(2, 1, 128, 16, "int8", "fp8", 128),
    Heads(4, 2, 128, 16, "int4", "bf16", rotated=True),
    Heads(8, 1, 64, 16, "int8", "fp4", rotated=True),
    Heads(8, 1, 64, 16, "bf16", "bf16", window=128, sinks=True),
    Heads(4, 2, 128, 16, "fp4", "nvfp4", window=77),
    Heads(8, 2, 128, 32, "fp4", "fp4", window=500, sinks=True),
    Heads(2, 1, 64, 8, "int8", "int8", window=1),
    Heads(12, 1, 64, 16, "bf16", "bf16"),  # two groups of six
    Heads(32, 2, 128, 16, "bf16", "fp4", sinks=True),  # of eight
    Heads(11, 1, 64, 16, "fp8", "int4"),  # eleven of one
)
MARKS = {True: [pytest.mark.sanitize], False: []}


def by_heads(*heads: Heads) -> pytest.MarkDecorator:
    """`parametrize` over `h`."""
    marked = [pytest.param(h, marks=MARKS[h in SANITIZED]) for h in heads]
    return pytest.mark.parametrize("h", marked, ids=lambda h: "-".join(map(str, vars(h).values())))


@dataclass(frozen=True)
class Step:
    """One call: the cache holds all but the last token of each sequence."""

    cluster: int
    splits: int
    lengths: np.ndarray
    table: np.ndarray
    projected: np.ndarray
    norms: tuple[np.ndarray, np.ndarray] | None
    cos_sin: np.ndarray
    k_pages: KVPages
    v_pages: KVPages
    sinks: np.ndarray | None


def make_step(
    h: Heads, splits: int, lengths: tuple[int, ...], plain: bool, cluster: int = 1
) -> Step:
    """plain: no q/k norm, and a rotation by nothing."""
    rng = np.random.default_rng(sum(lengths) + h.dim)
    counts = [-(-length // h.page) for length in lengths]
    free = rng.permutation(sum(counts) + 2)  # two pages belong to no one
    table = np.full((len(lengths), max(counts) + 1), NO_PAGE, np.int32)
    for s, count in enumerate(counts):
        table[s, :count], free = free[:count], free[count:]
    cache = []
    for fmt in (h.k_format, h.v_format):
        pages = make_pages(fmt, sum(counts) + 2, h.kv_heads, h.dim, h.page, h.group)
        pages = replace(pages, rotated=h.rotated)
        for a in pages.arrays():
            a.view(np.uint8)[...] = 0xFF  # NaN in bf16, and in fp4's scales
        for s, length in enumerate(lengths):
            t = np.arange(length - 1)
            x = rng.standard_normal((len(t), h.kv_heads, h.dim)).astype(np.float32)
            write_kv_pages(pages, x, table[s, t // h.page] * h.page + t % h.page)
        cache.append(pages)
    rope = RopeConfig(rope_theta=1e4)
    frequencies, factor = rope_frequencies(rope, h.dim, 4096)
    positions = np.arange(max(lengths), dtype=np.int32) * (not plain)
    cos_sin = np.stack(rope_cos_sin(positions, frequencies, factor), axis=-1)
    norms = rng.uniform(0.5, 1.5, (2, h.dim)).astype(np.float32)
    projected = rng.standard_normal((len(lengths), (h.heads + 2 * h.kv_heads) * h.dim), np.float32)
    projected[0, -1] = 300  # an outlier in the new value
    return Step(
        *(cluster, splits, np.array(lengths, np.int32), table, projected),
        *(None if plain else (norms[0], norms[1]), cos_sin, *cache),
        rng.uniform(-2, 6, h.heads).astype(np.float32) if h.sinks else None,
    )


def run_attention(
    h: Heads, step: Step, fused: bool = True, warps: int | None = None, scattered: bool = False
) -> tuple[np.ndarray, KVPages, KVPages]:
    """out `[S, heads, D]`, of rotated pages still rotated, and the pages afterwards. fused:
    attention itself stores the new tokens, else store_kv before it. warps: of a block, if not as
    many as usual. scattered: all blocks run at once."""
    seqs = len(step.lengths)
    token_bytes = step.k_pages.token_bytes + step.v_pages.token_bytes
    split = AttentionSplit.fit(h.dim, token_bytes, step.v_pages.num_groups, 227 << 10)
    if warps is not None:
        split = replace(split, warps=warps, shared=split.shared // split.warps * warps)
    macros = dict(
        **{"HEADS": h.heads, "KV_HEADS": h.kv_heads, "HEAD_DIM": h.dim, "PAGE": h.page},
        **{"K_FORMAT": KV_CODES[h.k_format], "V_FORMAT": KV_CODES[h.v_format]},
        **split.macros() | {"LEAST": 16, "FUSED": int(fused), "CLUSTER": step.cluster},
        **{"SCATTERED": int(scattered), "KV_GROUP": h.group, "ROTATED": int(h.rotated)},
        **{"WINDOWED": int(h.window > 0)},
    )
    attention = kernel("attention", "attention", **macros)
    store_kv = kernel("attention", "store_kv", **macros)

    def run(memory: Memory, seed: int) -> tuple[np.ndarray, ...]:
        out = memory.output(seqs, h.heads, h.dim)
        groups = head_groups(h.heads, h.kv_heads)
        record = h.heads // groups * h.dim // step.cluster * 2
        empty = np.full((seqs, groups, step.splits, record), EMPTY, np.uint32)
        partial = memory.writable(empty)
        arrived = memory.writable(np.zeros((seqs, groups, step.cluster), np.uint32))
        given = map(to_kernel_pages, (step.k_pages, step.v_pages))
        k, v = ([memory.writable(a) for a in p.arrays()] for p in given)
        norms = (None, None) if step.norms is None else [*map(memory.read_only, step.norms)]
        projected, cos_sin = memory.read_only(step.projected), memory.read_only(step.cos_sin)
        pages = [*k, *[None] * (3 - len(k)), *v, *[None] * (3 - len(v))]
        where = memory.read_only(step.table), memory.read_only(step.lengths)
        if not fused:
            launch(
                *(store_kv, (2 * h.kv_heads, seqs), h.dim // 2, projected, norms[1], cos_sin),
                *(*pages, *where, step.table.shape[1], EPS),
                seed=seed,
            )
        launch(
            *(attention, (step.splits, groups, seqs), 32 * split.warps, out),
            *(projected, *norms, cos_sin, *pages, *where),
            *(None if step.sinks is None else memory.read_only(step.sinks), partial, arrived),
            *(step.table.shape[1], h.window, EPS, h.dim**-0.5),
            shared=split.shared,
            seed=seed,
        )
        assert (arrived == 0).all()
        assert (partial == EMPTY).all()
        return out, *k, *v

    out, *pages = run_all_orders(run)
    count = len(step.k_pages.arrays())
    k_pages = replace(step.k_pages, **dict(zip(ARRAYS, pages[:count], strict=False)))
    v_pages = replace(step.v_pages, **dict(zip(ARRAYS, pages[count:], strict=False)))
    return out, from_kernel_pages(k_pages), from_kernel_pages(v_pages)


def new_heads(h: Heads, step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v of the new tokens `[S, heads, D]` by the definitions."""
    split = [h.heads * h.dim, (h.heads + h.kv_heads) * h.dim]
    q, k, v = (
        a.reshape(len(step.lengths), -1, h.dim) for a in np.split(step.projected, split, axis=1)
    )
    cos, sin = np.moveaxis(step.cos_sin[step.lengths - 1], -1, 0)
    if step.norms is not None:
        q, k = (rms_norm_ref(a, w, EPS) for a, w in zip((q, k), step.norms, strict=True))
    return rope_ref(q, cos, sin), rope_ref(k, cos, sin), v


def written(step: Step, pages: KVPages, x: np.ndarray) -> KVPages:
    """The pages with the new tokens' x in their slots, by the formats' encoders."""
    arrays = (a.copy() for a in pages.arrays())
    result = replace(pages, **dict(zip(ARRAYS, arrays, strict=False)))
    size, last = pages.page_size, step.lengths - 1
    page = step.table[np.arange(len(last)), last // size]
    write_kv_pages(result, x, page * size + last % size)
    return result


def same_pages(a: KVPages, b: KVPages) -> bool:
    return all(same_bits(x, y) for x, y in zip(a.arrays(), b.arrays(), strict=True))


@by_heads(*SPECIALISATIONS)
@pytest.mark.parametrize(("cluster", "splits", "lengths"), LENGTHS)
def test_attention(h: Heads, cluster: int, splits: int, lengths: tuple[int, ...]) -> None:
    check_attention(h, cluster, splits, lengths)


@by_heads(*OTHER_FORMATS)
@pytest.mark.parametrize(("cluster", "splits", "lengths"), [LENGTHS[1], LENGTHS[5]])
def test_other_formats(h: Heads, cluster: int, splits: int, lengths: tuple[int, ...]) -> None:
    check_attention(h, cluster, splits, lengths)


def check_attention(h: Heads, cluster: int, splits: int, lengths: tuple[int, ...]) -> None:
    step = make_step(h, splits, lengths, plain=False, cluster=cluster)
    out, k_pages, v_pages = run_attention(h, step)
    q, k, v = new_heads(h, step)
    if h.rotated:
        check_new_tokens(step, v_pages, written(step, step.v_pages, v))
    else:
        assert same_pages(v_pages, written(step, step.v_pages, v))
    check_new_tokens(step, k_pages, written(step, step.k_pages, k))
    seqs = np.arange(len(lengths) + 1)
    expected = paged_attention_ref(
        *(q, k_pages, v_pages, step.table, seqs, step.lengths, h.dim**-0.5),
        *(h.window or None, step.sinks),
    )
    assert relative_error(hadamard(out) if h.rotated else out, expected) < ERROR[h.v_format]


def check_new_tokens(step: Step, pages: KVPages, by_definition: KVPages) -> None:
    """The last bit of a norm or of a rotation may move an element over the border between two
    codes, or, once in a great while, an amax to another scale: a few bytes."""
    new = pages.codes[0].size // pages.page_size * len(step.lengths)
    for got, want in zip(pages.arrays(), by_definition.arrays(), strict=True):
        assert (got.view(np.uint8) != want.view(np.uint8)).sum() <= 0.04 * new
    for s, length in enumerate(step.lengths):
        pairs = [read_kv_pages(p, step.table[s], length) for p in (pages, by_definition)]
        assert same_bits(pairs[0][:-1], pairs[1][:-1])
        assert relative_error(pairs[0][-1], pairs[1][-1]) < 0.2


@by_heads(*(h for h in OTHER_FORMATS if not h.rotated))
def test_one_key_that_takes_almost_all(h: Heads) -> None:
    """The first token scores 11 above all others, so that e^11 times as many weigh as much as it,
    and has a value 100 times smaller than theirs, which are small too. Weights that small keep
    fewer bits over values of 4 bits, which are several percent off themselves."""
    step, length = make_step(h, 1, (1500,), plain=True), 1500
    rng, table = np.random.default_rng(6), step.table[0]
    q = rng.standard_normal(h.dim).astype(np.float32)
    keys = np.zeros((length, h.kv_heads, h.dim), np.float32)
    keys[0] = q * (11 * h.dim**0.5 / (q @ q))
    values = (0.02 + 0.02 * rng.standard_normal(keys.shape)).astype(np.float32)
    values[0] /= 100
    step.projected[0] = np.concatenate([np.tile(q, h.heads), keys[-1].ravel(), values[-1].ravel()])
    t = np.arange(length - 1)
    for pages, x in ((step.k_pages, keys), (step.v_pages, values)):
        write_kv_pages(pages, x[:-1], table[t // h.page] * h.page + t % h.page)
    out, k_pages, v_pages = run_attention(h, step)
    q_heads, *_ = new_heads(h, step)
    seqs = np.arange(2)
    expected = paged_attention_ref(
        *(q_heads, k_pages, v_pages, step.table, seqs, step.lengths, h.dim**-0.5),
        *(h.window or None, step.sinks),
    )
    error = ERROR[h.v_format] if h.v_format in ("bf16", "int8", "fp8") else 1e-2
    assert relative_error(out, expected) < error


@pytest.mark.parametrize(("cluster", "splits"), [(1, 2), (2, 6), (4, 4), (8, 8)])
@by_heads(*SPECIALISATIONS)
def test_other_numbers_of_warps_attend_alike(h: Heads, cluster: int, splits: int) -> None:
    step = make_step(h, splits, (5, 700), plain=False, cluster=cluster)
    team = h.dim // 32
    one, two = (run_attention(h, step, warps=team * teams) for teams in (1, 2))
    assert relative_error(two[0], one[0]) < ERROR[h.v_format]
    assert all(same_pages(a, b) for a, b in zip(one[1:], two[1:], strict=True))


@pytest.mark.parametrize(("cluster", "splits"), [(1, 32), (2, 6), (8, 24)])
@by_heads(*SPECIALISATIONS)
def test_clusters_that_share_the_last_combination_attend_alike(
    h: Heads, cluster: int, splits: int
) -> None:
    step = make_step(h, splits, (5, 300, 700), plain=False, cluster=cluster)
    one, all_of_them = run_attention(h, step), run_attention(h, step, scattered=True)
    assert same_bits(one[0], all_of_them[0])


@pytest.mark.parametrize(("cluster", "splits"), [(1, 4), (8, 16)])
@by_heads(*SPECIALISATIONS)
def test_storing_first_changes_no_bit(h: Heads, cluster: int, splits: int) -> None:
    step = make_step(h, splits, (1, 17, 300), plain=False, cluster=cluster)
    together, apart = run_attention(h, step), run_attention(h, step, fused=False)
    assert same_bits(together[0], apart[0])
    assert all(same_pages(a, b) for a, b in zip(together[1:], apart[1:], strict=True))


SELDOM = (
    Heads(12, 1, 64, 16, "bf16", "bf16", window=100, sinks=True),
    Heads(18, 2, 64, 12, "bf16", "fp4", rotated=True, window=33),
)


@by_heads(*SELDOM)
def test_windows_of_many_heads_stored_first_or_scattered(h: Heads) -> None:
    """Several parts of a KV head's query heads, and windows that begin and end anywhere."""
    check_attention(h, 2, 4, (5, 300, 700))
    step = make_step(h, 4, (1, 33, 300), plain=False, cluster=2)
    usual = run_attention(h, step)
    assert same_bits(usual[0], run_attention(h, step, fused=False)[0])
    assert same_bits(usual[0], run_attention(h, step, scattered=True)[0])


@by_heads(*SPECIALISATIONS, *(h for h in OTHER_FORMATS if not h.rotated))
def test_written_keys_and_values_are_those_of_the_encoders(h: Heads) -> None:
    """Bit for bit, for values that are hard: zeros, halves of steps, tiny and huge groups."""
    step = make_step(h, 2, (1, 70, 130), plain=True)
    rng = np.random.default_rng(4)
    huge = 3e2 if "nvfp4" in (h.k_format, h.v_format) else 3e4
    step.projected[0, -1] = 0  # the outlier: 300 times huge is too much
    rows = step.projected.reshape(-1, 32)  # groups
    rows[1::7] = 0
    rows[2::7] = rng.integers(-24, 25, rows[2::7].shape) / 4
    rows[3::7] *= np.float32(1e-7)  # scales that are subnormal, or nothing, in fp16
    rows[4::7] *= np.float32(huge)
    rows[5::7, 3:] = -0.0
    _, k_pages, v_pages = run_attention(h, step)
    _, k, v = new_heads(h, step)
    assert same_pages(k_pages, written(step, step.k_pages, k))
    assert same_pages(v_pages, written(step, step.v_pages, v))
