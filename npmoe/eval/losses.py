"""The same windows through several caches, in step, chunk by chunk."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing

import numpy as np

from npmoe.eval.distributions import Tally, score
from npmoe.eval.text import Window
from npmoe.llm import LLM
from npmoe.runtime.failures import named_errors
from npmoe.runtime.progress import progress


def measure_losses(
    llms: Sequence[LLM], windows: Iterable[Window], edges: tuple[int, ...], quiet: bool = False
) -> list[Tally]:
    """Scores of each LLM against the first, which is the reference.

    Logits of two LLMs and one prefill chunk are held at a time. Every position reads keys and
    values as its cache holds them, those of its own chunk too.
    """
    tallies = [Tally(edges) for _ in llms]
    for window in progress(list(windows), "windows", quiet):
        with named_errors():
            _add_window(llms, window, tallies)
    return tallies


def _add_window(llms: Sequence[LLM], window: Window, tallies: list[Tally]) -> None:
    with ExitStack() as stack:
        first, *others = [
            stack.enter_context(closing(llm.engine.forward_chunks(window.ids))) for llm in llms
        ]
        start = 0
        for reference in first:
            targets = np.array(window.targets[start : start + len(reference)])
            tallies[0].add(start, score(reference, reference, targets))
            for chunks, tally in zip(others, tallies[1:], strict=True):
                tally.add(start, score(reference, next(chunks), targets))
            start += len(reference)
        assert not any(list(chunks) for chunks in others), "as many positions as the reference"
