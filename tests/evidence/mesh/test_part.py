"""Replicas along an axis of a mesh, from what each rank knows of its own."""

import numpy as np
import pytest

from rankscope.evidence.mesh.director import AxisPart, compare_along
from rankscope.stats.rounding import tolerance_of

NAMES = ("norm", "up", "router")
K = 61


def part(rank: int, values_2N: list[list[float]], *, axes=None, **more) -> AxisPart:
    """Return what a rank knows; each tensor is its value in one direction."""
    values = np.array(values_2N, np.float64)
    sketches = np.zeros((2, len(NAMES), K), np.float32)
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
    return AxisPart(**{**known, **more})


ALIKE = [[1.0, 2.0, 3.0], [0.1, 0.2, 0.3]]


def test_what_is_cut_over_an_axis_is_not_compared_over_it():
    other = part(5, [[1.0, -9.0, 3.0], [0.1, 99.0, 0.3]])
    found = compare_along("tp", [part(4, ALIKE), other])
    named = [(one.name, one.placed, one.cuts) for one in found]
    assert named == [("norm", True, True), ("router", False, True)]
    assert [(one.parameter, one.gradient, one.odd) for one in found] == [(0, 0, ())] * 2
    over_cp = compare_along("cp", [part(4, ALIKE), other])
    assert [(one.name, one.cuts) for one in over_cp] == [(name, False) for name in NAMES]
    assert over_cp[1].parameter == pytest.approx(11 / 9)
    assert over_cp[1].ranks == (4, 5)


def test_distances_count_from_half_of_the_digits_on():
    near, far = 1e-5, 1e-3  # beyond half of the digits of float32, and not of bfloat16
    other = part(5, [[1.0 + near, 2.0, 3.0], [0.1 * (1 + far), 0.2, 0.3 * (1 + far)]])
    norm, router = compare_along("tp", [part(4, ALIKE), other])
    assert norm.parameter == pytest.approx(near, rel=0.1)
    assert norm.gradient == pytest.approx(far, rel=0.1)
    assert (norm.parameter_differs, norm.gradient_differs) == (False, True)
    assert (router.parameter_differs, router.gradient_differs) == (False, False)
    assert norm.tolerance == tolerance_of("float32") < router.tolerance == tolerance_of("bfloat16")
