"""What the detection bench feeds to the detectors: its streams, intervals and rules of others."""

from itertools import islice

import numpy as np
import pytest

from support.benchmarks import load_benchmark

streams, rules, faults, null = map(
    load_benchmark, ("detection_streams", "detection_rules", "detection_faults", "detection_null")
)
HEALTHY = list(streams.HEALTHY)
STEPS, SIGNALS, WORKERS = 60, 2000, 4


def draw(make, seed=3):
    values = list(islice(make(np.random.default_rng(seed), (SIGNALS, WORKERS)), STEPS))
    return np.stack(values)


def tops(values_TSW):
    """Return who is highest, ties broken at random."""
    jitter = np.random.default_rng(0).random(values_TSW.shape)
    return np.lexsort((jitter, values_TSW), axis=-1)[..., -1]


def persistence(values_TSW):
    """Return how often the highest worker of a step is the highest of the next, too."""
    top_TS = tops(values_TSW)
    return float(np.mean(top_TS[1:] == top_TS[:-1]))


@pytest.mark.parametrize("name", HEALTHY)
def test_in_healthy_streams_the_highest_worker_is_anyone_whatever_was_before(name):
    values_TSW = draw(streams.HEALTHY[name])
    shares_W = np.bincount(tops(values_TSW).ravel(), minlength=WORKERS) / (STEPS * SIGNALS)
    assert shares_W == pytest.approx([1 / WORKERS] * WORKERS, abs=0.006)
    assert persistence(values_TSW) == pytest.approx(1 / WORKERS, abs=0.006)


@pytest.mark.parametrize("name", [name for name in streams.OUTSIDE if "half" not in name])
def test_outside_of_the_guarantee_the_past_tells_who_is_high(name):
    lag = streams.OWN_BATCHES if "replays" in name else 1
    top_TS = tops(draw(streams.OUTSIDE[name]))
    assert np.mean(top_TS[lag:] == top_TS[:-lag]) > 1 / WORKERS + 0.003


def test_faults_change_the_workers_that_they_name_and_no_other():
    for fault in faults.FAULTS:
        rng = np.random.default_rng(0)
        noise = faults.Noise.draw(rng, fault.workers)
        before = {name: getattr(noise, name).copy() for name in noise.__slots__}
        fault.change(noise, 0, rng)
        changed = {
            int(rank)
            for name, values in before.items()
            for rank in np.nonzero(getattr(noise, name) != values)[0]
        }
        assert changed == set(fault.ranks), fault.words
        assert np.array_equal(noise.pairs_WW, noise.pairs_WW.T)


def test_a_large_shift_is_found_and_a_healthy_job_is_silent():
    [fault] = [fault for fault in faults.FAULTS if fault.words == "loss + 3.5 sd"]
    outcome = faults.simulate(fault, np.random.default_rng(1), settle=5)
    assert not outcome.before
    assert outcome.delay < 30
    assert outcome.last == {faults.FAULTY}
    assert faults.measure_healthy(100)["alarms"] == 0
