from dataclasses import replace

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.detector import LATENESS, RunFacts
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.pace import LAG
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.evidence.canary import schedule
from rankscope.evidence.canary.judge import CanaryVerdicts
from rankscope.verdict.diagnosis import Diagnosis
from support.stepping import describe, evidence_of
from support.streams import gathered

# When -----------------------------------------------------------------------------------------


def finding(name="rank-2", cause="data.worker_outlier", ranks=(2,), status="open") -> Finding:
    return Finding(name, cause, Severity.WARNING, ranks, 0, 5, "", "", status=status)


def planned(plan: schedule.CanaryPlan, first: int, last: int, **events) -> list[schedule.Planned]:
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
    [one] = planned(schedule.CanaryPlan(4), 50, 1000, findings=[finding(ranks=(2, 3))])
    assert one == schedule.Planned("rank-2", suspect=2, peer=0, capture_at=66, run_at=82)
    again = schedule.CanaryPlan(4)
    assert len(planned(again, 50, 500, findings=[finding()])) == 1
    assert planned(again, 500, 1000, findings=[finding()]) == []  # the same finding


def test_where_all_workers_are_concerned_the_next_is_the_peer():
    [one] = planned(schedule.CanaryPlan(2), 0, 300, findings=[finding(ranks=(1, 0))])
    assert (one.suspect, one.peer) == (1, 0)


def test_a_canary_that_a_worker_missed_is_tried_once_more():
    plan = schedule.CanaryPlan(3)
    first = plan.observe(10, [finding()])
    assert first is not None
    assert plan.give_up()
    seen = [plan.observe(step) for step in range(11, first.run_at + schedule.RETRY_AFTER + 1)]
    assert seen[:-1] == [None] * (len(seen) - 1)
    again = seen[-1]
    lead = 2 * LAG  # the worker may have learned of it too late
    assert again == replace(first, capture_at=106 + lead, run_at=106 + 2 * lead, attempt=2)
    assert not plan.give_up()
    assert planned(plan, 123, 1000) == []


@pytest.mark.parametrize(("step_seconds", "cost"), [(0.016, 0.1), (0.1, 0.0001)])
def test_without_a_schedule_canaries_take_a_share_of_the_time(step_seconds, cost):
    plan, runs = schedule.CanaryPlan(4, schedule.Schedule()), []
    num_steps = 20_000
    for step in range(num_steps):
        if plan.current is not None and step == plan.current.run_at:
            runs.append(step)
            plan.finish(cost)
        plan.observe(step, seconds=step_seconds)
    assert runs[0] < 50
    if cost / step_seconds > 1:
        assert (len(runs) - 1) * cost <= schedule.SHARE * num_steps * step_seconds
        assert (len(runs) + 1) * cost >= 0.8 * schedule.SHARE * num_steps * step_seconds
    gaps = np.diff(runs)
    assert gaps.min() >= schedule.SPACING
    assert cost / step_seconds > 1 or gaps.max() <= schedule.SPACING + 2 * LAG + 1


def test_one_that_nobody_asked_for_is_tried_more_and_more_rarely_where_it_comes_to_nothing():
    plan = schedule.CanaryPlan(4, schedule.Schedule())
    begun = [0]  # the first is known without a word
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


def step(number=32, digests=(5,) * 4, again=None, losses=1, differs=None, kinds=(), **canary):
    """Return a step with a canary of rank 2 against rank 3; without one if digests are None."""
    columns = {"replica": 0}
    if digests is not None:
        names = ("loss", "norm", "against_loss", "against_norm")
        found = dict.fromkeys(names, losses) | dict.fromkeys(("digest", "against_digest"), digests)
        found |= {"again": digests if again is None else again, "of": 2, "against": 3, "program": 1}
        found |= {"unit": 2**-24, "projected": False, **canary}
        columns |= {f"canary_{name}": values for name, values in found.items()}
    arrays = {name: np.broadcast_to(values, 4) for name, values in columns.items()}
    one = gathered(number, [[0, 1]] * 4, **arrays)
    if differs is not None:
        own = np.array([9 if rank == differs else 1 for rank in range(4)])
        kinds = kinds or (StateKind.PARAMETER,)
        rows = [StateDifference(kind, "head.weight", own, np.zeros(4, bool)) for kind in kinds]
        one = replace(one, differences=tuple(rows))
    return summarize(one)


def told(detector, *steps):
    return [evidence for one in steps for evidence in evidence_of(detector, one)]


def test_a_canary_that_agrees_speaks_only_of_a_worker_that_differs():
    assert told(CanaryVerdicts(4), step()) == []
    assert told(CanaryVerdicts(4, lambda: (1,)), step()) == []
    [data] = told(CanaryVerdicts(4, lambda: (2,)), step())
    assert (data.key, data.cause) == ("canary-data", "data.worker_outlier")
    assert (data.severity, data.ranks) == (Severity.NOTE, (2,))
    [data] = told(CanaryVerdicts(4, lambda: (2,)), step(projected=True))
    words = describe(data)[0]
    assert "a projection of the outputs of rank 2's batch was 1 on every worker" in words
    assert "The loss outside of the model is not among what ran. So" in words


def test_state_is_told_where_it_is_known_to_differ():
    bad = {"digests": (5, 6, 5, 5), "losses": (1, 2, 1, 1)}
    [found] = told(CanaryVerdicts(4), step(20, digests=None, differs=1), step(**bad))
    assert (found.cause, found.severity) == ("state.parameters_differ", Severity.ERROR)
    elsewhere = told(CanaryVerdicts(4), step(20, digests=None, differs=3), step(**bad))
    assert elsewhere[0].cause == "compute.worker_outlier"
    healed = step(LATENESS + 21, **bad)
    [later] = told(CanaryVerdicts(4), step(20, digests=None, differs=1), healed)
    assert later.cause == "compute.worker_outlier"


def test_of_halves_state_decides_and_workers_at_random_are_all_named():
    halves = {"digests": (5, 5, 6, 6), "losses": (1, 1, 2, 2)}
    [found] = told(CanaryVerdicts(4), step(**halves, differs=3))
    assert (found.cause, found.ranks) == ("state.parameters_differ", (3,))
    others = {"digests": (5, 6, 7, 8), "losses": (1, 2, 3, 4)}
    [found] = told(CanaryVerdicts(4), step(**others, again=(1, 2, 3, 4)))
    assert (found.cause, found.ranks) == ("compute.nondeterministic", (0, 1, 2, 3))


def test_parameters_that_are_left_out_of_the_reduction_explain_other_results():
    bad = {"digests": (5, 6, 5, 5), "losses": (1, 2, 1, 1), "differs": 1}
    held, left_out = StateKind.HELD, StateKind.LEFT_OUT
    [found] = told(CanaryVerdicts(4), step(**bad, kinds=[held]))
    assert found.cause == "state.parameters_differ"
    assert told(CanaryVerdicts(4), step(**bad, kinds=[held, left_out])) == []
    [found] = told(CanaryVerdicts(4), step(**bad, kinds=[held, left_out, StateKind.PARAMETER]))
    assert found.cause == "state.parameters_differ"


ROUNDED = "no more than rounding may"


@pytest.mark.parametrize(
    ("digests", "loss", "how", "words"),
    [
        ((5, 6, 5, 5), 2, {}, "a different result from the same batch: the loss is 100 % higher"),
        ((5, 6, 5, 5), 1, {}, "loss and norm are the same"),
        ((5, 6, 5, 5), 1 + 1e-5, {}, ROUNDED),
        ((5, 6, 5, 5), 1.006, {"unit": 2**-8}, ROUNDED),
        ((5, 6, 5, 5), 1.02, {"unit": 2**-8, "projected": True}, ROUNDED),
        ((5, 6, 5, 5), 1.02, {"unit": 2**-8}, "2 % higher, and rounding explains at most 0.78 %"),
        ((5, 5, 5, 5), 1, {"again": (5, 5, 5, 7)}, "Rank 3 does not repeat its own result"),
        ((5, 5, 6, 6), 1, {}, "Any of ranks 0–3 may be wrong"),
        ((5, 5, 6, 6), 1, {"differs": 3, "kinds": [StateKind.HOOK]}, "Look at head.weight, or run"),
    ],
)
def test_findings_are_in_plain_words(digests, loss, how, words):
    told = Diagnosis(RunFacts(4)).observe(step(digests=digests, losses=(1, loss, 1, 1), **how))
    [finding] = [f for f in told if f.id.startswith("canary")]
    assert words in f"{finding.explanation} {finding.next_check}"
    assert "before step 32" in finding.explanation.lower()
    assert "{" not in finding.explanation + finding.next_check
