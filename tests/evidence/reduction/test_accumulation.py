"""What is said of gradients that change between micro-batches, steps, and after the reduction."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.bus.detector import RunFacts
from rankscope.bus.finding import Severity
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.step import StepReport
from rankscope.evidence.reduction.judge import (
    ERROR_FROM,
    FILLED,
    LEFT_OVER,
    AccumulationAudit,
    ChangedLater,
    make_judges,
)
from support.stepping import evidence_of, words
from support.streams import gathered

W = 3
GROUPS = ("embedding", "block", "head")


def step(number, *, observed=True, changes_WG=None, names=(), **columns):
    columns = {name: np.array(values) for name, values in columns.items()}
    zeros_W = np.zeros(W, np.int64)
    return StepReport(
        replace(
            gathered(number, [[]] * W, **columns),
            observed=observed,
            groups=GROUPS,
            group_norms_WG=np.ones((W, 3)),
            accumulator_changes_WG=changes_WG,
            differences=tuple(
                StateDifference(StateKind.CHANGED, name, zeros_W, zeros_W > 0) for name in names
            ),
        ),
        {},
    )


def accumulated(number, change, scale, *, groups=GROUPS, ranks=range(W)):
    """Return a step in which the gradient of these groups and ranks changed before the third."""
    on_W = np.isin(np.arange(W), list(ranks))
    changes_WG = np.outer(on_W, np.isin(GROUPS, groups)) * change
    return step(
        number,
        changes_WG=changes_WG,
        accumulator_change=np.where(on_W, change, 0.0),
        accumulator_scale=np.where(on_W, scale, 1.0),
        accumulator_micro=np.full(W, 2),
    )


def tell(detector, *steps):
    return [evidence for one in steps for evidence in evidence_of(detector, one)]


@pytest.mark.parametrize(
    ("scale", "kind", "text"),
    [
        (0.0, "reset", "set to zero"),
        (2.0, "doubled", "doubled"),
        (0.25, "divided", "divided (its norm is 0.25 times"),
    ],
)
def test_a_mistake_that_comes_again_is_an_error(scale, kind, text):
    change = abs(scale - 1) / max(scale, 1)
    found = tell(AccumulationAudit(), *(accumulated(n, change, scale) for n in range(ERROR_FROM)))
    assert [one.severity for one in found] == [Severity.WARNING] * 2 + [Severity.ERROR]
    assert found[-1].numbers["kind"] == kind
    assert found[-1].ranks == (0, 1, 2)
    assert text in words(found[-1])
    assert "micro-batch 3 of a step" in words(found[-1])


def test_rounding_is_no_change_and_one_micro_batch_tells_nothing():
    unknown = [step(n) for n in range(4)]
    assert tell(AccumulationAudit(), *unknown, *(accumulated(n, 1e-6, 1.0) for n in range(9))) == []


def left(number, ranks, *, calls=1):
    left_W, calls_W = np.isin(np.arange(W), list(ranks)), np.full(W, calls)
    return step(number, grad_left_over=left_W, optimizer_steps=calls_W)


def test_a_gradient_that_two_updates_apply_is_left_over():
    found = tell(AccumulationAudit(), *(left(n, (0, 2) if n % 3 == 1 else ()) for n in range(9)))
    assert [one.key for one in found] == [LEFT_OVER] * 3
    assert (found[-1].severity, found[-1].ranks) == (Severity.ERROR, (0, 2))
    assert found[-1].first_step == 1
    assert "was not zeroed after optimizer.step in 3 steps" in words(found[-1])


def test_one_that_is_thrown_away_afterwards_is_not():
    assert tell(AccumulationAudit(), *(left(n, range(W), calls=0) for n in range(5))) == []


def changed(number, factor, names=("block.weight",)):
    return step(number, applied_odd=np.full(W, factor), names=names if factor != 1 else ())


def test_a_factor_of_some_parameters_is_told_and_they_are_named():
    found = tell(ChangedLater(), *(changed(n, 0.5) for n in range(3)))
    assert [one.severity for one in found] == [Severity.NOTE, Severity.NOTE, Severity.WARNING]
    assert found[-1].numbers == {
        "steps": 3,
        "names": ["block.weight"],
        "num_names": 1,
        "factor": 0.5,
    }
    assert "the norms of the gradients of block.weight changed by 0.5" in words(found[-1])


def test_clipping_by_value_or_layer_is_a_note_and_by_norm_nothing():
    factors = [0.9, 0.4, 0.7, 0.2]
    found = tell(ChangedLater(), *(changed(n, factor) for n, factor in enumerate(factors)))
    assert {one.severity for one in found} == {Severity.NOTE}
    assert tell(ChangedLater(), *(changed(n, 1.0) for n in range(9)), step(9)) == []


def test_a_first_of_two_passes_that_is_dropped_may_be_meant():
    """A GAN's generator is trained through its discriminator, whose gradient is dropped then."""
    dropped = [
        step(
            number,
            changes_WG=np.ones((W, 3)),
            accumulator_change=np.ones(W),
            accumulator_scale=np.zeros(W),
            accumulator_micro=np.ones(W, int),
            micro_batches=np.full(W, 2.0),
        )
        for number in range(5)
    ]
    told = tell(AccumulationAudit(), *dropped)[-1]
    assert told.severity is Severity.NOTE
    assert "What the first pass has contributed is dropped" in words(told)


def carried(number, ranks, *, updates=1, **columns):
    on_W = np.isin(np.arange(W), list(ranks))
    steps_W = np.full(W, updates)
    return step(number, observed=False, grad_carried_over=on_W, optimizer_steps=steps_W, **columns)


def test_gradients_that_held_other_values_before_are_a_warning():
    found = tell(AccumulationAudit(), *(carried(n, [1, 2]) for n in range(12)))
    assert [one.last_step for one in found] == [8, 9, 10, 11]  # the first one may be any
    assert {(one.key, one.severity, one.ranks) for one in found} == {
        (FILLED, Severity.WARNING, (1, 2))
    }
    assert "was not zero when the first backward pass of a step began" in words(found[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda n: carried(n, [0], updates=n % 2),  # what waits since the step before
        lambda n: carried(n, [0], grad_left_over=np.array([True, False, False])),
        lambda n: carried(n, [0], grad_set_aside=np.full(W, True)),
        lambda n: carried(n, []),
    ],
)
def test_gradients_that_are_explained_otherwise_are_not_filled(make):
    found = tell(AccumulationAudit(), *map(make, range(40)))
    assert FILLED not in {one.key for one in found}


def test_gradients_of_parameters_that_no_optimizer_holds_are_zeroed_by_nobody():
    steps = [carried(n, [1, 2]) for n in range(12)]
    for by_loop in (False, True):
        (audit,) = (
            one
            for one in make_judges(RunFacts(W, unheld=True, by_loop=by_loop))
            if isinstance(one, AccumulationAudit)
        )
        assert bool(tell(audit, *steps)) == by_loop
