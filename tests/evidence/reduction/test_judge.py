from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from rankscope.bus.detector import RunFacts
from rankscope.bus.finding import Severity
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.step import StepReport
from rankscope.evidence.reduction import judge
from rankscope.stats.direction import cosines_from_gram, mean_and_min_cosine, norm_weighted_cosine
from support.stepping import describe, evidence_of, words
from support.streams import gathered

SIZE = 600


def gradients(num_steps, num_workers=4, seed=0, common=0.5):
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        own_WP = rng.standard_normal((num_workers, SIZE))
        shared_P = common * rng.standard_normal(SIZE)
        yield np.exp(0.3 * rng.standard_normal()) * (own_WP + shared_P)


def watch(gradients_TWP, reduce, noise=0.01, by_loop=False, differences=(), **columns):
    """Return the evidence of a run with this reduction; columns may follow from the step."""
    rng = np.random.default_rng(1)
    reports = []
    for step, gradients_WP in enumerate(gradients_TWP):
        width, gram_WW = len(gradients_WP), gradients_WP @ gradients_WP.T
        given = {name: value(step) if callable(value) else value for name, value in columns.items()}
        workers = {"grad_norm": np.linalg.norm(gradients_WP, axis=1)}
        workers |= {name: np.full(width, value) for name, value in given.items()}
        reduced = np.linalg.norm(reduce(gradients_WP, step)) * np.exp(noise * rng.standard_normal())
        values = {
            "cosine_weighted": norm_weighted_cosine(gram_WW),
            "cosine_mean": mean_and_min_cosine(cosines_from_gram(gram_WW))[0],
            "grad_norm_reduced": reduced,
        }
        one = gathered(step, [[]] * width, **workers)
        reports.append(StepReport(replace(one, observed=True, differences=differences), values))
    return evidence_of(judge.ReductionChecks(width, by_loop=by_loop), *reports)


def mean(gradients_WP, step, scale=1.0):
    return scale * gradients_WP.mean(axis=0)


@pytest.mark.parametrize("num_workers", [2, 8])
def test_the_mean_is_no_fault(num_workers):
    for common in (0.0, 0.3, 3.0):
        stream = gradients(300, num_workers, common=common)
        assert watch(stream, mean, applied_scale=lambda t: min(1.0, 0.3 + t % 7 / 7)) == []


@pytest.mark.parametrize(("factor", "words"), [(0.25, "divided twice"), (4.0, "not averaged")])
def test_a_factor_that_stays(factor, words):
    told = watch(gradients(judge.STEPS), lambda g, t: factor * mean(g, t))
    assert [evidence.cause for evidence in told] == ["sync.wrong_scale"]
    assert told[0].numbers["factor"] == pytest.approx(factor, rel=0.05)
    assert words in describe(told[0])[0]
    places_W = np.array([5, 6, 5, 6])  # of a group's ranks: each has parameters of its own
    kinds = StateKind.PARAMETER, StateKind.REDUCED
    rows = [StateDifference(kind, "adapter", places_W, places_W > 9) for kind in kinds]
    wrong = partial(mean, scale=0.7)
    for by_loop in (True, False):
        told = watch(gradients(99), wrong, by_loop=by_loop, differences=rows)
        assert bool(told) != by_loop


def test_a_division_after_the_reduction():
    told = watch(gradients(judge.STEPS), mean, applied_scale=0.25)
    assert {evidence.cause for evidence in told} == {"sync.wrong_scale"}

    assert (told[0].first_step, told[0].count) == (0, judge.STEPS_APPLIED)
    assert told[0].last_step == judge.STEPS_APPLIED - 1
    assert f"{judge.STEPS_APPLIED} observed steps" in describe(told[0])[0]


def test_a_sum_after_the_reduction_that_is_clipped():
    """Clipping hides the factor in the gradient's norm, and not in what the call has seen."""
    columns = {"applied_scale": lambda t: 4.0 / (2 + t), "clip_factor": lambda t: 1 / (2 + t)}
    told = watch(gradients(judge.STEPS), mean, **columns)
    assert {evidence.cause for evidence in told} == {"sync.wrong_scale"}
    assert "multiplied once more by the number of workers" in describe(told[0])[0]


@pytest.mark.parametrize(("micro_batches", "found"), [(4, set()), (1, {"sync.wrong_scale"})])
def test_losses_may_be_summed_over_micro_batches_where_none_is_known(micro_batches, found):
    """As in a pipeline, whose schedule divides the gradients after the reduction."""
    told = watch(gradients(judge.STEPS), mean, applied_scale=0.25, micro_batches=micro_batches)
    assert {evidence.cause for evidence in told} == found


@pytest.mark.parametrize(("applied", "loss_scale"), [(0.25, 1.2), (4.0, 8.0)])
def test_a_factor_after_the_reduction_that_nothing_explains(applied, loss_scale):
    told = watch(gradients(judge.STEPS), mean, applied_scale=applied, grad_scale=loss_scale)
    assert {evidence.cause for evidence in told} == {"sync.wrong_scale"}


def test_a_scaler_that_is_undone_is_no_division():
    """Scalers divide after the reduction; so does who sums the losses of W micro-batches."""
    assert watch(gradients(3 * judge.STEPS), mean, applied_scale=0.25, grad_scale=32.0) == []


def test_the_gradient_of_the_step_before():
    before = {}

    def stale(gradients_WP, step):
        before[step] = mean(gradients_WP, step)
        return before.get(step - 1, before[step])

    assert {evidence.cause for evidence in watch(gradients(3 * judge.STEPS), stale)} == {
        "sync.stale"
    }


def test_gradients_that_were_clipped_before_the_reduction():
    def clipped(gradients_WP, step):
        norms_W1 = np.linalg.norm(gradients_WP, axis=1, keepdims=True)
        return (gradients_WP * np.minimum(1.0, 5.0 / norms_W1)).mean(axis=0)

    told = watch(gradients(3 * judge.STEPS), clipped)
    assert {evidence.cause for evidence in told} == {"sync.clipped_locally"}
    assert told[0].numbers["limit"] == pytest.approx(5.0, rel=0.05)


def test_norms_that_stop_at_one_value():
    def limited():
        for gradients_WP in gradients(2 * judge.STEPS):
            yield 5.0 * gradients_WP / np.linalg.norm(gradients_WP, axis=1, keepdims=True)

    assert {evidence.cause for evidence in watch(limited(), mean)} == {"sync.clipped_locally"}


def test_equal_batches_are_not_taken_for_clipping():
    rng = np.random.default_rng(0)
    assert watch([np.tile(rng.standard_normal(SIZE), (4, 1))] * 40, mean, noise=0.0) == []


W = 3
GROUPS = ("embedding", "block", "head")


def step(number, *, observed=True, changes_WG=None, names=(), **columns):
    zeros_W = np.zeros(W, np.int64)
    rows = [StateDifference(StateKind.CHANGED, name, zeros_W, zeros_W > 0) for name in names]
    parts = {"groups": GROUPS, "group_norms_WG": np.ones((W, 3))}
    parts |= {"accumulator_changes_WG": changes_WG, "differences": tuple(rows)}
    return StepReport(
        replace(gathered(number, [[]] * W, **columns), observed=observed, **parts), {}
    )


def accumulated(number, change, scale, *, micro=2, **columns):
    """Return a step in which the gradient changed before a micro-batch, the third by default."""
    return step(
        number,
        changes_WG=np.full((W, 3), change),
        accumulator_change=[change] * W,
        accumulator_scale=[scale] * W,
        accumulator_micro=[micro] * W,
        **columns,
    )


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
    steps = (accumulated(n, change, scale) for n in range(judge.ERROR_FROM))
    found = evidence_of(judge.AccumulationAudit(), *steps)
    assert [one.severity for one in found] == [Severity.WARNING] * 2 + [Severity.ERROR]
    assert found[-1].numbers["kind"] == kind
    assert found[-1].ranks == (0, 1, 2)
    assert text in words(found[-1])
    assert "micro-batch 3 of a step" in words(found[-1])


def test_rounding_is_no_change_and_one_micro_batch_tells_nothing():
    unknown, rounded = [step(n) for n in range(4)], [accumulated(n, 1e-6, 1.0) for n in range(9)]
    assert evidence_of(judge.AccumulationAudit(), *unknown, *rounded) == []


def left(number, ranks, *, calls=1):
    left_W, calls_W = np.isin(np.arange(W), list(ranks)), np.full(W, calls)
    return step(number, grad_left_over=left_W, optimizer_steps=calls_W)


def test_a_gradient_that_two_updates_apply_is_left_over():
    steps = (left(n, (0, 2) if n % 3 == 1 else ()) for n in range(9))
    found = evidence_of(judge.AccumulationAudit(), *steps)
    assert [one.key for one in found] == [judge.LEFT_OVER] * 3
    assert (found[-1].severity, found[-1].ranks) == (Severity.ERROR, (0, 2))
    assert found[-1].first_step == 1
    assert "was not zeroed after optimizer.step in 3 steps" in words(found[-1])


def test_one_that_is_thrown_away_afterwards_is_not():
    assert (
        evidence_of(judge.AccumulationAudit(), *(left(n, range(W), calls=0) for n in range(5)))
        == []
    )


def passes(scale, *, of, every=4, away=True, micro=1.0):
    """Yield passes of which every fourth ends with an update, or another one."""
    for number in range(of):
        updates = number % every == every - 1
        yield step(
            number,
            observed=False,
            micro_batches=np.full(W, micro),
            optimizer_steps=np.full(W, int(updates)),
            grad_scale=np.full(W, scale),
            grad_set_aside=np.full(W, away and updates),
        )


def test_gradients_that_are_thrown_away_before_each_pass_are_named():
    found = evidence_of(judge.AccumulationAudit(), *passes(0.25, of=20))
    assert [one.last_step for one in found] == [11, 15, 19]
    assert {(one.key, one.severity) for one in found} == {(judge.THROWN_AWAY, Severity.WARNING)}
    assert "Each loss is divided by 4" in words(found[0])
    assert "in 3 steps with an update" in words(found[0])
    [*_, told] = evidence_of(judge.AccumulationAudit(), *passes(0.5, of=20, every=2))
    assert told.severity is Severity.NOTE


@pytest.mark.parametrize(
    "options",
    [{"scale": 1.0}, {"scale": 0.25, "away": False}, {"scale": 0.25, "every": 3}, {"scale": 1.0,
     "every": 1}, {"scale": 0.25, "micro": 4.0}],
)  # fmt: skip
def test_passes_whose_losses_are_not_divided_by_their_number_may_be_thrown_away(options):
    assert evidence_of(judge.AccumulationAudit(), *passes(of=40, **options)) == []


def changed(number, factor, names=("block.weight",)):
    return step(number, applied_odd=np.full(W, factor), names=names if factor != 1 else ())


def test_a_factor_of_some_parameters_is_told_and_they_are_named():
    found = evidence_of(judge.ChangedLater(), *(changed(n, 0.5) for n in range(3)))
    assert [one.severity for one in found] == [Severity.NOTE, Severity.NOTE, Severity.WARNING]
    numbers = {"steps": 3, "names": ["block.weight"], "num_names": 1, "factor": 0.5}
    assert found[-1].numbers == numbers
    assert "the norms of the gradients of block.weight changed by 0.5" in words(found[-1])


def test_clipping_by_value_or_layer_is_a_note_and_by_norm_nothing():
    factors = [0.9, 0.4, 0.7, 0.2]
    found = evidence_of(
        judge.ChangedLater(), *(changed(n, factor) for n, factor in enumerate(factors))
    )
    assert {one.severity for one in found} == {Severity.NOTE}
    assert evidence_of(judge.ChangedLater(), *(changed(n, 1.0) for n in range(9)), step(9)) == []


def test_a_first_of_two_passes_that_is_dropped_may_be_meant():
    """A GAN's generator is trained through its discriminator, whose gradient is dropped then."""
    dropped = [accumulated(n, 1.0, 0.0, micro=1, micro_batches=[2.0] * W) for n in range(5)]
    told = evidence_of(judge.AccumulationAudit(), *dropped)[-1]
    assert told.severity is Severity.NOTE
    assert "What the first pass has contributed is dropped" in words(told)


def carried(number, ranks, *, updates=1, **columns):
    on_W = np.isin(np.arange(W), list(ranks))
    steps_W = np.full(W, updates)
    return step(number, observed=False, grad_carried_over=on_W, optimizer_steps=steps_W, **columns)


def test_gradients_that_held_other_values_before_are_a_warning():
    found = evidence_of(judge.AccumulationAudit(), *(carried(n, [1, 2]) for n in range(12)))
    assert [one.last_step for one in found] == [8, 9, 10, 11]  # the first one may be any
    kinds = {(one.key, one.severity, one.ranks) for one in found}
    assert kinds == {(judge.FILLED, Severity.WARNING, (1, 2))}
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
    found = evidence_of(judge.AccumulationAudit(), *map(make, range(40)))
    assert judge.FILLED not in {one.key for one in found}


def test_gradients_of_parameters_that_no_optimizer_holds_are_zeroed_by_nobody():
    steps = [carried(n, [1, 2]) for n in range(12)]
    for by_loop in (False, True):
        judges = judge.make_judges(RunFacts(W, unheld=True, by_loop=by_loop))
        (audit,) = (one for one in judges if isinstance(one, judge.AccumulationAudit))
        assert bool(evidence_of(audit, *steps)) == by_loop
