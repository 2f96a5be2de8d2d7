"""Progress bars, messages, and finding the package's folders."""

from pathlib import Path

import pytest

from npmoe.runtime.progress import progress, say
from npmoe.runtime.resources import folder


def test_messages_go_to_standard_error_and_can_be_switched_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say("hello")
    say("not this", quiet=True)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "npmoe: hello\n")


@pytest.mark.parametrize("quiet", [True, False])
def test_progress_passes_every_item_on_and_is_silent_off_a_terminal(
    capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    assert list(progress(iter("abc"), "letters", quiet)) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


def test_folders_lie_in_the_checkout_or_in_the_package() -> None:
    root = Path(__file__).parents[2]
    assert folder("npmoe") == root / "npmoe"
    assert folder("no_such_folder") == root / "npmoe" / "no_such_folder"
