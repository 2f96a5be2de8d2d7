"""The check of tokens notices a wrong logit and a wrong token, and lets near ties pass."""

from unittest.mock import patch

import numpy as np
import pytest

from npmoe.bench import check
from npmoe.bench.check import PagedReference, Run, WrongTokens
from npmoe.bench.random_model import random_weights
from npmoe.bench.subject import named_shape
from npmoe.config import KVCacheConfig
from npmoe.models.layers import CausalLM

STEPS, BATCH = 3, 2


@pytest.fixture
def reference(tiny_shape: None) -> tuple[PagedReference, CausalLM, Run]:
    """After a prompt, with the run of a machine that is right in every bit."""
    subject = named_shape("tiny")
    model = CausalLM(subject.spec, random_weights(subject.parameters, subject.formats({}), "cpu"))
    with patch.object(check, "PROMPT", 6):
        right = PagedReference(subject, KVCacheConfig("fp4", "fp4"), BATCH)
    right.prompt(model)
    tokens, logits = [np.array([3, 4], np.int32)], []
    for i in range(STEPS):
        logits.append(right.forward(model, tokens[-1], right.lengths + np.int32(i)))
        tokens.append(logits[-1].argmax(axis=1).astype(np.int32))
    return right, model, Run(np.stack(tokens), np.stack([*logits, logits[-1]]))


def test_every_token_of_a_right_run_counts(reference) -> None:
    right, model, run = reference
    assert right.count_equal(model, run) == STEPS * BATCH


def test_a_wrong_logit(reference) -> None:
    right, model, run = reference
    run.logits[1, 0, 7] += 0.01 * np.abs(run.logits[1, 0]).max()
    with pytest.raises(WrongTokens, match="step 1, sequence 0: logits differ"):
        right.count_equal(model, run)


def test_a_logit_that_is_no_number(reference) -> None:
    right, model, run = reference
    run.logits[0, 1, 7] = np.nan
    with pytest.raises(WrongTokens, match="step 0, sequence 1: logits differ by nan"):
        right.count_equal(model, run)


def test_a_wrong_token(reference) -> None:
    right, model, run = reference
    worst = int(run.logits[2, 1].argmin())
    run.tokens[3, 1] = worst
    with pytest.raises(WrongTokens, match=f"step 2, sequence 1: the GPU chose {worst}, NumPy"):
        right.count_equal(model, run)


def test_a_near_tie_neither_counts_nor_fails(reference) -> None:
    right, model, run = reference
    row = run.logits[2, 0]
    second = int(np.argsort(row)[-2])
    run.tokens[3, 0] = second
    run.logits[2, 0, second] = row.max()  # an error of the whole margin
    with patch.object(check, "TOLERANCE", 1.0):
        assert right.count_equal(model, run) == STEPS * BATCH - 1
