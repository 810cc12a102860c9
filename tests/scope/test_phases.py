"""The phases of a step, against what they mean: a known reduction, and a call of an optimizer."""

from itertools import product

import pytest

from rankscope.session.collector import MOVES, Event, Phase

MEANING = {
    Phase.OPEN: (False, False),
    Phase.REDUCED: (True, False),
    Phase.UPDATED: (False, True),
    Phase.APPLIED: (True, True),
}
EFFECT = {
    Event.REDUCTION: lambda reduced, updated: (True, updated),
    Event.OPTIMIZER_BEGINS: lambda reduced, updated: (reduced, False),
    Event.OPTIMIZER_ENDS: lambda reduced, updated: (reduced, True),
    Event.FORGET: lambda reduced, updated: (False, False),
}


@pytest.mark.parametrize(("event", "phase"), list(product(EFFECT, MEANING)))
def test_an_event_changes_what_a_phase_means(event, phase):
    moved = MOVES[event].get(phase, phase)
    assert MEANING[moved] == EFFECT[event](*MEANING[phase])


def test_a_step_that_is_handed_over_stays_so_until_the_next_one_begins():
    assert {MOVES[Event.HAND_OVER][phase] for phase in MEANING} == {Phase.LEAVING}
    assert not any(Phase.LEAVING in moves for moves in MOVES.values())
