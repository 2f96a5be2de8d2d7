"""The text that is evaluated: a UTF-8 file as a stream of tokens, cut into windows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from npmoe.tokenizer import Tokenizer


@dataclass(frozen=True)
class Window:
    """Tokens that are read together, and the token that follows each."""

    ids: list[int]
    targets: list[int]


@dataclass(frozen=True)
class TokenizedText:
    """ids: separator, document, separator, ..., separator, where the model has a separator (its end
    token); documents are those between two blank lines. size: bytes of the whole file."""

    name: str
    ids: list[int]
    size: int
    separator: int | None = None

    @property
    def num_targets(self) -> int:
        """Tokens that have one before them."""
        return len(self.ids) - 1

    def windows(self, length: int, count: int) -> Iterator[Window]:
        """The first `count` predictions in windows that do not overlap, the last one shorter."""
        for start in range(0, count, length):
            stop = min(start + length, count)
            yield Window(self.ids[start:stop], self.ids[start + 1 : stop + 1])

    def num_bytes(self, tokenizer: Tokenizer, count: int) -> int:
        """Bytes of the first `count` targets: the file's where these are all."""
        if count == self.num_targets:
            return self.size
        return decoded_bytes(tokenizer, self.ids[1 : count + 1])


def decoded_bytes(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Bytes of the text that tokens stand for; separators have none."""
    return len(tokenizer.decode(ids).encode())


def read_text(path: Path, tokenizer: Tokenizer, end_ids: Sequence[int]) -> TokenizedText:
    """Raises ValueError for a file that cannot be read, is not UTF-8, or has nothing to predict."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ValueError(f"text {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"text {path} is not UTF-8: {error}") from None
    if not text.strip():
        raise ValueError(f"text {path} is empty: pass some text")
    between = list(end_ids[:1])
    ids = list(between)
    for document in text.split("\n\n\n"):
        ids += tokenizer.encode(document.strip("\n") + "\n", add_special_tokens=False)
        ids += between
    if len(ids) < 2:
        raise ValueError(f"text {path} has one token: there is nothing to predict")
    return TokenizedText(path.name, ids, path.stat().st_size, *between)
