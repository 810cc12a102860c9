"""What is said of parameters that do not learn, or take part otherwise on some workers."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.step import StepReport
from rankscope.evidence.state.judge import ALONE, HELD, NOTHING, NotUpdated
from rankscope.evidence.state.roles import Role, role_word
from rankscope.evidence.state.unequal import UnequalState
from support.stepping import evidence_of, words
from support.streams import gathered

W = 4
PLAIN = int(Role.TRAINED | Role.OWNED)


def difference(kind, name, digests_W, *, unchanged=False):
    return StateDifference(kind, name, np.array(digests_W, np.int64), np.full(W, unchanged))


def resting(name, *, owned=False, rests=True):
    word = int(Role.TRAINED | (Role.OWNED if owned else Role(0)))
    return difference(StateKind.RESTING, name, [word] * W, unchanged=rests)


def tell(detector, found_by_step):
    told = []
    for number, found in found_by_step.items():
        one = replace(gathered(number, [[]] * W), differences=tuple(found))
        told += evidence_of(detector, StepReport(one, {}))
    return told


def test_what_rests_is_named_until_it_moves():
    steps = {4: [resting("a"), resting("b")], 8: [resting("a")], 9: [resting("a", rests=False)]}
    found = tell(NotUpdated(), {**steps, 10: [resting("b", owned=True, rests=False)]})
    assert [one.key for one in found] == [ALONE] * 4
    assert {one.severity for one in found} == {Severity.WARNING}
    assert (found[0].first_step, found[1].last_step) == (4, 8)
    assert "a and b have a gradient, are in no parameter group" in words(found[0])
    assert [one.numbers["names"] for one in found] == [["a", "b"], ["a", "b"], ["b"], ["a", "b"]]
    assert [one.status for one in found] == ["open", "open", "open", "closed"]


def test_what_the_optimizer_holds_is_a_note():
    [found] = tell(NotUpdated(), {4: [resting("scale", owned=True)]})
    assert (found.key, found.cause, found.severity) == (HELD, ALONE, Severity.NOTE)


def test_that_nothing_changes_is_a_warning():
    word = int(Role.TRAINED | Role.OWNED | Role.ALL_REST)
    found = difference(StateKind.RESTING, "scale", [word] * W, unchanged=True)
    still, over = tell(NotUpdated(), {40: [found], 60: [resting("scale", owned=True, rests=False)]})
    assert (still.key, still.cause, still.severity) == (NOTHING, ALONE, Severity.WARNING)
    assert "there are gradients (scale)" in words(still)
    assert (over.key, over.status) == (NOTHING, "closed")


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (int(Role.OWNED), "frozen on rank 2 alone"),
        (PLAIN | Role.LEFT_OUT, "left out of the reduction on rank 2 alone"),
        (role_word(Role.TRAINED | Role.OWNED, "embedding.weight"), "tied on rank 2 alone"),
    ],
)
def test_the_worker_and_the_role_that_differ_are_named(odd, text):
    found = [difference(StateKind.ROLE, "a", [PLAIN, PLAIN, odd, PLAIN])]
    [told] = tell(UnequalState(W), {0: found})
    assert (told.key, told.severity, told.ranks) == ("roles-differ", Severity.ERROR, (2,))
    assert f"Parameters (a) are {text}" in words(told)


@pytest.mark.parametrize(("planned", "severity"), [(False, Severity.NOTE), (True, Severity.ERROR)])
def test_what_is_not_reduced_and_differs_is_told_as_planned(planned, severity):
    found = [difference(StateKind.LEFT_OUT, "expert (4,)", [1, 2, 3, 4])]
    [told] = tell(UnequalState(W, replicated=planned), {0: found})
    assert (told.key, told.severity, told.ranks) == ("left-out-drifts", severity, (0, 1, 2, 3))
    assert "differ from worker to worker" in words(told)
