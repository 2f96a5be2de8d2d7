"""The text of a growing completion, cut at stop strings."""

from collections.abc import Sequence

from npmoe.tokenizer import StreamDecoder


class TextStream:
    """Collects text pieces; holds back what may be the beginning of a stop string."""

    def __init__(self, decoder: StreamDecoder | None, stops: Sequence[str]) -> None:
        """decoder None (no tokenizer): the text stays empty."""
        self._decoder = decoder
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._text = ""
        self._given = 0
        self.stopped = False

    def push(self, token_id: int, may_stop: bool = True) -> None:
        """Adds a token; sets `stopped` when the text now holds a stop string."""
        if self._decoder is not None:
            self._add(self._decoder.push(token_id), may_stop)

    def finish(self) -> None:
        """Adds what the decoder still held back."""
        if self._decoder is not None and not self.stopped:
            self._add(self._decoder.flush(), True)
            self._longest = 0

    def _add(self, piece: str, may_stop: bool) -> None:
        old = len(self._text)
        self._text += piece
        if not may_stop:
            return
        # A stop string counts when its end is new: nothing of it has been given away then.
        places = [self._text.find(s, max(0, old - len(s) + 1)) for s in self._stops]
        found = [place for place in places if place >= 0]
        if found:
            self._text = self._text[: min(found)]
            self._longest = 0
            self.stopped = True

    @property
    def text(self) -> str:
        """All text so far; final after `finish`."""
        return self._text

    def take(self) -> str:
        """The text since the last call that can no longer be cut away."""
        safe = len(self._text)
        for length in range(min(self._longest - 1, safe - self._given), 0, -1):
            tail = self._text[safe - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                safe -= length
                break
        piece = self._text[self._given : safe]
        self._given = safe
        return piece
