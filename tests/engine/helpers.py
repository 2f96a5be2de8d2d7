"""Sequences, text streams and a tokenizer double, without a model."""

from npmoe.engine.request import Sequence
from npmoe.engine.text import TextStream
from npmoe.sampling import SamplingParams


class Pieces:
    """Stands for a StreamDecoder: token i is the i-th of the given texts."""

    def __init__(self, *texts: str, last: str = "") -> None:
        self.texts, self.last = texts, last

    def push(self, token_id: int) -> str:
        return self.texts[token_id]

    def flush(self) -> str:
        return self.last


def make_sequence(token_ids: list[int], **params: int) -> Sequence:
    """A queued prompt with resolved params and no text."""
    resolved = SamplingParams(**params).resolve({})  # type: ignore[arg-type]
    return Sequence(list(token_ids), len(token_ids), resolved, 0, TextStream(None, ()))
