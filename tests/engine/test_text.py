"""Stop strings: where the text is cut, and what may be given away before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npmoe.engine.text import TextStream
from tests.engine.helpers import Pieces


def run(
    texts: list[str], stops: list[str], last: str = "", free: int = 0
) -> tuple[str, list[str], bool]:
    """Pushes pieces until the stream stops; whole text, what `take` gave each time, stopped.

    The first `free` pieces may not stop it.
    """
    stream = TextStream(Pieces(*texts, last=last), stops)  # type: ignore[arg-type]
    taken = []
    for i in range(len(texts)):
        stream.push(i, may_stop=i >= free)
        taken.append(stream.take())
        if stream.stopped:
            return stream.text, taken, True
    stream.finish()
    taken.append(stream.take())
    return stream.text, taken, stream.stopped


def test_without_stops_everything_is_given_at_once() -> None:
    assert run(["a", "", "bc"], []) == ("abc", ["a", "", "bc", ""], False)


def test_the_text_ends_before_the_stop() -> None:
    assert run(["one ", "END", " two"], ["END"]) == ("one ", ["one ", ""], True)


def test_a_stop_inside_a_piece() -> None:
    assert run(["one END two"], ["END"]) == ("one ", ["one "], True)


def test_a_stop_across_pieces_is_held_back() -> None:
    assert run(["a", "b<", "e", "nd", ">c"], ["<end>"]) == ("ab", ["a", "b", "", "", ""], True)


def test_a_prefix_that_leads_nowhere_is_given_later() -> None:
    assert run(["b<", "en", "x", "<"], ["<end>"], last="!") == (
        "b<enx<!",
        ["b", "", "<enx", "", "<!"],
        False,
    )


def test_a_prefix_of_itself() -> None:
    assert run(["aa", "a", "b"], ["aab"]) == ("a", ["", "a", ""], True)


def test_the_earliest_stop_wins() -> None:
    assert run(["x", "abcd"], ["cd", "bc"])[0] == "xa"
    assert run(["ab", "cd"], ["d", "abcd"])[0] == ""


def test_a_stop_that_the_flushed_rest_completes() -> None:
    assert run(["ab"], ["b\ufffd"], last="\ufffd") == ("a", ["a", ""], True)


def test_a_stop_that_ended_too_early_to_count_stays() -> None:
    """Nor is it found afterwards by a later piece, whether the text was taken or not."""
    long = "x" * 30
    for texts in (["ab", "c", "d"], ["a", "b", "cd"]):
        free = 1 if texts[0] == "ab" else 2
        text, taken, stopped = run(texts, ["ab", long], free=free)
        assert (text, "".join(taken), stopped) == ("abcd", "abcd", False)
        untaken = TextStream(Pieces(*texts), ["ab", long])  # type: ignore[arg-type]
        for i in range(len(texts)):
            untaken.push(i, may_stop=i >= free)
        untaken.finish()
        assert (untaken.text, untaken.stopped) == ("abcd", False)


def test_a_stop_that_begins_early_and_ends_late_counts() -> None:
    assert run(["ab", "c"], ["abc"], free=1) == ("", ["", ""], True)


def test_without_a_decoder_there_is_no_text() -> None:
    stream = TextStream(None, ["a"])
    stream.push(0)
    stream.finish()
    assert (stream.text, stream.take(), stream.stopped) == ("", "", False)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    st.integers(0, 3),
)
def test_pieces_taken_add_up_to_the_text(texts: list[str], stops: list[str], free: int) -> None:
    text, taken, stopped = run(texts, stops, free=free)
    assert "".join(taken) == text
    # The definition, naively: the first piece with which a stop ends cuts the text.
    whole = ""
    for i, piece in enumerate([*texts, ""]):
        old, whole = len(whole), whole + piece
        starts = [
            p
            for stop in stops
            for p in range(len(whole))
            if whole.startswith(stop, p) and p + len(stop) > old
        ]
        if starts and free <= i < len(texts):
            assert (text, stopped) == (whole[: min(starts)], True)
            return
    assert (text, stopped) == ("".join(texts), False)


@pytest.mark.parametrize("stop", ["ab", "b", "abab"])
def test_nothing_of_a_stop_is_ever_given(stop: str) -> None:
    for texts in (list("abaabab"), ["aba", "abab"], ["abaabab"]):
        text, taken, _ = run(texts, [stop])
        assert stop not in "".join(taken)
        assert text == "abaabab"[: "abaabab".find(stop)]
