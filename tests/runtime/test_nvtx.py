"""NVTX ranges: drawn inside `recording`, closed whatever happens, nothing elsewhere."""

import sys
from types import SimpleNamespace

import pytest

from npmoe.runtime import nvtx


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reaches NVTX: names as ranges open, "end" as they close."""
    seen: list[str] = []
    fake = SimpleNamespace(RangePush=seen.append, RangePop=lambda: seen.append("end"))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(nvtx=fake)))
    return seen


def test_nothing_unless_recording(calls: list[str]) -> None:
    with nvtx.annotate("step"), nvtx.annotate("layer 0"):
        pass
    assert calls == []
    assert nvtx.annotate("a") is nvtx.annotate("b")


def test_ranges_nest(calls: list[str]) -> None:
    with nvtx.recording(), nvtx.annotate("step"):
        with nvtx.annotate("layer 0"):
            pass
        with nvtx.annotate("layer 1"):
            pass
    with nvtx.annotate("after"):
        pass
    assert calls == ["step", "layer 0", "end", "layer 1", "end", "end"]


def test_ranges_end_with_an_error(calls: list[str]) -> None:
    with pytest.raises(KeyError), nvtx.recording(), nvtx.annotate("step"):
        raise KeyError
    with nvtx.annotate("after"):
        pass
    assert calls == ["step", "end"]
