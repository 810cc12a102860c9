from itertools import pairwise

import numpy as np
import pytest

from rankscope.bus.pace import ALWAYS, LAG, MAX_INTERVAL, Governor, Intervals

WORKERS = 4


class Job:
    def __init__(self, *, budget=0.01, every=1, base=0.0, observed=0.0, noise=0.0, seed=0):
        self.governor = Governor(budget, every, always=0)
        self.base, self.observed, self.noise = base, observed, noise
        self.rng = np.random.default_rng(seed)
        self.step = 0
        self.intervals: list[int] = []
        self.overheads: list[float] = []

    def run(self, steps):
        for _ in range(steps):
            interval = self.governor.interval_at(self.step)
            observed = self.step % interval == 0
            cost = self.base + observed * (self.observed - self.base)
            overhead = cost * np.exp(self.noise * self.rng.normal(size=WORKERS))
            plain = np.exp(0.5 * self.noise * self.rng.normal(size=WORKERS))
            self.intervals.append(interval)
            self.overheads.append(overhead.max())
            self.governor.observe(self.step, observed, overhead, plain + overhead)
            self.step += 1
        return self

    def share(self, last):
        return float(np.mean(self.overheads[-last:]))


def right_interval(base, observed, budget):
    """Search without the model's formula: count the cost of 1,024 steps."""
    interval = 1
    while 2 * interval <= MAX_INTERVAL:
        costs = [base if step % interval else observed for step in range(MAX_INTERVAL)]
        if np.mean(costs) <= budget * (1 + 1e-9):
            break
        interval *= 2
    return interval


@pytest.mark.parametrize(
    ("base", "observed", "budget"),
    [(0.0, 0.011, 0.01), (0.0005, 0.0099, 0.01), (0.0005, 0.5, 0.005), (0.004, 0.03, 0.005)],
)
def test_it_finds_the_smallest_interval_within_the_budget(base, observed, budget):
    observed = max(base, observed)
    job = Job(budget=budget, base=base, observed=observed).run(4000)
    assert job.intervals[-1] == right_interval(base, observed, budget)
    assert job.governor.summary()["within_budget"] is True


@pytest.mark.parametrize("seed", range(2))
def test_it_holds_the_budget_under_noise_and_does_not_flap(seed):
    job = Job(base=0.0005, observed=0.025, noise=0.3, seed=seed).run(10_000)
    assert job.share(9_000) <= 0.0115
    assert job.intervals[-1] in (4, 8)
    assert len(job.governor.decisions) <= 12


@pytest.mark.parametrize("ahead", [0, 40])
def test_the_first_steps_of_a_run_are_measured_whatever_they_cost(ahead):
    governor = Governor(0.01, 2)
    for step in range(400):
        observed = step % governor.interval_at(step) == 0
        overhead = np.array([0.01 * observed])
        governor.observe(step, observed, overhead, overhead + 0.016, newest=step + ahead)
    first = governor.decisions[0]
    assert {governor.interval_at(step) for step in range(ALWAYS)} == {2}
    assert ALWAYS <= first.first_step <= ALWAYS + 2
    assert first.interval > 2


def test_a_worker_knows_the_interval_of_the_steps_to_come_from_the_decisions_alone():
    job = Job(base=0.001, observed=0.02, noise=0.5)
    known, told = Intervals(1), 0
    for step in range(3000):
        if step == 1000:
            job.observed = 0.3
        assert known.interval_at(step) == job.governor.interval_at(step)
        job.run(1)
        for decision in job.governor.decisions[told:]:
            known.add(decision.first_step, decision.interval)
        told = len(job.governor.decisions)
    assert told > 2


def test_it_measures_more_often_again_when_the_cost_falls():
    job = Job(observed=0.05).run(500)
    assert job.intervals[-1] == 8
    job.observed = 0.002
    job.run(2000)
    assert job.intervals[-1] == 1
    narrowing = [d for d in job.governor.decisions if d.interval < d.interval_before]
    assert [d.interval for d in narrowing] == [4, 2, 1]


def test_what_had_to_be_undone_is_tried_again_after_twice_as_many_measurements():
    job = Job()
    for step in range(3800):
        job.observed = 0.03 if job.governor.interval_at(step) == 1 else 0.005
        job.run(1)
    measured = [step for step, interval in enumerate(job.intervals) if step % interval == 0]
    waits = [
        sum(before.first_step < step + LAG <= narrowed.first_step for step in measured)
        for before, narrowed in pairwise(job.governor.decisions)
        if narrowed.interval == 1
    ]
    assert waits == [16, 32, 64, 128, 128, 128]


def test_when_nothing_meets_the_budget_gradients_are_not_given_up_for_it():
    """Unobserved steps cost 2 % of a budget of 1 %: only what gradients add is kept within it."""
    job = Job(base=0.02, observed=0.05).run(3000)
    assert job.intervals[-1] == 4  # (0.05 - 0.02) / 4 <= 0.01
    assert job.governor.summary()["within_budget"] is False
    assert max(job.intervals) == 8  # before it knew what an unobserved step costs
    assert "cannot meet" in str(job.governor.decisions[-1])


def short_steps(plain, fixed, always=0):
    governor = Governor(0.01, 1, always)
    lines = []
    for step in range(400):
        overhead = np.array([fixed, fixed / 2]) + 0.0005
        governor.observe(step, True, overhead, plain + overhead, None, np.full(2, 0.0005))
        lines.append((step, governor.short_steps(step)))
    return [(step, line) for step, line in lines if line]


def test_short_steps_that_pay_more_than_the_budget_in_any_case_are_said_once():
    [(step, line)] = short_steps(0.012, 0.0015, always=300)
    assert step == 300 - LAG
    assert line == (
        "a step takes 12 ms, and watching it takes 1.5 ms (12.5%) even where no gradient is read: "
        'the budget of 1.00% cannot be kept. tier="scalars" takes less, and every=10 reads the '
        "gradient less often"
    )
