import functools
import operator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from rankscope.bus.finding import Severity
from rankscope.bus.probe import StepEnd
from rankscope.bus.replicas import StateDifference, StateDigests, StateKind
from rankscope.bus.step import StepReport
from rankscope.evidence.state import judge
from rankscope.evidence.state.probe import PassMeter
from rankscope.evidence.state.roles import Role, numbered, role_word
from rankscope.evidence.state.unequal import AVERAGES, UnequalState
from support.stepping import describe, evidence_of, words
from support.streams import gathered

W = 4


def difference(kind, digests_W, *, name="head.weight", unchanged=()):
    digests_W = np.array(digests_W, np.int64)
    unchanged_W = np.isin(np.arange(len(digests_W)), list(unchanged))
    return StateDifference(StateKind(kind), name, digests_W, unchanged_W)


def step(number, *found, **values):
    values = {name: np.array(value) for name, value in {"replica": [0] * W, **values}.items()}
    one = gathered(number, [[]] * W, **values)
    one = replace(one, differences=found, observed=True, reduced_copies=W)
    return StepReport(one, {})


def watch(*steps):
    detector = UnequalState(W)
    return [evidence for one in steps for evidence in evidence_of(detector, one)]


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("parameter", "state.parameters_differ"),
        ("buffer", "state.buffers_differ"),
        ("reduced", "sync.gradients_differ"),
    ],
)
def test_the_worker_that_is_alone_is_named_with_the_tensor(kind, cause):
    [found] = watch(step(7, difference(kind, [1, 1, 5, 1])))
    assert (found.cause, found.ranks, found.first_step) == (cause, (2,), 7)
    explanation, _ = describe(found)
    assert "rank 2" in explanation.lower()
    assert "head.weight" in explanation


def test_optimizer_state_counts_where_the_parameter_differs():
    moving = [step(at, difference("optimizer", [at, at, -at, at])) for at in (1, 65, 129)]
    assert watch(*moving) == []  # each optimizer keeps a part of it
    both = [difference("optimizer", [1, 1, 5, 1]), difference("parameter", [1, 1, 5, 1])]
    found = watch(step(7, *both))
    assert {one.cause for one in found} == {"state.optimizer_differs", "state.parameters_differ"}
    assert {one.ranks for one in found} == {(2,)}


@pytest.mark.parametrize(
    ("second", "found"),
    [
        ([5, 6, 7, 8], [("scratch-buffers", Severity.NOTE)]),
        ([1, 2, 3, 4], [("state.buffers_differ", Severity.ERROR)]),
    ],
)
def test_buffers_that_no_checkpoint_holds_and_that_change_are_a_note(second, found):
    detector = UnequalState(W, unsaved=["head.weight"])
    assert evidence_of(detector, step(7, difference("buffer", [1, 2, 3, 4]))) == []
    evidence = evidence_of(detector, step(9, difference("buffer", second)))
    assert [(one.key, one.severity) for one in evidence] == found
    assert "(head.weight)" in describe(evidence[0])[0]


def test_gradients_that_the_reduction_left_alone_are_not_reduced():
    [found] = watch(step(0, difference("reduced", [1, 2, 3, 4], unchanged=[0, 1, 2, 3])))
    assert (found.cause, found.ranks) == ("sync.not_reduced", (0, 1, 2, 3))
    assert found.numbers["names"] == ["head.weight"]


def test_norms_tell_at_once_that_nothing_is_reduced():
    local_W = [1.0, 2.0, 3.0, 4.0]
    whole = {"grad_norm": local_W, "reduced_digest": [7] * W}
    [found] = watch(step(0, **whole, reduced_norm=local_W))
    assert found.cause == "sync.not_reduced"
    [found] = watch(step(0, **whole, reduced_norm=[1.5, 1.5, 1.6, 1.5]))
    assert (found.cause, found.ranks) == ("sync.gradients_differ", (2,))


def test_a_gradient_that_one_worker_scales_alone():
    scaled = {"applied_scale": [1.0, 1.0, 1.0, 0.25]}
    [found] = watch(step(3, difference("applied", [1, 1, 1, 9]), **scaled))
    assert (found.key, found.cause) == ("applied-scale", "state.parameters_differ")
    assert found.ranks == (3,)
    assert "0.25" in describe(found)[0]


def test_gradients_that_one_worker_changes_by_several_factors_are_no_scaling():
    apart = difference("applied", [1, 1, 1, 9])
    scales_W = [1.0, 1.0, 1.0, 2.21]
    [found, *more] = watch(
        step(3, apart, applied_scale=scales_W, applied_spread=[0.0, 0.0, 0.0, 0.78]),
        step(4, apart, applied_scale=scales_W, applied_spread=[0.0] * W),  # of some parameters
    )
    assert not [one for one in more if one.key == "applied-scale"]
    assert found.cause == "sync.gradients_differ"
    words, _ = describe(found)
    assert "between the reduction and optimizer.step, not all by one factor" in words
    assert "since step 3 at the latest" in words


def test_gradients_that_reach_the_optimizer_without_a_reduction():
    [found] = watch(step(4, unreduced=[False, True, True, False]))
    assert (found.cause, found.ranks) == ("sync.not_reduced", (1, 2))


def test_the_first_step_without_a_reduction_is_named_also_where_the_next_digests_show_it():
    detector = UnequalState(W)
    alike, apart = [5] * W, [5, 6, 7, 8]
    assert evidence_of(detector, step(8, applied_digest=alike)) == []
    for number in (12, 13):
        assert evidence_of(detector, step(number, unreduced=[True] * W)) == []
    found = evidence_of(detector, step(16, unreduced=[True] * W, applied_digest=apart))
    assert [(one.cause, one.first_step) for one in found] == [("sync.not_reduced", 12)]


@pytest.mark.parametrize(
    ("by_loop", "frozen", "digests_W", "severity"),
    [
        (True, True, [1, 2, 1, 2], Severity.NOTE),
        (True, True, [1, 1, 2, 2], Severity.ERROR),  # one seed for each host
        (True, False, [1, 2, 1, 2], Severity.ERROR),
        (False, True, [1, 2, 1, 2], Severity.ERROR),
    ],
)
def test_frozen_parameters_that_follow_the_place_in_a_group(by_loop, frozen, digests_W, severity):
    detector = UnequalState(W, by_loop=by_loop)
    one = difference("parameter", digests_W, unchanged=range(W) if frozen else ())
    [found] = evidence_of(detector, step(0, one))
    assert (found.cause, found.severity) == ("state.parameters_differ", severity)
    assert found.key == ("frozen-by-place" if severity is Severity.NOTE else found.cause)


@pytest.mark.parametrize(
    ("parameters", "gradients", "by_loop", "severity"),
    [
        ([1, 2, 1, 2], [3, 4, 3, 4], True, Severity.NOTE),
        ([1, 2, 1, 2], [3, 3, 3, 3], True, Severity.ERROR),  # another seed on each second rank
        ([1, 2, 1, 3], [3, 4, 3, 4], True, Severity.ERROR),  # one of them differs
        ([1, 2, 3, 4], [5, 6, 7, 8], True, Severity.ERROR),  # nobody holds the same
        ([1, 2, 1, 2], [3, 4, 3, 4], False, Severity.ERROR),  # a wrapper reduces all of them
    ],
)
def test_experts_that_a_loop_shares_out_by_place(parameters, gradients, by_loop, severity):
    kinds = {"parameter": parameters, "applied": gradients, "optimizer": parameters}
    differ = [difference(kind, each) for kind, each in kinds.items() if len(set(each)) > 1]
    one = step(7, *differ, optimizer_steps=[1] * W)
    found = {each.key: each.severity for each in evidence_of(UnequalState(W, by_loop=by_loop), one)}
    key = "trained-by-place" if severity is Severity.NOTE else "state.parameters_differ"
    assert found[key] is severity
    assert severity is Severity.ERROR or found.keys() == {key}
    whole = UnequalState(W, by_loop=by_loop, trained=1)  # the model has no other parameter
    assert {each.severity for each in evidence_of(whole, one)} == {Severity.ERROR}


def in_local_steps(*digests_SW, first=0, local_steps=4, **values):
    """Return what is told of steps with these digests of a parameter; None: it was not read."""
    detector, told = UnequalState(W, local_steps=local_steps), []
    for number, digests_W in enumerate(digests_SW, start=first):
        known = {} if digests_W is None else {"param_digest": digests_W}
        found = [] if digests_W is None or len(set(digests_W)) == 1 else digests_W
        found = [difference("parameter", found)] if found else []
        found.append(difference("optimizer", [1, 2, 3, 4]))
        told += evidence_of(detector, step(number, *found, unreduced=[True] * W, **known, **values))
    return told


APART, AGREED, ONE_APART = [1, 2, 3, 4], [7] * 4, [7, 7, 8, 7]


@pytest.mark.parametrize(
    "steps",
    [
        [APART, APART, APART, AGREED] * 3,
        [APART, None, APART, ONE_APART] * 3,  # what was not read may have agreed
    ],
)
def test_local_steps_that_a_plan_has_are_no_fault(steps):
    assert in_local_steps(*steps) == []


def test_the_worker_that_missed_an_average_is_named_after_it():
    healthy = [APART, APART, APART, AGREED]
    [found] = in_local_steps(*healthy, APART, APART, APART, ONE_APART, *healthy)
    assert (found.key, found.cause) == (AVERAGES, "state.parameters_differ")
    assert (found.ranks, found.first_step, found.severity) == ((2,), 7, Severity.ERROR)
    explanation, _ = describe(found)
    assert "The parameters of rank 2 (head.weight) differ from the other workers'" in explanation


def test_what_is_equal_or_has_one_owner_is_no_fault():
    assert watch(step(0), step(1, state_layout=[5] * W, reduced_norm=[2.0] * W)) == []
    assert watch(step(0, grad_norm=[1.0, 2.0, 3.0, 4.0], reduced_norm=[1.5, 1.5, 1.6, 1.5])) == []
    own = {name: [1.0, 2.0, 3.0, 4.0] for name in ("grad_norm", "reduced_norm")}
    assert watch(step(0, replica=np.full(W, np.iinfo(np.int64).min), **own)) == []


def test_items_have_a_digest_of_their_own():
    values = ("tensor",), np.zeros(1, np.int64), np.zeros(1, bool)
    kinds = (StateKind.PARAMETER, StateKind.BUFFER)
    assert len({StateDigests((kind,), *values).items for kind in kinds}) == 2


def test_roles_that_differ_in_nothing_a_sentence_could_name_are_no_finding():
    """ZeroRedundancyOptimizer and the optimizer in it hold a share of the parameters twice."""
    assert watch(step(0, difference("role", [3 | Role.TWICE, 3, 3, 3]))) == []
    twice = difference("role", [3 | Role.TWICE, 3, 3, 3], name="other.weight")
    [found] = watch(step(0, difference("role", [int(Role.OWNED), 3, 3, 3]), twice))
    assert found.key == "roles-differ"
    assert "other.weight" not in describe(found)[0]


def test_averages_stay_known_in_steps_that_compare_frozen_parameters_alone():
    apart, own = difference("parameter", [1, 2, 3, 4]), difference("applied", [5, 6, 7, 8])
    columns = {"unreduced": [1] * W, "param_digest": [9] * W}
    detector = UnequalState(W)
    found = evidence_of(detector, step(0, apart, own, **columns))
    assert {one.severity for one in found} == {Severity.ERROR}
    met = evidence_of(detector, step(1, own, **columns))
    assert {one.severity for one in met if one.key != "sync.gradients_differ"} == {Severity.NOTE}
    for number, found in ((2, ()), (3, (apart, own))):  # frozen ones, then the others again
        later = evidence_of(detector, step(number, *found, **columns))
        assert {one.severity for one in later} == {Severity.NOTE}


PLAIN = int(Role.TRAINED | Role.OWNED)


def resting(name, *roles, rests=True):
    word = int(functools.reduce(operator.or_, roles, Role.TRAINED))
    return difference("resting", [word] * W, name=name, unchanged=range(W) if rests else ())


def tell(detector, found_by_step):
    return evidence_of(detector, *(step(number, *found) for number, found in found_by_step.items()))


def test_what_rests_is_named_until_it_moves():
    steps = {4: [resting("a"), resting("b")], 8: [resting("a")], 9: [resting("a", rests=False)]}
    found = tell(judge.NotUpdated(), {**steps, 10: [resting("b", Role.OWNED, rests=False)]})
    assert [one.key for one in found] == [judge.ALONE] * 4
    assert {one.severity for one in found} == {Severity.WARNING}
    assert (found[0].first_step, found[1].last_step) == (4, 8)
    assert "a and b have a gradient, are in no parameter group" in words(found[0])
    assert [one.numbers["names"] for one in found] == [["a", "b"], ["a", "b"], ["b"], ["a", "b"]]
    assert [one.status for one in found] == ["open", "open", "open", "closed"]


def test_what_the_optimizer_holds_is_a_note():
    [found] = tell(judge.NotUpdated(), {4: [resting("scale", Role.OWNED)]})
    assert (found.key, found.cause, found.severity) == (judge.HELD, judge.ALONE, Severity.NOTE)


def test_that_nothing_changes_is_a_warning():
    found = resting("scale", Role.OWNED, Role.ALL_REST)
    still, over = tell(
        judge.NotUpdated(), {40: [found], 60: [resting("scale", Role.OWNED, rests=False)]}
    )
    assert (still.key, still.cause, still.severity) == (
        judge.NOTHING,
        judge.ALONE,
        Severity.WARNING,
    )
    assert "there are gradients (scale)" in words(still)
    assert (over.key, over.status) == (judge.NOTHING, "closed")


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (int(Role.OWNED), "frozen on rank 2 alone"),
        (PLAIN | Role.LEFT_OUT, "left out of the reduction on rank 2 alone"),
        (role_word(Role.TRAINED | Role.OWNED, "embedding.weight"), "tied on rank 2 alone"),
    ],
)
def test_the_worker_and_the_role_that_differ_are_named(odd, text):
    found = [difference("role", [PLAIN, PLAIN, odd, PLAIN], name="a")]
    [told] = tell(UnequalState(W), {0: found})
    assert (told.key, told.severity, told.ranks) == ("roles-differ", Severity.ERROR, (2,))
    assert f"Parameters (a) are {text}" in words(told)


@pytest.mark.parametrize(("planned", "severity"), [(False, Severity.NOTE), (True, Severity.ERROR)])
def test_what_is_not_reduced_and_differs_is_told_as_planned(planned, severity):
    found = [difference("left-out", [1, 2, 3, 4], name="expert (4,)")]
    [told] = tell(UnequalState(W, replicated=planned), {0: found})
    assert (told.key, told.severity, told.ranks) == ("left-out-drifts", severity, (0, 1, 2, 3))
    assert "differ from worker to worker" in words(told)


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Linear(4, 4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        self.centre.lerp_(x.mean(0), 0.1)
        return self.spectral(self.norm(self.student(x)))

    @torch.no_grad()
    def follow(self):
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.lerp_(new, 0.1)


def moved(*, in_forward, passes, steps=24):
    torch.manual_seed(0)
    model = Averaged()
    optimizer = torch.optim.SGD(model.student.parameters(), 0.1)
    meter = PassMeter(model)
    found = {}
    for _ in range(steps):
        for number in range(passes):
            meter.before_forward(0, first=number == 0)
            if in_forward:
                model.follow()
            model(torch.randn(3, 4)).square().mean().backward()
        meter.before_update(optimizer)
        optimizer.step()
        if not in_forward:
            model.follow()
        pending = meter.collect(StepEnd(0, comparable=True, idle=frozenset(), num_passes=1))
        for name, changes, frozen in pending.read().names.get("passes", ()) if pending else ():
            found[name] = changes, frozen
    return found


def test_what_moves_in_the_forward_pass_is_counted():
    teacher = {f"teacher.{name}": (4, True) for name in ("weight", "bias")}
    assert moved(in_forward=True, passes=4) == {**teacher, "centre": (4, False)}
    assert moved(in_forward=False, passes=4) == {"centre": (4, False)}
    assert moved(in_forward=True, passes=1) == {}


def test_frozen_parameters_are_a_warning_and_others_a_note():
    sent = [[("teacher.weight", 4, True), ("centre", 4, False)], []]
    named = [(d.kind, d.name, d.digests_W.tolist()) for d in numbered(StateKind.PASSES, sent)]
    assert named == [(StateKind.PASSES, name, [4, 0]) for name in ("teacher.weight", "centre")]
    frozen = difference("passes", [4, 4, 4, 4], name="teacher.weight", unchanged=range(4))
    once = difference("passes", [1, 1, 1, 1], name="other", unchanged=range(4))
    centre = difference("passes", [4, 4, 4, 4], name="centre")
    detector = judge.MovesInPasses()
    told = [e for n in range(5) for e in evidence_of(detector, step(n, frozen, once, centre))]
    assert {(e.key, e.severity, e.fields["names"]) for e in told} == {
        (judge.FROZEN_MOVES, Severity.WARNING, "teacher.weight"),
        (judge.OTHERS_MOVE, Severity.NOTE, "centre"),
    }
    assert min(e.last_step for e in told) == 2
    assert evidence_of(judge.MovesInPasses(), *(step(n, once) for n in range(9))) == []
