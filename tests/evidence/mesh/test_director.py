"""Which of several differences along an axis is the cause, and which a consequence."""

import pytest

from rankscope.evidence.mesh.director import AxisVerdict, Replicated

WORKERS = {0: 0, 4: 1}


def one(
    name, parameter=0.0, gradient=0.0, *, ranks=(0, 1), cuts=True, placed=False, odd=None, held=True
):
    odd = ranks if odd is None else odd
    return Replicated(name, ranks, placed, cuts, parameter, gradient, odd, 2.0**-12, held)


def observe(*steps, axis="tp", begun_at=0):
    """Return all findings in their last state, by id, after steps of ``(step, replicas)``."""
    verdict = AxisVerdict(axis, begun_at)
    found = {}
    for step, replicas in steps:
        found |= {finding.id: finding for finding in verdict.observe(step, replicas, WORKERS)}
    return found


def test_equal_replicas_say_nothing():
    assert observe((0, [one("a"), one("b")]), (8, [one("a")])) == {}


def test_what_differs_in_the_first_step_is_the_whole_cause():
    found = observe(
        (0, [one("a", gradient=1.3), one("b"), one("c", gradient=0.01)]),
        (90, [one("b", parameter=0.1, gradient=0.9)]),
    )
    assert list(found) == ["sync.partial_gradient:tp"]
    [finding] = found.values()
    assert finding.evidence["parameters"] == ["a", "c"]
    said = (
        "The gradient of a and c is partial over the mesh axis tp since step 0: it is not reduced"
    )
    assert finding.explanation.startswith(f"{said} over that axis.")
    assert "ranks 0 and 1 of the job; they lie apart by 1.3 of their norm" in finding.explanation
    assert finding.ranks == (0,)
    assert "Start again with the fault repaired" in finding.next_check


def test_ranks_with_an_empty_share_do_not_make_it_a_fault_of_single_workers():
    """Where a small parameter is cut over more ranks than it has rows."""
    others = {"ranks": (4, 5)}
    empty = observe((0, [one("a", gradient=1.3)]), (0, [one("a", held=False, **others)]),
                    (8, [one("a", gradient=1.3)]))  # fmt: skip
    sound = observe((0, [one("a", gradient=1.3)]), (0, [one("a", **others)]),
                    (8, [one("a", gradient=1.3)]))  # fmt: skip
    assert [finding.ranks for finding in empty.values()] == [()]
    assert [finding.ranks for finding in sound.values()] == [(0,)]


@pytest.mark.parametrize(
    ("meant", "severity"), [({"placed": True}, "error"), ({"cuts": True}, "error"), ({}, "warning")]
)
def test_plain_tensors_may_be_meant_to_differ_where_the_axis_cuts_nothing(meant, severity):
    meant = {"cuts": False, **meant}
    found = observe(
        (0, [one("a", 1.4, 1.4, **meant), one("b", 0.0, 1.4, **meant)]),
        (1, [one("b", 0.1, 1.4, **meant)]),
    )
    assert list(found) == ["state.replicas_differ:tp"]
    assert str(found["state.replicas_differ:tp"].severity) == severity


def test_drift_is_nothing_until_rounding_does_not_explain_it():
    assert observe((0, [one("a")]), (8, [one("a", 1e-6, 1e-6)])) == {}
    found = observe((0, [one("a")]), (8, [one("a", 1e-6)]), (16, [one("a", 1e-3)]))
    assert [str(finding.severity) for finding in found.values()] == ["error"]
