"""A resumption beside a training that went on, of made-up trainings."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.bus.parity import GRADIENT, HELD, MOMENT
from rankscope.tools.parity.compare import compare
from rankscope.tools.parity.reading import Bounds, Whole, joined, part_of
from rankscope.tools.parity.result import Kind
from rankscope.tools.stages import Stage
from tools.parity.test_compare import SHAPES, of, sketched, training

TORCH = "torch's on the CPU"


def moments(step):
    values = {n: np.random.default_rng([step, len(n)]).standard_normal(64) for n in SHAPES}
    return {name: sketched(each) for name, each in values.items()}


def whole(num_steps=4, ranks=4, change=None):
    side = training(change, num_steps=num_steps)
    for number, step in side.steps.items():
        step.figures[f"{MOMENT}exp_avg"] = moments(number)
        step.random = {rank: {TORCH: f"{number} {rank}"} for rank in range(ranks)}
    return side


def resumed(at=2, change=None):
    side = part_of(whole(change=change), at, 4)
    first = side.steps[at]
    first.figures[f"{HELD}exp_avg"] = moments(at - 1)
    first.facts = {**first.facts, "held counters": dict.fromkeys(SHAPES, float(at))}
    return replace(side, name="B")


def answer(later, a=None):
    own, other = joined(a or whole(), later, 2)
    return compare(Bounds(own, other))


def test_moments_that_are_no_floating_point_numbers_on_one_side_are_not_compared():
    kept, later = whole(), resumed()
    signs = {name: sketched(np.ones(64)) for name in SHAPES}
    later.steps[2].figures[f"{HELD}signs"] = signs  # a mask that loading makes numbers of
    assert answer(later, kept).stage is Stage.STATE
    first = kept.steps[2]
    first.facts = {**first.facts, "moments not measured": {"signs": "torch.bool"}}
    found = answer(later, kept)
    assert found.kind is Kind.SAME
    assert "The optimizer's signs is torch.bool in A: it is not compared." in found.notes


def test_a_counter_that_begins_again_is_named():
    later = resumed()
    later.steps[2].facts = {**later.steps[2].facts, "held counters": dict.fromkeys(SHAPES, 0.0)}
    found = answer(later)
    assert found.stage is Stage.STATE
    assert "step counter is 2 in A and 0 in B" in found.headline


def test_other_parameters_are_named_at_the_start():
    later = resumed()
    start = later.steps[2].figures["start"]
    start["up"] = Whole(start["up"].squares_Q * 4, start["up"].sketches_QK * 2)
    found = answer(later)
    assert (found.stage, [each.name for each in found.differences]) == (Stage.START, ["up"])


@pytest.mark.parametrize("drawn", [True, False])
def test_the_random_state_of_one_rank_on_all_is_named(drawn):
    later = resumed()
    later.steps[2].random = {rank: {TORCH: "2 0"} for rank in range(4)}
    found = answer(replace(later, drawn=drawn))
    words = "rank 1 holds that of rank 0; rank 2 holds that of rank 0; rank 3 holds that of rank 0"
    if drawn:
        assert (found.stage, found.kind) == (Stage.RANDOM, Kind.DIFFERENT)
        assert words in found.headline
    else:
        assert found.kind is Kind.SAME
        assert any(words in note for note in found.notes)


OTHER_GRADIENT = of(GRADIENT, "up", 2, lambda values: values + 1)
"""What other samples make."""


def test_skipped_samples_are_named_with_the_step_that_has_them():
    later = resumed(change=OTHER_GRADIENT)
    later.steps[2].samples = later.steps[3].samples
    found = answer(later)
    assert found.stage is Stage.SAMPLES
    assert "B skips to those of A's step 3" in found.headline


def test_samples_that_one_rank_repeats_are_named_with_it():
    later = resumed(change=OTHER_GRADIENT)
    step = later.steps[2]
    step.sample_ranks = np.arange(8) % 2
    step.samples = np.where(step.sample_ranks == 1, step.samples - 8, step.samples)
    found = answer(replace(later, workers=2))
    assert found.stage is Stage.SAMPLES
    assert "only rank 1 of B draws others; B repeats 4 samples of A's step 1" in found.headline


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("scale", 1024.0, "its scale is 4096.0 in A and 1024.0 in B"),
        ("_growth_tracker", 0, "its growth tracker is 1 in A and 0 in B"),
        (None, None, "its scale is 4096.0 in A and none in B"),
    ],
)
def test_the_state_of_a_gradient_scaler_is_compared(name, value, words):
    scaler = {"scale": 4096.0, "_growth_tracker": 1}

    def of(side, scaler):
        side.steps[2].facts = {**side.steps[2].facts, "scaler": scaler}
        return side

    assert answer(of(resumed(), scaler), of(whole(), scaler)).kind is Kind.SAME
    other = {**scaler, name: value} if name else {}
    found = answer(of(resumed(), other), of(whole(), scaler))
    assert found.stage is Stage.STATE
    assert found.headline == f"In step 2 the gradient scaler is not restored: {words}."


def test_random_numbers_of_equal_states_excuse_nothing():
    drawing = replace(whole(), drawn=True)
    later = replace(resumed(), drawn=True)
    found = answer(later, drawing)
    assert (found.kind, found.notes) == (Kind.SAME, ())
    gradient = later.steps[2].figures["gradient"]
    gradient["up"] = gradient["up"].times(2)
    found = answer(later, drawing)
    assert (found.kind, found.stage) == (Kind.DIFFERENT, Stage.GRADIENT)
    later.steps[2].random = {rank: {TORCH: "other"} for rank in range(4)}
    later.steps[2].samples = whole().steps[0].samples
    found = answer(later, drawing)
    assert found.stage is Stage.RANDOM
    assert found.notes[-1].endswith("B repeats those of A's step 0.")
