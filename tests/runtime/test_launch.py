"""Launches noted instead of made, and made again later."""

from collections.abc import Iterator

import numpy as np
import pytest

from npmoe.ops.group import group_by_expert
from npmoe.runtime.graphs import Eager, Graph
from npmoe.runtime.launch import launch
from npmoe.runtime.nvrtc import collected, compile_all, kernel
from npmoe.runtime.recording import recorded
from tests.cuda.build import missing
from tests.cuda.fake_gpu import Array, FakeGPU, Stream, fake_gpu

MAGIC = 0x12345678


@pytest.fixture
def gpu() -> Iterator[FakeGPU]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with fake_gpu() as fake:
        yield fake


def arrays() -> tuple[Array, Array]:
    """A sink, and data in which `roofline` finds the word that it writes there."""
    data = np.zeros((512 * 8, 4), np.uint32).view(Array)
    data[0, 0] = MAGIC
    return np.zeros(1, np.uint32).view(Array), data


def test_recorded_launches_run_when_they_are_made_again(gpu: FakeGPU) -> None:
    sink, data = arrays()
    with Stream():
        with recorded() as launches:
            launch(kernel("roofline", "roofline"), (1,), 512, sink, data, len(data), shared=16)
        assert sink[0] == 0
        (noted,) = launches
        assert (noted.kernel.name, noted.grid, noted.threads) == ("roofline", (1,), 512)
        assert noted.arguments == (sink, data, len(data))
        assert noted.shared == 16
        noted.again()
        assert sink[0] == MAGIC
        launch(kernel("roofline", "roofline"), (1,), 512, sink, data, len(data))
    assert len(launches) == 1
    assert gpu.launched == ["roofline"] * 2


def test_kernels_asked_for_are_compiled_together(gpu: FakeGPU) -> None:
    with recorded() as launches, collected() as wanted:
        for _ in range(2):
            launch(kernel("roofline", "roofline"), (1,), 512)
        kernel("embed", "embed", K=64)
    assert wanted == {("roofline", "roofline", ()), ("embed", "embed", (("K", 64),))}
    assert len(launches) == 2
    assert gpu.functions == {}
    compile_all(wanted)
    assert sorted(name for name, _ in gpu.functions.values()) == ["embed", "roofline"]


@pytest.mark.parametrize(("kind", "ranges"), [(Graph, ()), (Eager, ("step", "roofline"))])
def test_a_replay_runs_again_on_what_is_there_now(
    kind: type, ranges: tuple[str, ...], gpu: FakeGPU
) -> None:
    sink, data = arrays()
    function = kernel("roofline", "roofline")
    replayed = kind(lambda: launch(function, (1,), 512, sink, data, len(data)))
    sink[0] = 0
    replayed.replay()
    assert sink[0] == MAGIC
    assert gpu.launched == ["roofline"] * 2
    assert gpu.ranges == [(), ranges]


def test_launches_of_numba_are_noted_too(gpu: FakeGPU) -> None:
    ids = np.array([[1, 2], [1, 0]], np.int32).view(Array)
    counts, offsets = (np.zeros(n, np.int32).view(Array) for n in (3, 4))
    pairs, workspace = (np.zeros(shape, np.int32).view(Array) for shape in (4, (1, 3)))
    with Stream():
        with recorded() as launches:
            group_by_expert(ids, 3, (counts, offsets, pairs), workspace)
        assert [x.kernel.name for x in launches] == ["_group_kernel"]
        assert gpu.launched == []
        for noted in launches:
            noted.again()
    assert pairs.tolist() == [3, 0, 2, 1]
    assert counts.tolist() == [1, 2, 1]
