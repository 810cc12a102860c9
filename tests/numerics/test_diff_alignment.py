import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics.diff_runs import Training, write_training
from rankscope.tools.diff import DiffClass, compare_runs
from rankscope.tools.diff.parting import growth_of
from rankscope.tools.diff.reading import DiffSide, align, dealt_otherwise
from rankscope.tools.diff.result import Curve

WIDTHS = st.integers(1, 6)


@st.composite
def dealt(draw):
    """Batches by rank, possibly with repeated samples, and a permutation of the ranks."""
    width = draw(WIDTHS)
    ids = st.lists(st.integers(-5, 5), min_size=1, max_size=3)
    batches = {rank: np.array(draw(ids), np.int64) for rank in range(width)}
    return batches, draw(st.permutations(range(width)))


@settings(deadline=None)
@given(dealt())
def test_batches_that_are_dealt_to_other_workers_are_recognised(case):
    batches, order = case
    other = {rank: batches[owner][::-1] for rank, owner in enumerate(order)}
    moved = dealt_otherwise(batches, other)
    assert moved is not None
    for rank, owner in moved.items():
        assert sorted(other[rank]) == sorted(batches[owner])
        assert sorted(other[rank]) != sorted(batches[rank])
    for rank in other.keys() - moved.keys():
        assert sorted(other[rank]) == sorted(batches[rank])


@settings(max_examples=12, deadline=None)
@given(begin=st.integers(0, 6), number=st.integers(0, 20), steps=st.integers(2, 6))
def test_a_continued_run_is_aligned_by_its_batches(tmp_path_factory, begin, number, steps):
    folder = tmp_path_factory.mktemp("align")
    a = DiffSide(write_training(folder / "a", Training(steps=8, traced=False)))
    info = {"continues": "a", "first_step": number}
    steps = min(steps, 8 - begin)
    b = Training(steps=steps, first=number, offset=begin, traced=False, info=info)
    found = align(a, DiffSide(write_training(folder / "b", b)))
    assert found.offset == begin - number
    assert found.steps_a.tolist() == list(range(begin, begin + steps))
    assert found.steps_b.tolist() == list(range(number, number + steps))
    assert found.by_samples


@pytest.fixture(scope="module")
def run(folder):
    return write_training(folder / "a", Training())


def test_a_run_that_begins_in_the_middle_of_another_is_identical_to_its_end(run, tmp_path):
    whole = {}

    def keep(step, moment, tensors):
        if (step, moment) == (3, "parameter"):
            whole.update({name: value.copy() for name, value in tensors.items()})

    write_training(tmp_path / "again", Training(touch=keep))
    rest = write_training(tmp_path / "b", Training(steps=6, offset=4, start=whole))
    found = compare_runs(run, rest)
    assert found.alignment.offset == 4
    assert found.alignment.by_samples
    assert found.kind is DiffClass.IDENTICAL
    untraced = Training(steps=6, offset=4, start=whole, traced=False)
    found = compare_runs(run, write_training(tmp_path / "c", untraced))
    assert found.kind is DiffClass.IDENTICAL
    assert "Digests were not" in " ".join(found.explanation)


@settings(deadline=None)
@given(st.floats(1.01, 3), st.floats(1e-9, 1e-3))
def test_growth_by_a_factor_is_recognised(factor, first):
    steps = np.arange(30)
    values = np.where(steps < 5, 0.0, first * factor ** (steps - 5.0))
    found = growth_of(Curve("loss", steps, values))
    assert found is not None
    assert found.shape == "exponential"
    assert found.factor == pytest.approx(factor, rel=1e-6)
    assert found.first == pytest.approx(first)
