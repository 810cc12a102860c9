"""Rows of different lengths, against each row alone."""

import numpy as np
import pytest

from rankscope.stats.arrays import Ragged

LENGTHS = {"even": [4] * 7, "uneven": [3, 0, 9, 3, 17, 1], "empty": [0, 0, 0], "one": [300]}


def made(lengths):
    rng = np.random.default_rng(0)
    return [rng.normal(size=length) for length in lengths]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_rows_come_back_and_are_reduced_to_the_bits_of_each_alone(lengths):
    rows = made(lengths)
    ragged = Ragged.of(rows)
    assert [row.tolist() for row in ragged.rows] == [row.tolist() for row in rows]
    assert ragged.reduced(np.add, 0.0).tolist() == [float(row.sum()) for row in rows]
    above = Ragged(ragged.flat > 1, ragged.lengths_R)
    assert above.reduced(np.logical_or, False).tolist() == [bool((row > 1).any()) for row in rows]
    assert above.reduced(np.add, 0, np.int64).tolist() == [int((row > 1).sum()) for row in rows]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_rows_are_taken_joined_and_thinned(lengths):
    rows = made(lengths)
    ragged = Ragged.of(rows)
    order = np.arange(len(rows))[::-1]
    back = ragged.take(order).take(order)
    assert [row.tolist() for row in back.rows] == [row.tolist() for row in rows]
    twice = Ragged.joined([ragged, ragged.take(order)])
    assert [len(row) for row in twice.rows] == [*lengths, *lengths[::-1]]
    kept = ragged.where(ragged.flat > 0)
    assert [row.tolist() for row in kept.rows] == [row[row > 0].tolist() for row in rows]
    owners = ragged.spread(np.arange(len(rows)))
    assert owners.tolist() == [place for place, length in enumerate(lengths) for _ in range(length)]
