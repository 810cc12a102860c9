"""Reductions that return something else than the mean, in simulated gradients."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.bus.step import StepReport
from rankscope.evidence.reduction.judge import STEPS, STEPS_APPLIED, ReductionChecks
from rankscope.stats.direction import cosines_from_gram, mean_and_min_cosine, norm_weighted_cosine
from support.stepping import describe, evidence_of
from support.streams import gathered as unobserved

SIZE = 600


def gathered(step, samples, **columns):
    return replace(unobserved(step, samples, **columns), observed=True)


def gradients(num_steps, num_workers=4, seed=0, common=0.5):
    """Yield gradients ``[W, P]`` with something in common, of sizes that change."""
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        own_WP = rng.standard_normal((num_workers, SIZE))
        shared_P = common * rng.standard_normal(SIZE)
        yield np.exp(0.3 * rng.standard_normal()) * (own_WP + shared_P)


def watch(
    gradients_TWP,
    reduce,
    applied=None,
    noise=0.01,
    loss_scale=None,
    micro_batches=None,
    clipped=lambda step: np.nan,
):
    """Return the evidence of a run whose reduction is ``reduce(gradients_WP, step)``."""
    rng = np.random.default_rng(1)
    detector, told = None, []
    for step, gradients_WP in enumerate(gradients_TWP):
        num_workers = len(gradients_WP)
        detector = detector or ReductionChecks(num_workers)
        gram_WW = gradients_WP @ gradients_WP.T
        cosines = {
            "cosine_weighted": norm_weighted_cosine(gram_WW),
            "cosine_mean": mean_and_min_cosine(cosines_from_gram(gram_WW))[0],
        }
        reduced = np.linalg.norm(reduce(gradients_WP, step)) * np.exp(noise * rng.standard_normal())
        workers = {"grad_norm": np.linalg.norm(gradients_WP, axis=1)}
        if applied is not None:
            workers["applied_scale"] = np.full(num_workers, applied(step))
            workers["clip_factor"] = np.full(num_workers, clipped(step))
        if loss_scale is not None:
            workers["grad_scale"] = np.full(num_workers, loss_scale)
        if micro_batches is not None:
            workers["micro_batches"] = np.full(num_workers, micro_batches)
        report = StepReport(
            gathered(step, [[]] * num_workers, **workers), {**cosines, "grad_norm_reduced": reduced}
        )
        told += evidence_of(detector, report)
    return told


def mean(gradients_WP, step):
    return gradients_WP.mean(axis=0)


@pytest.mark.parametrize("num_workers", [2, 8])
def test_the_mean_is_no_fault(num_workers):
    for common in (0.0, 0.3, 3.0):
        stream = gradients(300, num_workers, common=common)
        assert watch(stream, mean, applied=lambda t: min(1.0, 0.3 + t % 7 / 7)) == []


@pytest.mark.parametrize(
    ("factor", "words"), [(0.25, "divided twice"), (4.0, "summed, not averaged")]
)
def test_a_factor_that_stays(factor, words):
    told = watch(gradients(STEPS), lambda g, t: factor * mean(g, t))
    assert [evidence.cause for evidence in told] == ["sync.wrong_scale"]
    assert told[0].numbers["factor"] == pytest.approx(factor, rel=0.05)
    assert words in describe(told[0])[0]


def test_a_division_after_the_reduction():
    told = watch(gradients(STEPS), mean, applied=lambda t: 0.25)
    assert {evidence.cause for evidence in told} == {"sync.wrong_scale"}

    assert (told[0].first_step, told[0].count) == (0, STEPS_APPLIED)
    assert told[0].last_step == STEPS_APPLIED - 1
    assert f"{STEPS_APPLIED} observed steps" in describe(told[0])[0]


def test_a_sum_after_the_reduction_that_is_clipped():
    """Clipping hides the factor in the gradient's norm, and not in what the call has seen."""
    told = watch(
        gradients(STEPS), mean, applied=lambda t: 4.0 / (2 + t), clipped=lambda t: 1 / (2 + t)
    )
    assert {evidence.cause for evidence in told} == {"sync.wrong_scale"}
    assert "multiplied once more by the number of workers" in describe(told[0])[0]


@pytest.mark.parametrize(("micro_batches", "found"), [(4, set()), (1, {"sync.wrong_scale"})])
def test_losses_may_be_summed_over_micro_batches_where_none_is_known(micro_batches, found):
    """As in a pipeline, whose schedule divides the gradients after the reduction."""
    told = watch(gradients(STEPS), mean, applied=lambda t: 0.25, micro_batches=micro_batches)
    assert {evidence.cause for evidence in told} == found


@pytest.mark.parametrize(("applied", "loss_scale"), [(0.25, 1.2), (4.0, 8.0)])
def test_a_factor_after_the_reduction_that_nothing_explains(applied, loss_scale):
    told = watch(gradients(STEPS), mean, applied=lambda t: applied, loss_scale=loss_scale)
    assert {evidence.cause for evidence in told} == {"sync.wrong_scale"}


def test_a_scaler_that_is_undone_is_no_division():
    """Scalers divide after the reduction; so does who sums the losses of W micro-batches."""
    told = watch(gradients(3 * STEPS), mean, applied=lambda t: 0.25, loss_scale=32.0)
    assert told == []


def test_the_gradient_of_the_step_before():
    before = {}

    def stale(gradients_WP, step):
        before[step] = mean(gradients_WP, step)
        return before.get(step - 1, before[step])

    told = watch(gradients(3 * STEPS), stale)
    assert {evidence.cause for evidence in told} == {"sync.stale"}


def test_gradients_that_were_clipped_before_the_reduction():
    def clipped(gradients_WP, step):
        norms_W1 = np.linalg.norm(gradients_WP, axis=1, keepdims=True)
        return (gradients_WP * np.minimum(1.0, 5.0 / norms_W1)).mean(axis=0)

    told = watch(gradients(3 * STEPS), clipped)
    assert {evidence.cause for evidence in told} == {"sync.clipped_locally"}
    assert told[0].numbers["limit"] == pytest.approx(5.0, rel=0.05)


def test_norms_that_stop_at_one_value():
    def limited():
        for gradients_WP in gradients(2 * STEPS):
            yield 5.0 * gradients_WP / np.linalg.norm(gradients_WP, axis=1, keepdims=True)

    told = watch(limited(), mean)
    assert {evidence.cause for evidence in told} == {"sync.clipped_locally"}


def test_equal_batches_are_not_taken_for_clipping():
    rng = np.random.default_rng(0)
    one_P = rng.standard_normal(SIZE)
    assert watch([np.tile(one_P, (4, 1))] * 40, mean, noise=0.0) == []
