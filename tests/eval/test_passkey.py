"""What is hidden, where, and what counts as found."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from npmoe.eval import passkey
from npmoe.eval.passkey import DIGITS, answer_scores, make_trials, measure_passkey
from npmoe.eval.text import TokenizedText
from npmoe.llm import LLM
from npmoe.sampling import SamplingParams
from tests.cli_fixtures import byte_tokens, make_checkpoint

END = 257
FILLER = "abcdefghij" * 40


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_checkpoint(tmp_path_factory.mktemp("eval") / "tiny")
    with LLM(folder, device="cpu", progress=False, max_num_seqs=1) as llm:
        yield llm


@pytest.fixture
def text() -> TokenizedText:
    return TokenizedText("t", [END, *(byte_tokens()[c] for c in FILLER), END], 401, END)


def test_prompts_fill_the_context_and_hide_the_key(llm: LLM, text: TokenizedText) -> None:
    assert llm.tokenizer is not None
    trials = make_trials(text, llm.tokenizer, 240, 2)
    assert len({trial.key for trial in trials}) == 2
    for trial, depth in zip(trials, (0.25, 0.75), strict=True):
        assert len(trial.prompt) + trial.room == 240
        assert trial.room == DIGITS + 2  # a token a byte: the space, the digits, and one more
        assert trial.prompt[0] == END
        assert END not in trial.prompt[1:]
        written = llm.tokenizer.decode(trial.prompt)
        before, needle, after = re.split(r"(\nThe pass key is .*\n)", written, maxsplit=1)
        key = trial.key
        assert needle == f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
        filler, question = after.split("\n")
        assert question == "What is the pass key? The pass key is"
        assert before + filler in FILLER * 2
        assert len(before) == int(depth * len(before + filler))
    assert trials == make_trials(text, llm.tokenizer, 240, 2)


def test_a_short_text_is_repeated(llm: LLM) -> None:
    assert llm.tokenizer is not None
    short = TokenizedText("t", [END, byte_tokens()["x"], END], 1, END)
    (trial,) = make_trials(short, llm.tokenizer, 200, 1)
    assert llm.tokenizer.decode(trial.prompt).count("x") > 50


def test_no_room(llm: LLM, text: TokenizedText) -> None:
    assert llm.tokenizer is not None
    assert make_trials(text, llm.tokenizer, 100, 2) == []
    assert measure_passkey([llm], text, [100], 2, quiet=True) == [[]]
    assert measure_passkey([llm], text, [240], 0, quiet=True) == [[]]


@pytest.mark.parametrize(
    ("answer", "found", "digits"),
    [
        (" 48213.", True, 1.0),
        ("48213", True, 1.0),
        (" 48313", False, 0.8),
        (" 4821", False, 0.8),
        ("the 48213", False, 0.0),
        ("", False, 0.0),
    ],
)
def test_what_counts(answer: str, found: bool, digits: float) -> None:
    assert answer_scores("48213", answer) == (found, digits)


def test_shares_of_trials(llm: LLM, text: TokenizedText, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two keys given back whole, the other with its first two digits."""
    assert llm.tokenizer is not None
    first, second = (trial.key for trial in make_trials(text, llm.tokenizer, 200, 2))
    answers = {first: f" {first}", second: f" {second[:2]}xyz"}
    monkeypatch.setattr(passkey, "_answer", lambda _, trial: answers[trial.key])
    (found,) = measure_passkey([llm], text, [200], 2, quiet=True)
    assert found == [{"context": 200, "trials": 2, "found": 0.5, "digits": 0.7}]


def test_the_answer_is_the_greedy_continuation(tmp_path: Path, text: TokenizedText) -> None:
    """Whatever the checkpoint asks of sampling."""
    folder = make_checkpoint(tmp_path / "tiny")
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 2.0, "repetition_penalty": 5.0}'
    )
    with LLM(folder, device="cpu", progress=False, max_num_seqs=1) as llm:
        assert llm.tokenizer is not None
        (trial,) = make_trials(text, llm.tokenizer, 200, 1)
        ids = list(trial.prompt)
        for _ in range(trial.room):
            ids.append(int(np.argmax(llm.forward(ids)[-1])))
        penalised = llm.generate(trial.prompt, SamplingParams(temperature=0, max_tokens=7)).text
        answer = passkey._answer(llm, trial)
        assert answer == llm.tokenizer.decode(ids[-trial.room :])
        assert answer != penalised
