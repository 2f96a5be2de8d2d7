"""Passkey retrieval: a number hidden in filler text and asked for at the end.

The filler is the evaluated text from another place on in each trial, its end tokens left out. The
number is hidden at depths spread evenly over the trials: (i + 1/2) / trials of the filler. A prompt
with its answer takes the whole context.

A trial is found if the greedy continuation, spaces at its start aside, begins with the key. Its
share of digits is how many of the key's digits the continuation has in the same place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npmoe.eval.text import TokenizedText
from npmoe.llm import LLM
from npmoe.runtime.progress import progress
from npmoe.sampling import SamplingParams
from npmoe.tokenizer import Tokenizer

DIGITS = 5
NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class Trial:
    """prompt: token ids. room: tokens that the answer may take."""

    key: str
    prompt: list[int]
    room: int


def make_trials(text: TokenizedText, tokenizer: Tokenizer, context: int, count: int) -> list[Trial]:
    """Trials of prompts that fill a context with their answers; the same at every call.

    None where the context has no room for filler.
    """

    def encode(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False)

    start = tokenizer.encode("")
    if not start and text.separator is not None:
        start = [text.separator]
    filler = np.array([i for i in text.ids if i != text.separator])
    keys = np.random.default_rng(0).integers(10 ** (DIGITS - 1), 10**DIGITS, count).astype(str)
    trials = []
    for i, key in enumerate(keys.tolist()):
        needle, question = encode(NEEDLE.format(key=key)), encode(QUESTION)
        room = len(encode(f" {key}")) + 1
        length = context - len(start) - len(needle) - len(question) - room
        if length <= 0:
            return []
        around = np.resize(np.roll(filler, -i * length), length).tolist()
        at = int((i + 0.5) / count * length)
        prompt = [*start, *around[:at], *needle, *around[at:], *question]
        trials.append(Trial(key, prompt, room))
    return trials


def answer_scores(key: str, answer: str) -> tuple[bool, float]:
    """Whether the answer begins with the key, and its share of digits."""
    given = answer.lstrip()
    same = sum(a == b for a, b in zip(key, given, strict=False))
    return given.startswith(key), same / len(key)


def measure_passkey(
    llms: Sequence[LLM],
    text: TokenizedText,
    contexts: Sequence[int],
    count: int,
    quiet: bool = False,
) -> list[list[dict[str, Any]]]:
    """Of each LLM, one record a context: shares of keys found and of digits over `count` trials."""
    tokenizer = llms[0].tokenizer
    assert tokenizer is not None
    by_context = {context: make_trials(text, tokenizer, context, count) for context in contexts}
    jobs = [(llm, context) for context in contexts if by_context[context] for llm in llms]
    results: dict[LLM, list[dict[str, Any]]] = {llm: [] for llm in llms}
    for llm, context in progress(jobs, "passkeys", quiet):
        scores = [answer_scores(trial.key, _answer(llm, trial)) for trial in by_context[context]]
        found, digits = np.mean(scores, axis=0).tolist()
        record = {"context": context, "trials": count, "found": found, "digits": digits}
        results[llm].append(record)
    return [results[llm] for llm in llms]


def _answer(llm: LLM, trial: Trial) -> str:
    """The greedy continuation, without what the checkpoint asks of sampling."""
    params = SamplingParams(
        temperature=0, repetition_penalty=1.0, max_tokens=trial.room, ignore_eos=True
    )
    return llm.generate(trial.prompt, params).text
