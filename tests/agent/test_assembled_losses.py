"""A worker's loss of a step, from those of its micro-batches."""

import numpy as np
import pytest

from rankscope.agent.assembly import Assembly
from rankscope.agent.host_summary import as_columns
from rankscope.agent.step_message import StepMessage, pack_values
from rankscope.bus.messages import Layout

LOSSES_M, TOKENS_M = np.array([1.0, 3.0]), np.array([10.0, 30.0])
BY_TOKENS, ALIKE = 2.5, 2.0


def loss_of(multipliers_M):
    message = StepMessage(
        step=0,
        slots=np.frombuffer(pack_values({}), np.int64),
        losses_U=LOSSES_M,
        weights_U=TOKENS_M,
        units_M=np.array([1, 1]),
        multipliers_M=np.array(multipliers_M, np.float64),
    )
    assembly = Assembly(Layout(num_workers=1), 0)
    workers = assembly.step_of(as_columns([message]), 1).workers
    return workers["loss"][0], workers["loss_weight"][0]


@pytest.mark.parametrize(
    ("multipliers_M", "loss"),
    [((0.5, 0.5), ALIKE), ((0.25, 0.75), BY_TOKENS), ((0.0, 1.0), 3.0)],
)
def test_micro_batches_count_as_they_do_in_the_gradient(multipliers_M, loss):
    assert loss_of(multipliers_M) == pytest.approx((loss, TOKENS_M.sum()))


@pytest.mark.parametrize("multipliers_M", [(), (np.nan, 1.0)])
def test_where_that_is_not_known_tokens_count(multipliers_M):
    assert loss_of(multipliers_M) == pytest.approx((BY_TOKENS, TOKENS_M.sum()))


def summed(tokens_M, divisor, weight):
    """A worker's message with losses of 2 per token, summed and divided."""
    rows = [(tokens, divisor, 2.0, weight) for tokens in tokens_M]
    return StepMessage(
        step=0,
        slots=np.frombuffer(pack_values({}), np.int64),
        losses_U=np.array([2.0 * tokens / divisor for tokens in tokens_M]),
        weights_U=np.full(len(tokens_M), np.nan),
        units_M=np.ones(len(tokens_M), np.int64),
        multipliers_M=np.ones(len(tokens_M)),
        sums_M4=np.array(rows, np.float64).ravel(),
    )


@pytest.mark.parametrize("own", [[3.0], [2.0, 1.0]], ids=["one micro-batch", "two"])
@pytest.mark.parametrize(
    "divisor", [10.0, 5.0, 4.0], ids=["all", "all, times workers", "another number"]
)
def test_a_sum_over_tokens_is_a_mean_only_if_its_divisor_counts_all_of_them(own, divisor):
    assembly = Assembly(Layout(num_workers=2), 0)
    sent = [summed(own, divisor, 0.5), summed([7.0], divisor, 0.25)]
    step = assembly.step_of(as_columns(sent), 1)
    assert step.workers["loss_divided"].tolist() == [divisor > 4.0] * 2
    if divisor > 4.0:
        assert step.workers["loss"] == pytest.approx([2.0, 2.0])
        assert step.workers["loss_weight"] == pytest.approx([3.0, 7.0])
        assert step.workers["grad_scale"] == pytest.approx([0.5 * len(own), 0.25])
    else:
        assert step.workers["loss"][1] == 14.0 / divisor
        assert np.isnan(step.workers["loss_weight"]).all()
        assert step.workers["grad_scale"] == pytest.approx([len(own), 1.0])


@pytest.mark.parametrize(
    ("own", "divisor", "known"),
    [
        ([3.0], 3.0, True),
        ([2.0, 1.0], 3.0, True),
        ([3.0, 3.0], 6.0, True),
        ([2.0, 1.0], 4.0, False),
    ],
    ids=["of the micro-batch", "of the step", "of each, twice", "another number"],
)
def test_a_sum_over_the_worker_s_own_tokens_is_their_mean(own, divisor, known):
    assembly = Assembly(Layout(num_workers=2), 0)
    sent = [summed(own, divisor, 1 / len(own)), summed([7.0], 7.0, 1.0)]
    step = assembly.step_of(as_columns(sent), 1)
    assert not step.workers["loss_divided"].any()
    assert np.isfinite(step.workers["loss_weight"]).tolist() == [known] * 2
    if known:
        assert step.workers["loss"] == pytest.approx([2.0, 2.0])
        assert step.workers["loss_weight"] == pytest.approx([sum(own), 7.0])
        assert step.workers["grad_scale"] == pytest.approx([1.0, 1.0])
