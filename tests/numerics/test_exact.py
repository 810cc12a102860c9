"""The references: exact sums against fractions, float64 against exact sums."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rankscope.lab.numerics.summation import check_reference, exact_sums

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 5)), elements=FINITE))
def test_exact_sums_are_those_of_fractions_rounded_once(values_WN):
    expected = [float(sum(map(Fraction, column.tolist()))) for column in values_WN.T]
    assert exact_sums(values_WN).tolist() == expected


def test_float64_is_exact_for_numbers_of_similar_size():
    values = np.random.default_rng(0).standard_normal((64, 5000)).astype(np.float32)
    reference = check_reference(values)
    assert (reference["num_exact"], reference["relative"], reference["ulp"]) == (4096, 0.0, 0.0)
