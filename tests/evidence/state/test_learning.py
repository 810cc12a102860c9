"""What is said of parameters that do not learn, or take part otherwise on some workers."""

import functools
import operator

import pytest

from rankscope.bus.finding import Severity
from rankscope.evidence.state.judge import ALONE, HELD, NOTHING, NotUpdated
from rankscope.evidence.state.roles import Role, role_word
from rankscope.evidence.state.unequal import UnequalState
from support.stepping import evidence_of, words

from .test_unequal import W, difference, step

PLAIN = int(Role.TRAINED | Role.OWNED)


def resting(name, *roles, rests=True):
    word = int(functools.reduce(operator.or_, roles, Role.TRAINED))
    return difference("resting", [word] * W, name=name, unchanged=range(W) if rests else ())


def tell(detector, found_by_step):
    return evidence_of(detector, *(step(number, *found) for number, found in found_by_step.items()))


def test_what_rests_is_named_until_it_moves():
    steps = {4: [resting("a"), resting("b")], 8: [resting("a")], 9: [resting("a", rests=False)]}
    found = tell(NotUpdated(), {**steps, 10: [resting("b", Role.OWNED, rests=False)]})
    assert [one.key for one in found] == [ALONE] * 4
    assert {one.severity for one in found} == {Severity.WARNING}
    assert (found[0].first_step, found[1].last_step) == (4, 8)
    assert "a and b have a gradient, are in no parameter group" in words(found[0])
    assert [one.numbers["names"] for one in found] == [["a", "b"], ["a", "b"], ["b"], ["a", "b"]]
    assert [one.status for one in found] == ["open", "open", "open", "closed"]


def test_what_the_optimizer_holds_is_a_note():
    [found] = tell(NotUpdated(), {4: [resting("scale", Role.OWNED)]})
    assert (found.key, found.cause, found.severity) == (HELD, ALONE, Severity.NOTE)


def test_that_nothing_changes_is_a_warning():
    found = resting("scale", Role.OWNED, Role.ALL_REST)
    still, over = tell(NotUpdated(), {40: [found], 60: [resting("scale", Role.OWNED, rests=False)]})
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
