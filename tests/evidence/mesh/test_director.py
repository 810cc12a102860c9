import math

import numpy as np
import pytest

from rankscope.evidence.mesh import director
from rankscope.stats.rounding import tolerance_of

NAMES = ("norm", "up", "router")


def part(rank: int, values_2N: list[list[float]], *, axes=None, **more) -> director.AxisPart:
    """Return what a rank knows; each tensor is its value in one direction."""
    values = np.array(values_2N, np.float64)
    sketches = np.zeros((2, len(NAMES), 61), np.float32)
    sketches[:, :, 7] = np.where(np.isfinite(values), values, 0)
    known = {
        "rank": rank,
        "axes": axes or {"tp": (4, 5), "cp": (4, 6)},
        "layout": 99,
        "cut": ("tp",),
        "names": NAMES,
        "types": ("float32", "float32", "bfloat16"),
        "over_NA": np.array([[2, 1], [0, 1], [1, 1]], np.uint8),
        "digests_2N": values.view(np.int64).copy(),
        "norms_2N": np.abs(values),
        "sketches_2NK": sketches,
    }
    return director.AxisPart(**{**known, **more})


ALIKE = [[1.0, 2.0, 3.0], [0.1, 0.2, 0.3]]


def test_what_is_cut_over_an_axis_is_not_compared_over_it():
    other = part(5, [[1.0, -9.0, 3.0], [0.1, 99.0, 0.3]])
    found = director.compare_along("tp", [part(4, ALIKE), other])
    named = [(one.name, one.placed, one.cuts) for one in found]
    assert named == [("norm", True, True), ("router", False, True)]
    assert [(one.parameter, one.gradient, one.odd) for one in found] == [(0, 0, ())] * 2
    over_cp = director.compare_along("cp", [part(4, ALIKE), other])
    assert [(one.name, one.cuts) for one in over_cp] == [(name, False) for name in NAMES]
    assert over_cp[1].parameter == pytest.approx(11 / 9)
    assert over_cp[1].ranks == (4, 5)


def test_distances_count_from_half_of_the_digits_on():
    near, far = 1e-5, 1e-3  # beyond half of the digits of float32, and not of bfloat16
    other = part(5, [[1.0 + near, 2.0, 3.0], [0.1 * (1 + far), 0.2, 0.3 * (1 + far)]])
    norm, router = director.compare_along("tp", [part(4, ALIKE), other])
    assert norm.parameter == pytest.approx(near, rel=0.1)
    assert norm.gradient == pytest.approx(far, rel=0.1)
    assert (norm.parameter_differs, norm.gradient_differs) == (False, True)
    assert (router.parameter_differs, router.gradient_differs) == (False, False)
    assert norm.tolerance == tolerance_of("float32") < router.tolerance == tolerance_of("bfloat16")


def one(
    name, parameter=0.0, gradient=0.0, *, ranks=(0, 1), cuts=True, placed=False, odd=None, held=True
):
    odd = ranks if odd is None else odd
    return director.Replicated(name, ranks, placed, cuts, parameter, gradient, odd, 2.0**-12, held)


def observe(*steps, axis="tp", begun_at=0):
    """Return all findings in their last state, by id, after steps of ``(step, replicas)``."""
    verdict = director.AxisVerdict(axis, begun_at)
    found = {}
    for step, replicas in steps:
        found |= {each.id: each for _, each in verdict.observe(step, replicas, {0: 0, 4: 1})}
    return found


def test_equal_replicas_say_nothing():
    assert observe((0, [one("a"), one("b")]), (8, [one("a")])) == {}


def test_what_differs_in_the_first_step_is_the_whole_cause():
    first = [one("a", gradient=1.3), one("b"), one("c", gradient=0.01)]
    found = observe((0, first), (90, [one("b", parameter=0.1, gradient=0.9)]))
    assert list(found) == ["sync.partial_gradient:tp"]
    [finding] = found.values()
    assert finding.evidence["parameters"] == ["a", "c"]
    said = "The gradient of a and c is partial over the mesh axis tp since step 0: it is not"
    assert finding.explanation.startswith(f"{said} reduced over that axis.")
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
    first = [one("a", 1.4, 1.4, **meant), one("b", 0.0, 1.4, **meant)]
    found = observe((0, first), (1, [one("b", 0.1, 1.4, **meant)]))
    assert list(found) == ["state.replicas_differ:tp"]
    assert str(found["state.replicas_differ:tp"].severity) == severity


def test_drift_is_nothing_until_rounding_does_not_explain_it():
    assert observe((0, [one("a")]), (8, [one("a", 1e-6, 1e-6)])) == {}
    found = observe((0, [one("a")]), (8, [one("a", 1e-6)]), (16, [one("a", 1e-3)]))
    assert [str(finding.severity) for finding in found.values()] == ["error"]


EMBEDDING = "embedding.weight = head.weight"


def tied(digest, parameter=0.0, gradient=0.0, *, factor=math.nan):
    return director.Replicated(
        EMBEDDING, (0, 2), False, False, parameter, gradient, (0, 2), 2.0**-12,
        same=parameter == 0, digest=digest, factor=factor,
    )  # fmt: skip


def told(*steps, certain=(EMBEDDING,)):
    verdict = director.TieVerdict("pp", 0, certain)
    found = [
        each for step, weight in steps for _, each in verdict.observe(step, [weight], {0: 0, 1: 1})
    ]
    return {str(finding.severity): finding for finding in found}


def test_weights_that_stay_equal_say_nothing_whatever_their_gradients_are():
    """An optimizer, or an average after its call, may keep them equal."""
    assert told(*((step, tied(step, gradient=1.0)) for step in range(9))) == {}


def test_gradients_that_are_not_summed_make_them_drift():
    found = told((0, tied(7, gradient=1.1)), (1, tied(8, 1e-6, 1.1)))
    assert list(found) == ["warning"]
    finding = found["warning"]
    assert (finding.cause, finding.first_step, finding.ranks) == ("sync.tied_weights", 1, (0,))
    assert f"The tied weight {EMBEDDING} drifts apart over pp since step 1" in finding.explanation
    assert "not added up over pp" in finding.explanation
    assert "only the first values were copied" in finding.next_check


def test_bits_that_differ_by_rounding_alone_are_no_drift():
    assert told((0, tied(7)), *((step, tied(step, 1e-6, 1e-6)) for step in range(1, 9))) == {}
    assert list(told((0, tied(7)), (8, tied(8, 1e-3)))) == ["warning"]


def test_after_an_update_that_kept_them_equal_it_is_an_error():
    scaled = tied(8, gradient=0.5, factor=0.5)
    found = told((0, tied(7)), (1, tied(8)), (2, scaled), (3, tied(9, 0.1)))
    assert list(found) == ["error"]
    assert "scaled apart: one was 0.5 times the other" in found["error"].explanation
    assert "checkpoint before step 3" in found["error"].next_check


@pytest.mark.parametrize("later", [0.0, 0.2])
def test_other_values_that_are_loaded_before_the_first_step_end_the_tie(later):
    assert told((0, tied(7, 0.5)), (1, tied(8, later, 1.0)), (2, tied(9, 0.2, 1.0))) == {}
