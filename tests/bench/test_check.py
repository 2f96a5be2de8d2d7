"""The check of tokens notices a wrong logit and a wrong token, and lets near ties pass: of the
largest logits, and of a router whose next expert gives what the GPU has."""

from unittest.mock import patch

import numpy as np
import pytest

from npmoe.bench import check
from npmoe.bench.check import Checked, PagedReference, Run, WrongTokens
from npmoe.bench.near_ties import WatchedRouter
from npmoe.bench.random_model import prepare, random_matrix, random_vector
from npmoe.bench.subject import named_shape
from npmoe.config import KVCacheConfig
from npmoe.models.layers import CausalLM
from npmoe.models.parameters import VECTOR, Parameter

STEPS, BATCH, LAYERS = 4, 2, 2
Case = tuple[PagedReference, CausalLM, Run]


def make_case(ties: bool, next_expert_at: tuple[tuple[int, int, int], ...] = ()) -> Case:
    """After a prompt, with the run of a machine that is right in every bit, but that it takes the
    next expert at each (step, layer, sequence). ties: router weights are 0, so that all experts
    are tied and a token takes those of the lowest ids; or else random."""
    subject = named_shape("tiny")
    formats, rng = subject.formats({}), np.random.default_rng(0)

    def weight(p: Parameter) -> object:
        if p.part == VECTOR:
            return random_vector(p, rng)
        w = prepare(p, random_matrix(p, formats[p.part], rng), "cpu")
        return w.map_arrays(np.zeros_like) if ties and p.name.endswith("router") else w

    model = CausalLM(subject.spec, {p.name: weight(p) for p in subject.parameters})
    with patch.object(check, "PROMPT", 6):
        right = PagedReference(subject, KVCacheConfig("fp4", "fp4"), BATCH)
    right.prompt(model)
    tokens, logits = [np.array([3, 4], np.int32)], []
    for i in range(STEPS):
        takes_next = np.zeros((LAYERS, BATCH), bool)
        for step, layer, sequence in next_expert_at:
            takes_next[layer, sequence] |= step == i
        machine = CausalLM(subject.spec, model.weights, WatchedRouter(takes_next))
        logits.append(right.forward(machine, tokens[-1], right.lengths + np.int32(i)))
        tokens.append(logits[-1].argmax(axis=1).astype(np.int32))
    return right, model, Run(np.stack(tokens), np.stack([*logits, logits[-1]]))


@pytest.fixture
def reference(tiny_shape: None) -> Case:
    return make_case(ties=False)


def test_every_token_of_a_right_run_counts(reference: Case) -> None:
    right, model, run = reference
    assert right.count_equal(model, run) == Checked(equal=STEPS * BATCH, near_tied=0)


def test_a_wrong_logit(reference: Case) -> None:
    right, model, run = reference
    run.logits[1, 0, 7] += 0.01 * np.abs(run.logits[1, 0]).max()
    with pytest.raises(WrongTokens, match="step 1, sequence 0: logits differ"):
        right.count_equal(model, run)


def test_a_logit_that_is_no_number(reference: Case) -> None:
    right, model, run = reference
    run.logits[0, 1, 7] = np.nan
    with pytest.raises(WrongTokens, match="step 0, sequence 1: logits differ by nan"):
        right.count_equal(model, run)


def test_a_wrong_token(reference: Case) -> None:
    right, model, run = reference
    worst = int(run.logits[2, 1].argmin())
    run.tokens[3, 1] = worst
    with pytest.raises(WrongTokens, match=f"step 2, sequence 1: the GPU chose {worst}, NumPy"):
        right.count_equal(model, run)


def test_a_near_tie_neither_counts_nor_fails(reference: Case) -> None:
    right, model, run = reference
    row = run.logits[3, 0]
    second = int(np.argsort(row)[-2])
    run.tokens[4, 0] = second
    run.logits[3, 0, second] = row.max()  # an error of the whole margin
    with patch.object(check, "TOLERANCE", 1.0):
        assert right.count_equal(model, run) == Checked(STEPS * BATCH - 1, near_tied=0)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_near_tied_router_is_counted_apart(layer: int, tiny_shape: None) -> None:
    """Layer 0's choice changes what layer 1 stores: later tokens are compared all the same."""
    right, model, run = make_case(ties=True, next_expert_at=((1, layer, 0),))
    assert right.count_equal(model, run) == Checked(STEPS * BATCH - 1, near_tied=1)


@pytest.mark.parametrize(("step", "sequence"), [(1, 0), (1, 1), (2, 0)])
def test_a_near_tied_router_hides_no_wrong_logit(
    step: int, sequence: int, tiny_shape: None
) -> None:
    """Neither of the same token, nor of another whose router is near-tied as well."""
    right, model, run = make_case(ties=True, next_expert_at=((1, 0, 0),))
    run.logits[step, sequence, 7] += 0.01 * np.abs(run.logits[step, sequence]).max()
    with pytest.raises(WrongTokens, match=f"step {step}, sequence {sequence}: logits differ"):
        right.count_equal(model, run)


def test_a_near_tied_router_hides_no_wrong_token(tiny_shape: None) -> None:
    right, model, run = make_case(ties=True, next_expert_at=((3, 0, 0),))
    worst = int(run.logits[3, 0].argmin())
    run.tokens[4, 0] = worst
    with pytest.raises(WrongTokens, match=f"step 3, sequence 0: the GPU chose {worst}, NumPy"):
        right.count_equal(model, run)


def test_another_expert_where_no_router_is_near_tied(tiny_shape: None) -> None:
    """The last expert is 0.38 of the largest router logit ahead of the next one there."""
    right, model, run = make_case(ties=False, next_expert_at=((1, 0, 0),))
    with pytest.raises(WrongTokens, match="step 1, sequence 0: logits differ"):
        right.count_equal(model, run)


def test_too_many_near_tied_routers(tiny_shape: None) -> None:
    right, model, run = make_case(ties=True, next_expert_at=((1, 0, 0), (2, 1, 1)))
    with pytest.raises(WrongTokens, match="2 of 8 tokens agree only if NumPy takes the other"):
        right.count_equal(model, run)
