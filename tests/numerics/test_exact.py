"""The references: exact sums against fractions, float64 against exact sums."""

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rankscope.lab.numerics.summation import exact_sums

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=30, deadline=None)
@given(arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 5)), elements=FINITE))
def test_exact_sums_are_those_of_fractions_rounded_once(values_WN):
    expected = [float(sum(map(Fraction, column.tolist()))) for column in values_WN.T]
    assert exact_sums(values_WN).tolist() == expected
