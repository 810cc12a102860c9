"""What the detection bench feeds to the detectors: its streams, intervals and rules of others."""

from itertools import islice

import numpy as np

from support.benchmarks import load_benchmark

streams, rules, faults, null = map(
    load_benchmark, ("detection_streams", "detection_rules", "detection_faults", "detection_null")
)
STEPS, SIGNALS, WORKERS = 60, 2000, 4


def draw(make, seed=3):
    values = list(islice(make(np.random.default_rng(seed), (SIGNALS, WORKERS)), STEPS))
    return np.stack(values)


def test_a_large_shift_is_found_and_a_healthy_job_is_silent():
    [fault] = [fault for fault in faults.FAULTS if fault.words == "loss + 3.5 sd"]
    outcome = faults.simulate(fault, np.random.default_rng(1), settle=5)
    assert not outcome.before
    assert outcome.delay < 30
    assert outcome.last == {faults.FAULTY}
    assert faults.measure_healthy(100)["alarms"] == 0
