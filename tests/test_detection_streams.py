"""The detection bench in small: a fault and a healthy job."""

import numpy as np

from support.benchmarks import load_benchmark

faults = load_benchmark("detection_faults")


def test_a_large_shift_is_found_and_a_healthy_job_is_silent():
    [fault] = [fault for fault in faults.FAULTS if fault.words == "loss + 3.5 sd"]
    outcome = faults.simulate(fault, np.random.default_rng(1), settle=5)
    assert not outcome.before
    assert outcome.delay < 30
    assert outcome.last == {faults.FAULTY}
    assert faults.measure_healthy(100)["alarms"] == 0
