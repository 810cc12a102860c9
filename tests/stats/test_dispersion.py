"""Spreads over workers against exact rational arithmetic."""

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankscope.stats.spread import finite_mean, population_std, value_range

any_floats = st.lists(st.floats(width=64), max_size=9)


def exact(values):
    """Mean, population variance and range of the finite values, as fractions."""
    finite = [Fraction(value) for value in values if math.isfinite(value)]
    if not finite:
        return None
    mean = sum(finite) / len(finite)
    return mean, sum((x - mean) ** 2 for x in finite) / len(finite), max(finite) - min(finite)


@given(any_floats)
def test_mean_spread_and_range_agree_with_fractions(values):
    expected = exact(values)
    found = [f(np.array(values)) for f in (finite_mean, population_std, value_range)]
    if expected is None:
        assert all(math.isnan(value) for value in found)
        return
    largest = max(abs(Fraction(v)) for v in values if math.isfinite(v))
    tolerance = largest * Fraction(1, 10**14) + Fraction(1, 10**322)
    assert abs(Fraction(found[0]) - expected[0]) <= tolerance
    root = Fraction(found[1])
    assert (root - tolerance if root > tolerance else 0) ** 2 <= expected[1]
    assert expected[1] <= (root + tolerance) ** 2
    if math.isinf(found[2]):
        assert expected[2] > Fraction(np.finfo(np.float64).max)
    else:
        assert abs(Fraction(found[2]) - expected[2]) <= tolerance
