"""The references: exact sums against fractions, float64 against exact sums."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rankscope.lab.numerics.summation import check_reference, exact_sums, sums_in_float64

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 5)), elements=FINITE))
def test_exact_sums_are_those_of_fractions_rounded_once(values_WN):
    expected = [float(sum(map(Fraction, column.tolist()))) for column in values_WN.T]
    assert exact_sums(values_WN).tolist() == expected


def test_float64_is_exact_for_numbers_of_similar_size():
    values = np.random.default_rng(0).standard_normal((64, 5000)).astype(np.float32)
    reference = check_reference(values)
    assert (reference["num_exact"], reference["relative"], reference["ulp"]) == (4096, 0.0, 0.0)


def test_it_is_said_when_float64_is_not_exact():
    values = np.array([[2.0**100] * 3, [1.0, 1.0, 0.0], [-(2.0**100)] * 3], np.float32)
    assert sums_in_float64(values).tolist() == [0.0, 0.0, 0.0]
    reference = check_reference(values)
    assert reference["relative"] == 1.0
    assert reference["ulp"] > 1e18
    assert reference["num_exact"] == 3


def test_the_sample_is_spread_over_the_buffer():
    values = np.zeros((3, 10_000), np.float32)
    values[:, -1] = [2.0**60, 1.0, -(2.0**60)]
    assert check_reference(values, max_exact=7)["num_exact"] == 7
    assert check_reference(values, max_exact=7)["relative"] == 1.0


def test_zeros_have_no_error():
    reference = check_reference(np.zeros((4, 6), np.float32))
    assert reference == {"num_exact": 6, "relative": 0.0, "ulp": 0.0}
