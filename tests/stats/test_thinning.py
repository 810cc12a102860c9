"""Following a share of the samples when all are too many: against dictionaries and in the mean."""

import numpy as np
import pytest

from rankscope.stats.draws import DrawnSamples, SampleShare
from rankscope.stats.samples import ThinningLedger


def drawn(*steps):
    return DrawnSamples([[np.asarray(batch, np.int64) for batch in batches] for batches in steps])


@pytest.mark.parametrize("halvings", [1, 5])
def test_a_share_is_nested_and_of_its_size(halvings):
    share = SampleShare()
    samples = np.arange(1 << 16)
    before = np.ones(len(samples), bool)
    for _ in range(halvings):
        share.halve()
        admitted = share.admits(samples)
        assert not (admitted & ~before).any()
        before = admitted
    p = 0.5**halvings
    error = np.sqrt(len(samples) * p * (1 - p))
    assert abs(before.sum() - len(samples) * p) <= 5 * error
    assert share.one_in == 2**halvings


@pytest.mark.parametrize("capacity", [1 << 20, 1500])
def test_how_many_steps_are_taken_together_makes_no_difference(capacity):
    rng = np.random.default_rng(3)
    alone, together = ThinningLedger(capacity), ThinningLedger(capacity)
    for _ in range(60):
        order = rng.permutation(2000)[: 5 * 3 * 4].reshape(5, 3, 4)
        steps = [list(batches) for batches in order]
        if rng.random() < 0.4:
            steps[3][1] = steps[0][1]
        if rng.random() < 0.2:
            steps[2][1] = steps[2][0]
        expected = [seen for batches in steps for seen in alone.observe(drawn(batches))]
        found = list(together.observe(drawn(*steps)))
        for one, other in zip(found, expected, strict=True):
            assert one.samples.tolist() == other.samples.tolist()
            assert (one.counts, one.drawn, one.remembered) == (
                other.counts,
                other.drawn,
                other.remembered,
            )
    assert together.one_in == alone.one_in
    assert (together.one_in > 1) == (capacity == 1500)
