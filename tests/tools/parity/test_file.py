"""The file of a rank's step."""

import numpy as np
import pytest

from rankscope.bus.parity import GRADIENT, QUARTERS, WIDTH, RankStep, TensorFigures
from rankscope.bus.shares import PackedError


def step():
    figures = TensorFigures(
        ("a", "b"),
        ("", "0,0+2,3"),
        np.arange(2.0 * QUARTERS).reshape(2, QUARTERS),
        np.ones((2, QUARTERS, WIDTH), np.float32),
    )
    return RankStep(3, 7, {"world": 4}, {GRADIENT: figures}, np.array([5, -6]), np.array([1.5]))


def test_a_step_comes_back_as_it_was():
    own, back = step(), RankStep.unpack(step().pack())
    assert (back.rank, back.step, back.facts) == (3, 7, {"world": 4})
    assert back.samples.tolist() == [5, -6]
    assert back.losses.tolist() == [1.5]
    assert back.figures[GRADIENT].names == ("a", "b")
    assert back.figures[GRADIENT].places == ("", "0,0+2,3")
    np.testing.assert_array_equal(
        back.figures[GRADIENT].squares_PQ, own.figures[GRADIENT].squares_PQ
    )


@pytest.mark.parametrize("cut", [0, 5, 40, 200])
def test_bytes_that_are_cut_off_hold_no_step(cut):
    with pytest.raises(PackedError):
        RankStep.unpack(step().pack()[:cut])
