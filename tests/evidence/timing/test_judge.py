import numpy as np
import pytest

from rankscope.bus.detector import RunFacts
from rankscope.bus.finding import Severity
from rankscope.bus.step import StepReport
from rankscope.evidence.timing.judge import WARM_UP, WINDOW, Lateness, Stragglers
from rankscope.verdict.diagnosis import Diagnosis
from support.stepping import told_of
from support.streams import gathered

TWO_WINDOWS = WARM_UP + 2 * WINDOW
HOSTS = ["a"] * 4 + ["b"] * 4


def simulate(num_steps=450, num_workers=8, slow=None, *, noise=0.03, seed=0):
    """Return seconds ``[T, W]`` for which workers are busy; ``slow(t)`` adds to them."""
    rng = np.random.default_rng(seed)
    busy_TW = 0.3 * np.exp(noise * rng.standard_normal((num_steps, num_workers)))
    if slow is not None:
        busy_TW += [slow(t) for t in range(num_steps)]
    return busy_TW


def on(workers, seconds, steps=range(10**9), num_workers=8):
    extra_W = np.zeros(num_workers)
    extra_W[workers] = seconds
    return lambda t: extra_W if t in steps else 0 * extra_W


def report(step, busy_W):
    took_W = np.full(len(busy_W), np.nanmax(busy_W, initial=0.0) + 0.02)
    columns = {"busy_seconds": busy_W, "step_seconds": took_W}
    return StepReport(gathered(step, [[]] * len(busy_W), **columns), {})


def watch(busy_TW, hosts=()):
    detector = Stragglers(busy_TW.shape[1], hosts)
    told = told_of(detector, [report(t, busy_W) for t, busy_W in enumerate(busy_TW)])
    found = [(t, one) for t, several in enumerate(told) for one in several]
    return found + [(-1, one) for one in detector.close()]


HEALTHY = {
    "even": simulate(),
    "very uneven batches, two workers": simulate(800, 2, noise=0.5),
    "all slow": simulate(slow=on(range(8), 0.3, range(200, 450))),
    "another one slow in each step": simulate(slow=lambda t: on([t * 5 % 8], 0.2)(t)),
    "a checkpoint now and then": simulate(slow=on([0], 30.0, range(0, 450, 10))),
    "slow to start": simulate(slow=on([3], 5.0, range(WARM_UP))),
    "slow for a window and a half": simulate(slow=on([3], 0.2, range(160, 235))),
    "slow, but others are last": simulate(slow=on([3], 0.05), noise=0.5),
    "1 ms of 3": simulate(slow=on([3], 0.1)) / 100,
    "known of one only": np.where(np.arange(8) == 3, 0.6, simulate() * np.nan),
}


@pytest.mark.parametrize("job", HEALTHY)
def test_nothing_is_said_of_a_healthy_job(job):
    busy_TW = HEALTHY[job]
    assert watch(busy_TW, HOSTS[-busy_TW.shape[1] :]) == []


@pytest.mark.parametrize("num_workers", [2, 8])
def test_a_slow_worker_is_named_after_two_windows(num_workers):
    slow = on([1], 0.06, num_workers=num_workers)
    [(when, first), *later] = watch(simulate(num_workers=num_workers, slow=slow))
    assert when == TWO_WINDOWS - 1
    assert (first.ranks, first.first_step, first.last_step) == ((1,), WARM_UP, when)
    assert first.severity is Severity.NOTE
    assert first.numbers["seconds_behind"] == pytest.approx(0.06, rel=0.25)
    assert first.numbers["share_of_step"] == pytest.approx(0.06 / 0.38, rel=0.25)
    assert {(one.key, one.status) for _, one in later} == {("time.straggler:rank-1", "open")}
    last = later[-1][1]
    assert last.numbers["seconds_lost"] == pytest.approx(400 * 0.06, rel=0.25)
    assert last.count == pytest.approx(400, abs=5)  # eight whole windows


@pytest.mark.parametrize(("last", "slow"), [(24, [False, True, False]), (25, [False] * 3)])
def test_a_worker_is_slow_only_if_slow_ones_are_the_last_in_most_steps(last, slow):
    behind_SW = np.tile([0.0, 1.0, 0.0], (50, 1))
    behind_SW[:last, 2] = 2.0
    assert Lateness.of(np.arange(50), np.full(50, 3.0), behind_SW).slow_W.tolist() == slow


def test_a_slow_host_is_one_finding():
    found = watch(simulate(slow=on([4, 5, 6, 7], 0.1)), HOSTS)
    assert {(one.key, one.ranks) for _, one in found} == {("time.straggler:host-b", (4, 5, 6, 7))}
    assert found[0][1].numbers["host"] == "b"
    assert found[0][1].fields["who"] == "host b (ranks 4–7)"


def test_on_a_single_host_workers_are_named():
    found = watch(simulate(slow=on([4, 5], 0.1)), ["a"] * 8)
    assert {one.key for _, one in found} == {"time.straggler:rank-4", "time.straggler:rank-5"}
    assert "host" not in found[0][1].numbers


def test_the_diagnosis_tells_when_it_opens_doubles_and_closes():
    diagnosis = Diagnosis(RunFacts(8, HOSTS))
    busy_TW = simulate(720, slow=on([4, 5, 6, 7], 0.1, range(100, 600)))
    told = [f for t in range(720) for f in diagnosis.observe(report(t, busy_TW[t]))]
    told = [finding for finding in told if finding.cause == "time.straggler"]
    assert [finding.status for finding in told] == ["open", "open", "closed"]
    assert told[-1].explanation == (
        "From step 100 to step 599 the gradient of host b (ranks 4–7) was ready 97 ms later than "
        "the typical worker's (23% of a step), and the last in most steps. All others waited for "
        "it, 50.0 s in all."
    )
