"""The verdict of a canary, and when one is run."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.bus.finding import Finding, Severity
from rankscope.bus.pace import LAG
from rankscope.evidence.canary.schedule import (
    RETRY_AFTER,
    SHARE,
    SPACING,
    CanaryPlan,
    Planned,
    Schedule,
)

# When -----------------------------------------------------------------------------------------


def finding(name="rank-2", cause="data.worker_outlier", ranks=(2,), status="open") -> Finding:
    return Finding(name, cause, Severity.WARNING, ranks, 0, 5, "", "", status=status)


def planned(plan: CanaryPlan, first: int, last: int, **events) -> list[Planned]:
    """Show a range of steps, the events at the first; canaries end as soon as they have run."""
    found = []
    for step in range(first, last):
        if plan.current is not None and step == plan.current.run_at:
            plan.finish()
        new = plan.observe(step, events.pop("findings", ()), **events)
        events = {}
        found += [new] if new else []
    return found


def test_a_finding_leads_to_one_canary_of_its_worker_against_one_that_is_healthy():
    [one] = planned(CanaryPlan(4), 50, 1000, findings=[finding(ranks=(2, 3))])
    assert one == Planned("rank-2", suspect=2, peer=0, capture_at=66, run_at=82)
    again = CanaryPlan(4)
    assert len(planned(again, 50, 500, findings=[finding()])) == 1
    assert planned(again, 500, 1000, findings=[finding()]) == []  # the same finding


def test_where_all_workers_are_concerned_the_next_is_the_peer():
    [one] = planned(CanaryPlan(2), 0, 300, findings=[finding(ranks=(1, 0))])
    assert (one.suspect, one.peer) == (1, 0)


def test_a_canary_that_a_worker_missed_is_tried_once_more():
    plan = CanaryPlan(3)
    first = plan.observe(10, [finding()])
    assert first is not None
    assert plan.give_up()
    seen = [plan.observe(step) for step in range(11, first.run_at + RETRY_AFTER + 1)]
    assert seen[:-1] == [None] * (len(seen) - 1)
    again = seen[-1]
    lead = 2 * LAG  # the worker may have learned of it too late
    assert again == replace(first, capture_at=106 + lead, run_at=106 + 2 * lead, attempt=2)
    assert not plan.give_up()
    assert planned(plan, 123, 1000) == []


@pytest.mark.parametrize(("step_seconds", "cost"), [(0.016, 0.1), (0.1, 0.0001)])
def test_without_a_schedule_there_is_one_at_once_and_then_within_a_share_of_the_time(
    step_seconds, cost
):
    plan, runs = CanaryPlan(4, Schedule()), []
    num_steps = 20_000
    for step in range(num_steps):
        if plan.current is not None and step == plan.current.run_at:
            runs.append(step)
            plan.finish(cost)
        plan.observe(step, seconds=step_seconds)
    assert runs[0] < 50
    if cost / step_seconds > 1:
        assert (len(runs) - 1) * cost <= SHARE * num_steps * step_seconds
        assert (len(runs) + 1) * cost >= 0.8 * SHARE * num_steps * step_seconds
    gaps = np.diff(runs)
    assert gaps.min() >= SPACING
    assert cost / step_seconds > 1 or gaps.max() <= SPACING + 2 * LAG + 1


def test_one_that_nobody_asked_for_is_tried_more_and_more_rarely_where_it_comes_to_nothing():
    plan, begun = CanaryPlan(4, Schedule()), [0]  # the first is known without a word
    for step in range(20_000):
        if plan.current is not None and step == plan.current.run_at:
            assert not plan.give_up()
        new = plan.observe(step, seconds=0.1)
        begun += [step] if new else []
        assert new is None or new.by_default
    gaps = np.diff(begun)
    assert gaps[0] < 200
    assert (np.diff(gaps) >= 0).all()
    assert 4096 <= gaps[-1] <= 4096 + 2 * 8 * LAG
