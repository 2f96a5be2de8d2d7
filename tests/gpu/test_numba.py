"""The Numba CUDA kernels on a GPU: their NumPy definitions, the choice in CUDA C, graph capture."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npmoe.config import KVCacheConfig
from npmoe.kv.storage import KVCache
from npmoe.kv.tables import BlockTables
from npmoe.ops.group import group_by_expert, group_by_expert_ref, group_workspace
from npmoe.ops.paging import WRITE, apply_page_commands, map_slots, map_slots_ref
from npmoe.ops.route import top_k, top_k_ref
from npmoe.runtime.device import compute_capability, cupy
from npmoe.runtime.graphs import Graph
from npmoe.runtime.resources import folder
from tests.cases import KV_PAIRS
from tests.cuda.test_route import hard_logits
from tests.helpers import by_name, normal
from tests.router_cases import ROUTERS, RouterCase

pytestmark = [pytest.mark.gpu, pytest.mark.driver]
CHOOSE = Path(__file__).parents[1] / "cuda" / "choose.cu"


def on_gpu(*arrays: np.ndarray | None) -> list[Any]:
    return [None if a is None else cupy().asarray(a) for a in arrays]


@pytest.mark.parametrize("num_tokens", [0, 1, 300])
@by_name(ROUTERS)
def test_the_router_chooses_as_defined(case: RouterCase, num_tokens: int) -> None:
    arguments = case.k, case.renormalize, case.rule
    logits, *biases = case.arrays(num_tokens)
    expected_weights, expected_ids = top_k_ref(logits, *arguments, *biases)
    (device_logits,) = on_gpu(logits)
    weights, ids = top_k(device_logits, *arguments, *on_gpu(*biases))
    np.testing.assert_array_equal(ids.get(), expected_ids)
    np.testing.assert_allclose(weights.get(), expected_weights, rtol=2e-6, atol=1e-37)


@pytest.mark.parametrize("num_experts", [1, 31, 512, 1024])
def test_the_router_takes_any_number_of_experts(num_experts: int) -> None:
    logits, k = normal(40, num_experts, seed=num_experts), min(num_experts, 22)
    (device_logits,) = on_gpu(logits)
    weights, ids = top_k(device_logits, k, False)
    expected_weights, expected_ids = top_k_ref(logits, k, False)
    np.testing.assert_array_equal(ids.get(), expected_ids)
    np.testing.assert_allclose(weights.get(), expected_weights, rtol=2e-6)


@pytest.mark.parametrize(
    ("experts", "k", "renormalize"), [(128, 8, True), (60, 4, False), (8, 2, True), (64, 1, True)]
)
def test_two_routers_choose_alike(experts: int, k: int, renormalize: bool) -> None:
    xp = cupy()
    logits = np.concatenate([hard_logits(experts), 4 * normal(2000, experts)])
    (device_logits,) = on_gpu(logits)
    weights, ids = top_k(device_logits, k, renormalize)
    macros = {"EXPERTS": experts, "TOP_K": k, "RENORMALIZE": int(renormalize)}
    options = ["-std=c++17", f"-arch=sm_{compute_capability()}", f"-I{folder('cuda_src')}"]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    module = xp.RawModule(code=CHOOSE.read_text(), options=tuple(options))
    c_ids, c_weights = xp.empty_like(ids), xp.empty_like(weights)
    module.get_function("choose")((len(logits),), (64,), (c_ids, c_weights, device_logits))
    np.testing.assert_array_equal(ids.get(), c_ids.get())
    # Two compilers, two exponentials: each within 2 ulp, their quotients within a few more.
    np.testing.assert_array_max_ulp(weights.get(), c_weights.get(), maxulp=8)


GROUPINGS = [(0, 8, 5), (1, 8, 128), (8, 8, 64), (8, 32, 512), (33, 5, 7), (70, 4, 16)]
GROUPINGS += [(3000, 4, 1), (8192, 8, 128), (8192, 8, 512)]


@pytest.mark.parametrize(("num_tokens", "k", "num_experts"), GROUPINGS)
def test_pairs_are_grouped_as_defined_every_time(num_tokens: int, k: int, num_experts: int) -> None:
    rng = np.random.default_rng(num_tokens)
    topk_ids = rng.integers(-1, num_experts + 1, (num_tokens, k)).astype(np.int32)
    (device_ids,) = on_gpu(topk_ids)
    expected = group_by_expert_ref(topk_ids, num_experts)
    for _ in range(3):
        found = group_by_expert(device_ids, num_experts)
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_array_equal(got.get(), want)


def test_block_tables_follow_the_host() -> None:
    num_rows, max_pages, empty = 9, 700, 12345
    tables = BlockTables(num_rows, max_pages, "cuda", empty)
    rng = np.random.default_rng(0)
    for _ in range(60):
        for _ in range(rng.integers(1, 90)):
            row, other = rng.choice(num_rows, 2, replace=False).tolist()
            pages = rng.integers(0, 10**6, rng.integers(1, max_pages)).tolist()
            known = len(tables.pages(row))
            match rng.integers(4):
                case 0:
                    tables.assign(row, pages)
                case 1:
                    tables.append(row, pages[: max_pages - known])
                case 2:
                    tables.truncate(row, known // 2)
                case _:
                    tables.fork(row, other, known - known // 3)
        tables.flush()
        found = tables.block_table.get()
        for row in range(num_rows):
            pages = tables.pages(row)
            assert found[row].tolist() == pages + [empty] * (max_pages - len(pages))


@pytest.mark.parametrize("num_tokens", [0, 1, 5000])
def test_slots_are_as_defined(num_tokens: int) -> None:
    rng = np.random.default_rng(1)
    block_table = rng.integers(-1, 10**6, (100, 50)).astype(np.int32)
    cu_seqlens_q = np.sort(rng.integers(0, 4900, 101)).astype(np.int32)
    positions = rng.integers(-2, 50 * 16 + 9, num_tokens).astype(np.int32)
    table, where, edges = on_gpu(block_table, positions, cu_seqlens_q)
    expected = map_slots_ref(block_table, positions, cu_seqlens_q, 16)
    np.testing.assert_array_equal(map_slots(table, where, edges, 16).get(), expected)


@pytest.mark.parametrize("pair", KV_PAIRS, ids="/".join)
def test_pages_of_every_format_are_copied(pair: tuple[str, str]) -> None:
    xp = cupy()
    cache = KVCache(3, 6, 16, 2, 64, KVCacheConfig(*pair), "cuda")
    arrays = [a for layer in cache.layers for pages in layer for a in pages.arrays()]
    before = []
    for seed, a in enumerate(arrays):
        raw = np.random.default_rng(seed).integers(0, 256, a.nbytes).astype(np.uint8)
        a[...] = xp.asarray(raw.view(a.dtype).reshape(a.shape))
        before.append(a.get())
    cache.copy_pages([(0, 4), (3, 1)])
    cache.copy_page(2, 5)
    for a, was in zip(arrays, before, strict=True):
        assert a.get().tobytes() == was[[0, 3, 2, 3, 0, 2]].tobytes()


class Step:
    """Router, grouping, page commands and slots on buffers that live on."""

    def __init__(self, num_tokens: int, num_experts: int, k: int) -> None:
        xp = cupy()

        def empty(*shape: int) -> Any:
            return xp.empty(shape, np.int32)

        self.logits = xp.zeros((num_tokens, num_experts), np.float32)
        self.num_experts, self.k = num_experts, k
        self.choice = xp.empty((num_tokens, k), np.float32), empty(num_tokens, k)
        sizes = (num_experts, num_experts + 1, num_tokens * k)
        counts, offsets, pairs = (empty(size) for size in sizes)
        self.groups = counts, offsets, pairs
        self.workspace = empty(*group_workspace(num_tokens * k, num_experts))
        self.table = xp.full((1, 8), -1, np.int32)
        self.commands = xp.zeros((4, 5), np.int32)
        self.page_ids = xp.zeros(8, np.int32)
        self.positions = xp.arange(num_tokens, dtype=np.int32)
        self.edges = xp.asarray([0, num_tokens], np.int32)
        self.slots = empty(num_tokens)
        xp.cuda.Stream.null.synchronize()

    def enqueue(self) -> None:
        top_k(self.logits, self.k, True, out=self.choice)
        group_by_expert(self.choice[1], self.num_experts, self.groups, self.workspace)
        apply_page_commands(self.table, self.commands, self.page_ids)
        map_slots(self.table, self.positions, self.edges, 16, self.slots)


def test_a_graph_replays_the_kernels_on_new_values() -> None:
    step = Step(70, 16, 4)
    graph = Graph(step.enqueue)
    for seed in range(3):
        logits = normal(70, 16, seed=seed)
        pages = np.random.default_rng(seed).permutation(8).astype(np.int32)
        with graph.stream:
            step.logits.set(logits)
            step.commands.set(np.array([(WRITE, 0, 0, 8, 0)] + [(0,) * 5] * 3, np.int32))
            step.page_ids.set(pages)
            graph.replay()
        graph.stream.synchronize()
        _, expected_ids = top_k_ref(logits, 4, True)
        np.testing.assert_array_equal(step.choice[1].get(), expected_ids)
        for got, want in zip(step.groups, group_by_expert_ref(expected_ids, 16), strict=True):
            np.testing.assert_array_equal(got.get(), want)
        positions = np.arange(70)
        np.testing.assert_array_equal(
            step.slots.get(), pages[positions // 16] * 16 + positions % 16
        )


def test_nothing_is_allocated_where_buffers_are_given() -> None:
    step = Step(70, 16, 4)
    step.enqueue()
    sizes = []

    class Watch(cupy().cuda.MemoryHook):  # type: ignore[misc]
        name = "Watch"

        def malloc_preprocess(self, **kwargs: Any) -> None:
            sizes.append(kwargs["size"])

    with Watch():
        cupy().empty(1000, np.uint8)
        assert sizes == [1000], "the watch sees an allocation"
        step.enqueue()
    assert sizes == [1000]
