"""Files into tokens and windows; each byte is a token in the fixture."""

from pathlib import Path

import pytest

from npmoe.eval.text import TokenizedText, Window, read_text
from npmoe.tokenizer import Tokenizer
from tests.cli_fixtures import byte_tokens, make_checkpoint

END = 257


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_checkpoint(tmp_path_factory.mktemp("eval") / "tiny"))


def write(folder: Path, raw: bytes) -> Path:
    path = folder / "text.txt"
    path.write_bytes(raw)
    return path


def spelled(text: str) -> list[int]:
    return [byte_tokens()[c] for c in text.replace("\n", "Ċ")]


def test_documents_are_between_two_blank_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = read_text(write(tmp_path, b"ab\n\nc\n\n\nd\n"), tokenizer, (END,))
    assert text.ids == [END, *spelled("ab\n\nc\n"), END, *spelled("d\n"), END]
    assert (text.name, text.size, text.num_targets) == ("text.txt", 10, len(text.ids) - 1)
    without = read_text(tmp_path / "text.txt", tokenizer, ())
    assert without.ids == spelled("ab\n\nc\nd\n")


def test_bytes_of_a_part(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = read_text(write(tmp_path, "aé\n\n\nb".encode()), tokenizer, (END,))
    assert text.num_bytes(tokenizer, 3) == len("aé".encode())
    assert text.num_bytes(tokenizer, text.num_targets) == 7


def test_windows_do_not_overlap() -> None:
    text = TokenizedText("t", [9, 1, 2, 3, 4, 5, 6], 6, 9)
    assert list(text.windows(4, 6)) == [
        Window([9, 1, 2, 3], [1, 2, 3, 4]),
        Window([4, 5], [5, 6]),
    ]
    assert list(text.windows(4, 3)) == [Window([9, 1, 2], [1, 2, 3])]


@pytest.mark.parametrize(
    ("raw", "words"),
    [(b"", "is empty"), (b" \n\n", "is empty"), (b"ab\xff", "is not UTF-8"), (None, "cannot be")],
)
def test_bad_files(raw: bytes | None, words: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "absent" if raw is None else write(tmp_path, raw)
    with pytest.raises(ValueError, match=words):
        read_text(path, tokenizer, (END,))


def test_a_single_token_predicts_nothing(tmp_path: Path) -> None:
    class OneToken:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1]

    with pytest.raises(ValueError, match="nothing to predict"):
        read_text(write(tmp_path, b"a"), OneToken(), ())  # type: ignore[arg-type]
