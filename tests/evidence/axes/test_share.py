"""What the ranks along an axis of a mesh should agree on."""

import dataclasses
from pathlib import Path

import pytest

from rankscope.bus.finding import Severity
from rankscope.bus.probe import DirectedRun
from rankscope.evidence.axes.director import Axes, AxesShare, loss_distance, lost_labels

ROWS, LENGTH = 4, 16


def share(rank: int, loss: float = 4.0, **more) -> AxesShare:
    """Return one rank's share of a step: the whole of 4 sequences of 16 tokens."""
    taken = {
        "lines": {"tp": (0, 1)}, "cut": ("tp",), "sequences": (), "losses": (loss,),
        "weight": ROWS * (LENGTH - 1.0), "samples": 1, "rows": ROWS, "tokens": ROWS * LENGTH * 1.0,
        "dtype": "float32", "random": None,
    }  # fmt: skip
    return AxesShare(rank, **{**taken, **more})


def test_losses_of_one_batch_that_differ_are_found():
    assert loss_distance([share(0, 4.1924), share(1, 4.1900)]) == pytest.approx(5.7e-4, rel=0.01)
    assert loss_distance([share(0, 4.1924), share(1, 4.1924 * (1 + 1e-6))]) == 0.0
    assert loss_distance([share(0, float("nan")), share(1)]) == 0.0


def parts(**more) -> list[AxesShare]:
    """Return the halves of 4 sequences, with labels that were shifted inside each half."""
    half = {"tokens": ROWS * 8.0, "weight": ROWS * 7.0, "sequences": ("tp",), "cut": (), **more}
    return [share(rank, 4.0, samples=rank, **half) for rank in (0, 1)]


def test_labels_that_are_shifted_inside_each_part_are_counted():
    assert lost_labels(parts()) == (ROWS, ROWS * 15)
    first, last = parts()
    assert lost_labels([dataclasses.replace(first, weight=ROWS * 8.0), last]) == (0, 0)
    assert lost_labels(parts(weight=ROWS * 5.0)) == (0, 0)  # masked labels
    assert lost_labels([first, dataclasses.replace(last, samples=first.samples)]) == (0, 0)


def reported(shares: list[AxesShare], *, first: list[AxesShare] | None = None) -> list:
    found: list = []
    axes = Axes(DirectedRun(2, 0, Path(), report=found.append))
    for step in range(5):
        for each in first if first and not step else shares:
            axes.take(each.rank, step, each.pack())
    return found


def test_a_difference_is_reported_at_each_doubling_with_its_probable_cause():
    found = reported([share(0, 4.1924), share(1, 4.1900)])
    assert [finding.evidence["steps"] for finding in found] == [1, 2, 4]
    assert "4.1924 against 4.19," in found[0].explanation
    assert "cross-entropy over a part of the vocabulary" in found[0].next_check
    [first, *_] = reported([share(0, 4.1, random=1), share(1, 4.2, random=2)])
    assert "equal masks" in first.next_check
    [first, *_] = reported(parts())
    assert "have 56 of the 60 labels" in first.explanation
    assert first.first_step == 0
    assert reported([share(0), share(1)]) == []


def test_ranks_of_one_model_with_other_samples_are_noted_unless_a_batch_was_the_same():
    apart = [share(0), share(1, samples=2)]
    [*_, last] = reported(apart)
    assert (last.id, last.severity) == ("samples-differ-along-axis", Severity.NOTE)
    assert "ranks 0 and 1 of the job" in last.explanation
    assert reported([share(0), share(1)]) == []
    assert reported([share(0, cut=()), share(1, samples=2, cut=())]) == []
    assert reported(apart, first=[share(0), share(1)]) == []
