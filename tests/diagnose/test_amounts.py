"""How much each worker is given: what counts as another amount, and healthy data of any lengths."""

import numpy as np
import pytest

from diagnose.streams import gathered
from rankscope.core.step import StepReport
from rankscope.diagnose.evidence import Observation, observations
from rankscope.diagnose.outliers import WorkerOutliers

NO_SAMPLES = np.empty(0, np.int64)


def told_of(num_workers, columns_of, steps, detector=None, first=0):
    detector = detector or WorkerOutliers(num_workers)
    told = []
    for step in range(first, first + steps):
        columns = columns_of(step)
        sizes = columns.pop("num_samples", None)
        step_ = gathered(step, [NO_SAMPLES] * num_workers, None, **columns)
        if sizes is not None:
            step_.workers["num_samples"][:] = sizes
        told += detector.observe(Observation(StepReport(step_, {})))
    return told


@pytest.mark.parametrize(
    ("column", "usual", "own"),
    [
        ("loss_weight", 512, 256),
        ("num_samples", 8, 4),
        ("sequence_length", 128, 256),
        ("padding", 0.0, 0.5),
    ],
)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_worker_that_is_given_another_amount_is_named_within_25_steps(width, column, usual, own):
    detector = WorkerOutliers(width)

    def columns(step):
        values = np.full(width, float(usual))
        values[-1] = own if step >= 100 else usual
        return {column: values}

    assert told_of(width, columns, 100, detector) == []
    told = told_of(width, columns, 25 if width > 2 else 40, detector, first=100)
    assert {one.ranks for one in told} == {(width - 1,) if width > 2 else (0, 1)}
    assert {one.cause for one in told} == {"data.worker_outlier" if width > 2 else "inconclusive"}
    assert told[0].first_step == 100


def test_an_epochs_last_batch_is_short_on_the_same_worker_each_time():
    def columns(step):
        last = 1 if step % 12 == 11 else 4
        return {"num_samples": [4, 4, 4, last], "loss_weight": [128, 128, 128, 32 * last]}

    assert told_of(4, columns, 3000) == []


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("width", [2, 3, 8])
def test_lengths_that_differ_from_batch_to_batch_are_healthy(width, batch):
    """Padded to the longest of each batch, with a long tail and a curriculum."""
    rng = np.random.default_rng(width)

    def columns(step):
        lengths = (1 + step / 2000) * 80 * np.exp(0.8 * rng.standard_normal((width, batch)))
        longest = lengths.max(axis=1)
        return {
            "loss_weight": lengths.sum(axis=1).round(),
            "sequence_length": longest.round(),
            "padding": 1 - lengths.mean(axis=1) / longest,
        }

    assert told_of(width, columns, 2000) == []


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("width", [2, 4])
def test_a_sampler_that_deals_sorted_lengths_by_rank_is_healthy(width, batch):
    """As that of Transformers does: batches of fifty steps are sorted, the longest first.

    Rank 0 then has the longest of each few samples in every step.
    """
    rng, steps = np.random.default_rng(batch), 50
    dealt = []
    for _ in range(40):
        lengths = np.sort(80 * np.exp(0.5 * rng.standard_normal(steps * batch * width)))[::-1]
        dealt += list(lengths.reshape(steps, batch, width))

    def columns(step):
        return {"loss_weight": dealt[step].sum(axis=0), "sequence_length": dealt[step].max(axis=0)}

    assert told_of(width, columns, 2000) == []


def test_one_step_after_another_or_together_amounts_say_the_same():
    def reports():
        rng = np.random.default_rng(0)
        for step in range(128):
            tokens = 80 * np.exp(0.5 * rng.standard_normal(4))
            tokens[2] *= 3 if step > 60 else 1
            samples = [np.array([4 * step + rank]) for rank in range(4)]
            columns = {"loss_weight": tokens, "batch_digest": 4 * step + np.arange(4)}
            yield StepReport(gathered(step, samples, None, loss=tokens, **columns), {})

    alone, together = WorkerOutliers(4), WorkerOutliers(4)
    one = [list(alone.observe(Observation(report))) for report in reports()]
    many = [list(together.observe(step)) for step in observations(list(reports()))]
    assert one == many
    assert any(one)
    again = WorkerOutliers(4)
    again.restore(alone.state())
    assert again.state()["amounts"].keys() == alone.state()["amounts"].keys()
