"""The verdict of a canary, and when one is run."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.bus.finding import TIMES_LATELY, Finding, Severity
from rankscope.bus.governor import LAG
from rankscope.bus.packing import PackedError, PlainBatch, pack_batch, unpack_batch
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.step import MISSING_INT
from rankscope.evidence.canary.schedule import (
    RETRY_AFTER,
    SHARE,
    SPACING,
    CanaryAnswer,
    CanaryPlan,
    Planned,
    Schedule,
    all_requested,
    pack_plan,
    pack_run,
    unpack_plan,
    unpack_run,
)
from rankscope.evidence.canary.verdict import (
    CanaryCause,
    CanaryResults,
    differing_state,
    judge,
    results_of,
)
from support.streams import gathered


def results(digests, again=None, peers=None, losses=None) -> CanaryResults:
    digests = np.array(digests, np.int64)
    losses = np.ones(len(digests)) if losses is None else np.array(losses, float)
    return CanaryResults(
        suspect=1,
        peer=0,
        losses_W=losses,
        norms_W=2 * losses,
        digests_W=digests,
        again_W=digests if again is None else np.array(again, np.int64),
        peer_losses_W=losses,
        peer_norms_W=losses,
        peer_digests_W=digests if peers is None else np.array(peers, np.int64),
    )


def test_workers_that_agree_in_every_bit_differ_by_their_data():
    verdict = judge(results([5, 5, 5]), differing=(2,))
    assert (verdict.verdict, verdict.ranks, verdict.exact) == (CanaryCause.DATA, (1,), True)
    assert verdict.distance == 0


@pytest.mark.parametrize(
    ("digests", "differing", "expected", "ranks"),
    [
        ([5, 5, 6, 5], (), CanaryCause.HARDWARE, (2,)),
        ([5, 5, 6, 5], (2,), CanaryCause.STATE, (2,)),
        ([5, 5, 6, 5], (1,), CanaryCause.HARDWARE, (2,)),  # what differs there does not matter
        ([5, 6, 7, 5, 5], (), CanaryCause.HARDWARE, (1, 2)),
        ([5, 6], (), CanaryCause.INCONCLUSIVE, (0, 1)),
        ([5, 6], (0, 1), CanaryCause.STATE, (0, 1)),
        ([5, 5, 6, 6], (), CanaryCause.INCONCLUSIVE, (0, 1, 2, 3)),
        ([5, 5, 6, 6], (3,), CanaryCause.STATE, (3,)),
    ],
)
def test_what_stays_with_a_worker_is_its_state_or_its_hardware(digests, differing, expected, ranks):
    losses = 1 + 0.1 * (np.array(digests) - 5)
    verdict = judge(results(digests, losses=losses), differing=differing)
    assert (verdict.verdict, verdict.ranks) == (expected, ranks)
    assert not verdict.within_rounding
    assert not verdict.exact


def test_a_backward_pass_that_draws_random_numbers_of_its_own_shows_on_all_workers_alike():
    verdict = judge(results([5, 5, 5], again=[6, 6, 6]))
    assert (verdict.verdict, verdict.ranks) == (CanaryCause.NONDETERMINISTIC, (0, 1, 2))


def test_the_peers_batch_counts_as_well():
    verdict = judge(results([5, 5, 5], peers=[5, 4, 5]))
    assert (verdict.verdict, verdict.ranks) == (CanaryCause.HARDWARE, (1,))
    assert verdict.within_rounding


def test_a_worker_that_does_not_repeat_itself_is_named():
    verdict = judge(results([5, 5, 6], again=[5, 5, 7]), differing=(2,))
    assert (verdict.verdict, verdict.ranks) == (CanaryCause.NONDETERMINISTIC, (2,))


def test_alone_a_worker_either_repeats_itself_or_does_not():
    assert judge(results([5])).verdict is CanaryCause.DATA
    assert judge(results([5], again=[6])).verdict is CanaryCause.NONDETERMINISTIC


def test_where_all_add_in_any_order_rounding_is_no_difference():
    verdict = judge(results([5, 6, 7], again=[8, 9, 7], losses=[1, 1 + 1e-6, 1]))
    assert (verdict.verdict, verdict.exact) == (CanaryCause.DATA, False)
    assert verdict.distance == pytest.approx(1e-6)


def test_among_workers_that_add_in_any_order_one_far_off_is_told_apart():
    unsteady = results([5, 6, 7, 8], again=[1, 2, 3, 4], losses=[1, 1 + 1e-6, 1, 1.1])
    assert judge(unsteady).ranks == (3,)
    assert judge(unsteady).verdict is CanaryCause.HARDWARE
    assert judge(unsteady, differing=(3,)).verdict is CanaryCause.STATE


def test_workers_that_all_compute_at_random_are_all_named():
    verdict = judge(results([5, 6, 7], again=[1, 2, 3], losses=[1, 2, 3]))
    assert (verdict.verdict, verdict.ranks) == (CanaryCause.NONDETERMINISTIC, (0, 1, 2))


def test_without_a_result_nothing_is_concluded():
    verdict = judge(results([5, MISSING_INT, 5]))
    assert (verdict.verdict, verdict.ranks) == (CanaryCause.INCONCLUSIVE, (1,))
    assert np.isnan(verdict.distance)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_worker_that_is_not_finite_is_far_off(bad):
    verdict = judge(results([5, 5, 6], losses=[1, 1, bad]))
    assert (verdict.verdict, verdict.ranks) == (CanaryCause.HARDWARE, (2,))
    assert verdict.distance == np.inf
    assert judge(results([5, 5], losses=[bad, bad])).distance == 0


def canary_columns(num_workers=3, **other):
    columns = {
        "canary_of": np.full(num_workers, 1),
        "canary_loss": np.ones(num_workers),
        "canary_norm": np.ones(num_workers),
        "canary_digest": np.arange(num_workers),
        "canary_again": np.arange(num_workers),
        "canary_against": np.full(num_workers, 2),
        "canary_against_loss": np.ones(num_workers),
        "canary_against_norm": np.ones(num_workers),
        "canary_against_digest": np.arange(num_workers),
    }
    return gathered(7, [np.arange(2)] * num_workers, **{**columns, **other})


def test_results_are_read_from_a_step_in_which_all_ran():
    found = results_of(canary_columns())
    assert found is not None
    assert (found.suspect, found.peer, found.digests_W.tolist()) == (1, 2, [0, 1, 2])
    assert results_of(canary_columns(canary_digest=[1, MISSING_INT, 1])) is None
    assert results_of(canary_columns(canary_of=[1, 1, 2])) is None
    assert results_of(gathered(7, [np.arange(2)] * 3)) is None


def test_running_statistics_are_no_state_that_matters():
    def step(kind, name):
        difference = StateDifference(kind, name, np.array([1, 1, 2]), np.zeros(3, bool))
        none = gathered(7, [np.arange(2)] * 3, replica=[0, 0, 0])
        return replace(none, differences=(difference,))

    assert differing_state(step(StateKind.PARAMETER, "head.weight")) == (2,)
    assert differing_state(step(StateKind.BUFFER, "mask")) == (2,)
    assert differing_state(step(StateKind.BUFFER, "norm.running_mean")) == ()
    assert differing_state(step(StateKind.OPTIMIZER, "head.weight")) == ()


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


@pytest.mark.parametrize(
    "other",
    [
        finding(cause="time.straggler"),
        finding(status="closed"),
        finding(ranks=()),
        finding(name="canary-differs", cause="compute.worker_outlier"),
    ],
)
def test_what_no_canary_can_explain_leads_to_none(other):
    assert planned(CanaryPlan(4), 0, 500, findings=[other]) == []


def test_what_comes_and_goes_leads_to_one_at_the_third_time_within_50_steps():
    plan = CanaryPlan(4)
    rare = replace(finding("gross-value", "inconclusive"), evidence={TIMES_LATELY: 2})
    assert planned(plan, 0, 100, findings=[rare]) == []
    often = replace(rare, evidence={TIMES_LATELY: 3})
    assert [one.reason for one in planned(plan, 100, 300, findings=[often])] == ["gross-value"]


def test_canaries_of_findings_keep_a_distance():
    both = [finding(), finding("rank-1", ranks=(1,))]
    first, second = planned(CanaryPlan(4), 10, 1000, findings=both)
    assert second.capture_at - first.capture_at == SPACING
    assert (first.suspect, second.suspect) == (2, 1)


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


def test_a_schedule():
    plan = CanaryPlan(3, Schedule(100))
    assert plan.current is not None  # the first one is known without a word
    seen = [plan.current, *planned(plan, 0, 350)]
    assert [one.run_at for one in seen] == [32, 132, 232, 332]
    assert [(one.suspect, one.peer) for one in seen] == [(0, 1), (1, 2), (2, 0), (0, 1)]
    assert {one.reason for one in seen} == {"scheduled"}
    assert not any(one.of_finding or one.by_default for one in seen)
    assert len(planned(CanaryPlan(3, Schedule(1)), 0, 100)) == 3  # one after the other


@pytest.mark.parametrize(("step_seconds", "cost"), [(0.016, 0.1), (2.0, 3.0), (0.1, 0.0001)])
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


def test_one_that_comes_late_is_put_off_further_each_time_until_it_has_run():
    plan = CanaryPlan(4, Schedule())
    newest, leads = 100, []
    for late in (5, 300, 1, 1, 1, 1):
        one = plan.postpone(newest, late)
        leads.append(one.run_at - newest)
        newest = one.run_at
    assert leads == [32, 632, 1264, 2528, 4096, 4096]  # twice as far, or as late as it came
    assert (one.suspect, one.peer, one.capture_at) == (0, 1, 16)  # the same batches
    plan.finish()
    assert plan.lead == 2048


def test_all_is_counted_from_the_newest_step_that_is_known():
    plan = CanaryPlan(4)
    one = plan.observe(50, [finding()], newest=70)
    assert one is not None
    assert (one.capture_at, one.run_at) == (70 + LAG, 70 + 2 * LAG)
    assert plan.run_at(80).run_at == 70 + 2 * LAG
    assert plan.run_at(95).run_at == 95 + LAG
    assert plan.current is not None
    assert plan.current.run_at == 95 + LAG


@pytest.mark.parametrize("every", [1, 50, 199])
def test_scheduled_canaries_do_not_put_off_those_of_findings(every):
    plan = CanaryPlan(4, Schedule(every))
    planned(plan, 0, 310)
    both = [finding(), finding("rank-1", ranks=(1,))]
    of_findings = [one for one in planned(plan, 310, 1000, findings=both) if one.of_finding]
    assert [one.reason for one in of_findings] == ["rank-2", "rank-1"]
    first, second = (one.capture_at - LAG for one in of_findings)
    assert first <= 310 + 2 * LAG  # the present one has to end
    assert SPACING <= second - first <= SPACING + 2 * LAG


def test_one_that_is_asked_for_waits_for_the_present_one():
    plan = CanaryPlan(3)
    assert plan.observe(3, [finding()]) is not None
    assert plan.observe(5, requested=True) is None
    [requested] = planned(plan, 6, 200)
    assert (requested.reason, requested.capture_at) == ("asked-for", 35 + 16)


def test_one_worker_has_nobody_to_compare_with():
    assert planned(CanaryPlan(1, Schedule(10)), 0, 100, findings=[finding()], requested=True) == []


def test_all_must_ask():
    def step(*asking):
        return gathered(7, [np.arange(2)] * 2, canary_of=asking)

    assert all_requested(step(0, 0)) is True
    assert all_requested(step(0, MISSING_INT)) is None
    assert all_requested(step(MISSING_INT, MISSING_INT)) is False
    assert all_requested(canary_columns()) is False  # these are results


# Batches --------------------------------------------------------------------------------------


def test_a_batch_survives_its_way_to_another_worker():
    arrays = (
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.float32(2.5).reshape(()),
        np.empty((0, 4), np.complex64),
        np.array([True, False]),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    )
    batch = PlainBatch({"list": [1, None, "é"]}, arrays, np.array([-3, 2**62]))
    back = unpack_batch(pack_batch(batch))
    assert back.structure == batch.structure
    assert back.samples.tolist() == [-3, 2**62]
    for one, other in zip(arrays, back.arrays, strict=True):
        assert (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist())
    assert batch.num_bytes == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("size", [0, 7, 40, -1])
def test_bytes_that_are_no_batch(size):
    packed = pack_batch(PlainBatch(None, (np.arange(9.0),)))
    with pytest.raises(PackedError, match="these bytes"):
        unpack_batch(packed[:size])


def test_what_root_and_workers_say_to_each_other_survives_the_way():
    planned = Planned("rank-2", 2, 3, 66, 82, attempt=2, by_default=True)
    assert unpack_plan(pack_plan(planned)) == planned
    batches = [PlainBatch({"list": [number]}, (np.arange(number),)) for number in (3, 5)]
    packed = pack_batch(batches[0]), pack_batch(batches[1])
    back, found = unpack_run(pack_run(planned, packed))
    assert back == planned
    for batch, other in zip(batches, found, strict=True):
        assert (batch.structure, batch.arrays[0].tolist()) == (
            other.structure,
            other.arrays[0].tolist(),
        )
    answer = CanaryAnswer(66, packed[0], "bfloat16", {"torch": "2.9"}, "é", True)
    assert CanaryAnswer.unpack(answer.pack()) == answer


@pytest.mark.parametrize("size", [0, 7, 60, -1])
@pytest.mark.parametrize("unpack", [unpack_run, unpack_plan, CanaryAnswer.unpack])
def test_bytes_that_say_nothing(unpack, size):
    planned = Planned("rank-2", 2, 3, 66, 82)
    batch = pack_batch(PlainBatch(None, (np.arange(9.0),)))
    content = {
        unpack_run: pack_run(planned, (batch, batch)),
        unpack_plan: pack_plan(planned),
    }.get(unpack, b"x" + CanaryAnswer(66, batch).pack())
    with pytest.raises(PackedError):
        unpack(content[:size])
