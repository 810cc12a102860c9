"""Answers about made-up trainings, of which the truth is known."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rankscope.bus import parity
from rankscope.bus.parity import GRADIENT, QUARTERS, START, UPDATE
from rankscope.bus.shares import PackedError
from rankscope.evidence.parity.figures import FigureMeter, Part, part_of
from rankscope.tools.parity.compare import compare, decide
from rankscope.tools.parity.reading import Bounds, Recording, SideStep, Whole
from rankscope.tools.parity.result import Kind
from rankscope.tools.parity.result import times as factor_in_words
from rankscope.tools.stages import DiffClass, Stage

FLOAT = "torch.float32"
SHAPES = {"embed": (64, 8), "up": (32, 8), "norm": (32,)}


def sketched(values):
    """Return the figures of a vector: element i, with a sign, in one number of its quarter."""
    rng = np.random.default_rng(len(values))
    signs = rng.choice([-1.0, 1.0], len(values))
    places = rng.permutation(len(values)) % parity.WIDTH
    squares_Q = np.zeros(QUARTERS)
    sketches_QK = np.zeros((QUARTERS, parity.WIDTH))
    for index, value in enumerate(values):
        quarter = index * QUARTERS // len(values)
        squares_Q[quarter] += value**2
        sketches_QK[quarter, places[index]] += signs[index] * value
    return Whole(squares_Q, sketches_QK)


def tensors(step, kind):
    return {
        name: np.random.default_rng([step, kind, at]).standard_normal(math.prod(shape))
        for at, (name, shape) in enumerate(SHAPES.items())
    }


def training(change=None, *, num_steps=2, workers=1, passes=1, noise=1e-7, seed=0, **facts):
    """Return a side; ``change(step, kind, name, values)`` returns other values."""
    rng = np.random.default_rng(seed)
    steps = {}
    for number in range(num_steps):
        figures = {}
        for at, kind in enumerate((START, GRADIENT, UPDATE)):
            made = {}
            for name, values in tensors(number, at).items():
                rounding = 1.0 if kind == START else 1 + noise * rng.standard_normal(len(values))
                act = change or (lambda step, kind, name, values: values)
                made[name] = sketched(act(number, kind, name, values * rounding))
            figures[kind] = made
        steps[number] = SideStep(
            figures=figures,
            samples=np.arange(8) + 8 * number,
            sample_ranks=np.arange(8) % workers,
            labels=(8, 77 + number),
            losses=np.full(passes, 2.0 - number),
            weights=np.full(passes, 8.0 / passes),
            facts={"trained": list(SHAPES), **facts},
            counters=dict.fromkeys(SHAPES, float(number + 1)),
        )
    return Recording("A", steps, SHAPES, workers, workers, passes, (FLOAT,), FLOAT)


def against(b, a=None, moved=None):
    a = a or training()
    return compare(Bounds(a, replace(b, name="B"), a, moved or training(seed=9)))


def of(kind, name, first_step, act):
    def change(step, at_kind, at_name, values):
        hit = step >= first_step and at_kind == kind and name in ("all", at_name)
        return act(values.copy()) if hit else values

    return change


@pytest.mark.parametrize(
    ("act", "look"),
    [(lambda v: 2 * v, "× 2"), (lambda v: -v, "the opposite sign"), (lambda v: 0 * v, "zero in B")],
)
def test_a_factor_is_named(act, look):
    answer = against(training(of(GRADIENT, "up", 0, act)))
    assert (answer.kind, answer.stage, answer.step) == (Kind.DIFFERENT, Stage.GRADIENT, 0)
    assert [(each.name, each.look) for each in answer.differences] == [("up", look)]
    assert look in answer.headline
    assert answer.num_tensors == 3
    assert answer.exit_code == 1
    assert json.loads(json.dumps(answer.to_json(), allow_nan=False))["stage"] == "gradient"


@pytest.mark.parametrize(
    ("scale", "seen", "stage", "advice"),
    [
        (0.25, False, Stage.GRADIENT, "Look for what multiplies"),  # a schedule's scale_grads
        (0.31, False, Stage.CLIPPING, "Look for what multiplies"),  # perhaps clipped by hand
        (3.0, False, Stage.GRADIENT, "Look for what multiplies"),
        (0.25, True, Stage.CLIPPING, "Clip by the norm"),
    ],
    ids=["ratio", "shorter", "longer", "clipped"],
)
def test_what_changes_after_the_backward_is_clipping_where_it_clips(scale, seen, stage, advice):
    facts = {"clipping seen": True} if seen else {}
    sides = []
    for times, passes in ((1.0, 1), (scale, 4)):
        act = of(GRADIENT, "all", 0, lambda v, times=times: times * v)
        sides.append(training(act, passes=passes, **facts))
        for number, step in sides[-1].steps.items():
            step.figures[parity.UNCLIPPED] = training().steps[number].figures[GRADIENT]
    answer = against(sides[1], sides[0])
    assert (answer.stage, len(answer.differences)) == (stage, 3)
    assert answer.advice.startswith(advice)
    words = "A clips a norm of" if seen else "A's norm is"
    assert any(note.startswith(words) for note in answer.notes)


def test_clipping_by_norms_that_are_rounded_is_the_same():
    def clipped(factor, rounding):
        act = of(GRADIENT, "all", 0, lambda v: factor * v)
        return training(act, **{"clipping seen": True, "norm rounding": rounding})

    def stage(factor, rounding):
        return against(clipped(factor, 0.0), clipped(1.0, rounding)).stage

    assert stage(1 + 6e-5, 1e-4) is None
    assert stage(1 + 6e-5, 0.0) is Stage.GRADIENT
    assert stage(1.01, 1e-4) is Stage.GRADIENT


def test_what_is_not_finite_in_both_is_not_comparable():
    act = of(GRADIENT, "up", 1, lambda v: v * math.nan)
    answer = compare(Bounds(training(act), replace(training(act), name="B")))
    assert answer.kind is Kind.NOT_COMPARABLE
    assert answer.headline == ("Not comparable: in step 1 the gradient is not finite in both: up.")
    answer = against(training(act))
    assert (answer.stage, answer.differences[0].words) == (Stage.GRADIENT, "up: not finite in B")


def test_a_factor_of_all_is_told_with_what_it_may_be():
    assert against(training(of(GRADIENT, "all", 0, lambda v: 2 * v), workers=2)).headline.endswith(
        "the gradient differs: all 3 parameters, × 2 (the ratio of workers)."
    )


def test_the_picture_shows_what_clipping_hides_from_the_optimizer():
    def before_clipping(factor):
        side = training(**{"clipping seen": True})
        for step in side.steps.values():
            step.figures[parity.UNCLIPPED] = {
                name: Whole(factor**2 * whole.squares_Q, factor * whole.sketches_QK)
                for name, whole in step.figures[GRADIENT].items()
            }
        return side

    answer = against(before_clipping(3.0), before_clipping(6.0))
    assert answer.headline.startswith("In step 0 the gradient before clipping differs: all 3")
    assert min(min(values) for values in answer.curves.values()) > 100
    same = against(before_clipping(3.0), before_clipping(3.0))
    assert max(max(values) for values in same.curves.values()) < 1


def test_a_setting_that_explains_another_update_is_in_the_advice_with_both_values():
    double = of(UPDATE, "all", 0, lambda values: 2 * values)
    assert against(training(double)).advice.startswith("Compare the optimizers")
    own, other = ([{"lr": lr, "eps": 1e-8}] for lr in (0.1, 0.2))
    answer = against(training(double, settings=other), training(settings=own))
    assert (answer.stage, answer.difference) == (Stage.UPDATE, DiffClass.CONFIGURATION)
    assert answer.advice.endswith("settings of the optimizer: lr is 0.1 in A and 0.2 in B.")
    assert answer.to_json()["advice"] == answer.advice


def test_settings_of_the_optimizers_are_compared_without_a_bound():
    def held(lr, **more):
        return training(settings=[{"optimizer": "AdamW", "lr": lr, **more}])

    answer = against(held(0.1001, nesterov=True), held(0.1))
    assert (answer.stage, answer.difference) == (Stage.UPDATE, DiffClass.CONFIGURATION)
    assert answer.headline == "In step 0 lr is 0.1 in A and 0.1001 in B."
    assert against(held(0.1 * (1 + 1e-8)), held(0.1)).kind is Kind.SAME  # held in float32
    answer = against(held(0.1, betas=[0.9, 0.999]), held(0.1, betas=[0.9, 0.95]))
    assert answer.difference is DiffClass.CONFIGURATION
    assert answer.headline == "In step 0 betas is (0.9, 0.95) in A and (0.9, 0.999) in B."
    other = [{"optimizer": "FusedAdam", "lr": 0.1}] * 2
    assert against(training(settings=other), held(0.1)).kind is Kind.SAME  # divided otherwise


def test_an_update_that_the_type_rounds_away_is_noted():
    def small(step, kind, name, values):
        return 1e-3 * values if kind == UPDATE else values

    def lost(step, kind, name, values):
        return 0 * values if (kind, name) == (UPDATE, "norm") else small(step, kind, name, values)

    fine = training(small)
    coarse = replace(training(lost), name="B", types=("torch.bfloat16",))
    answer = compare(Bounds(fine, coarse))
    assert answer.kind is Kind.SAME
    [note] = answer.notes
    assert note == "Rounding to the type of B's parameters loses the whole update of norm."
    found = compare(Bounds(fine, replace(coarse, types=fine.types)))
    assert (found.stage, found.differences[0].look) == (Stage.UPDATE, "zero in B")


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_not_trained_is_compared_at_later_starts_within_rounding(first):
    frozen = ["embed", "up"]
    a, moved = (training(seed=seed, trained=frozen) for seed in (0, 9))
    b = training(of(START, "norm", first, lambda v: 1.5 * v), trained=frozen)
    answer = against(b, a, moved)
    assert (answer.stage, answer.step) == (Stage.START, first)
    assert [each.name for each in answer.differences] == ["norm"]
    trained = training(of(START, "up", 1, lambda v: 1.5 * v), trained=frozen)
    assert against(trained, a, moved).kind is Kind.SAME
    for side in (a, trained, moved):
        for step in side.steps.values():
            del step.figures[UPDATE]["up"]  # by an optimizer that is none of torch's
    answer = against(trained, a, moved)
    assert (answer.stage, answer.step) == (Stage.START, 1)
    assert "in what no optimizer of torch's updates: up, × 1.5" in answer.headline


@pytest.mark.parametrize("workers", [1, 2])
def test_running_statistics_are_compared_where_the_batch_is_dealt_out_alike(workers):
    a, b, moved = training(), training(workers=workers, seed=3), training(seed=9)
    for side, factor in ((a, 1.0), (b, 1.5), (moved, 1 + 1e-7)):
        for number, step in side.steps.items():
            mean = np.full(32, 1 + number * factor)
            step.figures[parity.BUFFER] = {"norm.running_mean": sketched(mean)}
    answer = against(b, a, moved)
    assert answer.stage is (Stage.START if workers == 1 else None)
    if workers == 1:
        assert answer.step == 1
        assert "in what no optimizer updates: norm.running_mean, × 1.25" in answer.headline


def test_the_first_of_several_differences_in_the_order_of_causes_counts():
    side = training(of(GRADIENT, "up", 0, lambda v: 2 * v))
    side.steps[0].labels = (7, 1)
    assert against(side).stage is Stage.LABELS
    side.steps[0].samples = np.arange(8) + 1
    answer = against(side)
    assert answer.stage is Stage.SAMPLES
    assert "1 of A's 8 samples are not in B" in answer.headline
    assert any("not compared" in note for note in answer.notes)


def test_samples_that_are_cut_otherwise_are_compared_by_their_label_tokens():
    whole, cut = training(), training()
    for step in (whole.steps[0], cut.steps[0]):
        step.labels = (368, 5)
    cut.steps[0].samples, cut.steps[0].sample_ranks = np.arange(16) + 100, np.zeros(16, int)
    answer = against(cut, whole)
    assert answer.kind is Kind.SAME
    assert any("cut their samples" in note for note in answer.notes)
    wrong = training(of(GRADIENT, "up", 0, lambda v: 1.1 * v))
    wrong.steps[0] = replace(cut.steps[0], figures=wrong.steps[0].figures, labels=(352, 9))
    answer = against(wrong, whole)
    assert answer.stage is Stage.SAMPLES
    assert "368 label tokens in A, 352 in B" in answer.headline


@pytest.mark.parametrize(
    ("elements", "labels", "stage"),
    [
        ({"0": (384, 5), "places": (384, 9)}, None, Stage.GRADIENT),
        ({"0": (384, 6), "places": (384, 9)}, None, Stage.SAMPLES),
        ({"0": (384, 5)}, None, Stage.SAMPLES),
        ({"0": (384, 5), "places": (384, 9)}, (352, 9), Stage.LABELS),
        ({"0": (384, 5), "labels": (384, 7)}, (352, 9), Stage.LABELS),
        ({"0": (384, 6), "labels": (384, 7)}, (352, 9), Stage.SAMPLES),
    ],
    ids=["the same", "other tokens", "an input less", "other labels", "given", "both"],
)
def test_samples_that_are_cut_otherwise_are_compared_by_elements_of_inputs(elements, labels, stage):
    whole, cut = training(), training(of(GRADIENT, "up", 0, lambda v: 1.1 * v))
    whole.steps[0].labels = labels and (368, 5)
    whole.steps[0].elements = {"0": (384, 5), "places": (384, 9)}
    cut.steps[0].labels, cut.steps[0].elements = labels, elements
    cut.steps[0].samples, cut.steps[0].sample_ranks = np.arange(16) + 100, np.zeros(16, int)
    answer = against(cut, whole)
    assert answer.stage is stage
    same = stage is not Stage.SAMPLES
    assert any("cut their samples" in note for note in answer.notes) is same
    assert answer.advice.startswith("Shift and mask labels before") is (stage is Stage.LABELS)


@pytest.mark.parametrize(
    ("factor", "noise", "stage"),
    [(1.0, 1e-7, None), (1.001, 1e-7, Stage.SAMPLES), (1.0, 1e-3, Stage.SAMPLES)],
    ids=["same gradient", "other gradient", "rounding as large as a part of a sample"],
)
def test_samples_that_leave_the_gradient_as_it_is_are_noted(factor, noise, stage):
    a, moved = training(noise=noise), training(noise=noise, seed=9)
    b = training(of(GRADIENT, "all", 1, lambda v: factor * v), noise=noise, seed=3)
    b.steps[1].samples = np.append(b.steps[1].samples, b.steps[1].samples[0])  # a copy fills up
    b.steps[1].sample_ranks = np.zeros(9, int)
    answer = against(b, a, moved)
    assert answer.stage is stage
    words = (answer.headline, *answer.notes)
    assert any(each.startswith("Other samples in step 1: all of A's 8 samples") for each in words)
    assert any("they make no difference" in each for each in words) is (stage is None)


def test_losses_that_are_sums_are_compared_as_sums():
    halves = training(passes=2)
    for step in halves.steps.values():
        step.losses, step.weights = step.losses / 2, np.full(2, np.nan)
    assert against(halves).kind is Kind.SAME
    halves.steps[0].losses = halves.steps[0].losses * 3
    answer = against(halves)
    assert answer.kind is Kind.SAME
    assert any("its gradient is the same" in note for note in answer.notes)


def test_other_parameters_cannot_be_compared():
    answer = against(training(trained=["embed", "up"]))
    assert answer.kind is Kind.NOT_COMPARABLE
    assert "A alone trains 1 parameter (norm)." in answer.headline
    shaped = replace(training(), shapes={**SHAPES, "up": (16, 8)})
    assert "up is 32 × 8 in A and 16 × 8 in B" in against(shaped).headline


@pytest.mark.parametrize(
    ("again", "why"),
    [
        (training(seed=9), ""),
        (training(of(START, "up", 0, lambda v: v + 1), seed=9), "begins with other parameters"),
    ],
    ids=["same", "start"],
)
def test_a_training_must_begin_alike_when_it_runs_again(again, why):
    answer = decide(training(), replace(training(seed=3), name="B"), lambda side, eps: again)
    assert answer.kind is (Kind.NOT_COMPARABLE if why else Kind.SAME)
    assert why in answer.headline


@pytest.mark.parametrize("repeats_a", [True, False])
def test_a_training_that_draws_other_samples_each_time_is_not_comparable(repeats_a):
    def drawn(shift):
        side = training(of(GRADIENT, "up", 0, lambda v: v + shift))
        for step in side.steps.values():
            step.samples = step.samples + shift
        return side

    sides = drawn(0), replace(drawn(100), name="B")
    answer = decide(*sides, lambda side, eps: drawn(200), repeats_a=repeats_a)
    assert (answer.kind, answer.exit_code) == (Kind.NOT_COMPARABLE, 2)
    name = "A" if repeats_a else "B"
    assert answer.headline.startswith(f"Not comparable: {name} draws other samples each time")
    steady = decide(*sides, lambda side, eps: drawn(0 if side.name == "A" else 100))
    assert (steady.kind, steady.stage) == (Kind.DIFFERENT, Stage.SAMPLES)


def test_a_second_model_that_was_not_compared_is_no_same_training():
    answer = against(training(seed=3, others=["Adam"]))
    assert (answer.kind, answer.exit_code) == (Kind.NOT_COMPARABLE, 2)
    assert "another model is trained" in answer.headline
    wrong = against(training(of(GRADIENT, "up", 0, lambda v: 2 * v), others=["Adam"]))
    assert (wrong.kind, wrong.stage) == (Kind.DIFFERENT, Stage.GRADIENT)


def test_sketches_of_a_large_matrix_and_of_its_shards_round_otherwise():
    rows, columns = 9000, 4096
    torch.manual_seed(0)
    whole = torch.randn(rows, columns)
    meter = FigureMeter({"embed": whole.numel()}, whole.device)
    shards = [Part(whole[at : at + 3000], (rows, columns), (at, 0)) for at in range(0, rows, 3000)]
    sketches = [
        sum(meter.measure([("embed", part)]).sketches_PQK[0].astype(float) for part in parts)
        for parts in ([part_of(whole)], shards)
    ]
    far = float(np.linalg.norm(sketches[0] - sketches[1]))
    side = replace(training(), shapes={"embed": (rows, columns), "bias": (4,)})
    bounds = Bounds(side, side)
    assert bounds.of_start("bias", float(whole.norm())) < far
    assert far < bounds.of_start("embed", float(whole.norm())) < 5e-5 * float(whole.norm())


@pytest.mark.parametrize("cut", [0, 5, 40, 200])
def test_a_step_comes_back_from_its_bytes_and_not_from_a_part_of_them(cut):
    figures = parity.TensorFigures(
        ("a", "b"), ("", "0,0+2,3"), np.ones((2, QUARTERS)), np.ones((2, QUARTERS, parity.WIDTH))
    )
    step = parity.RankStep(3, 7, {"world": 4}, {GRADIENT: figures}, np.arange(2), np.ones(1))
    packed = step.pack()
    back = parity.RankStep.unpack(packed)
    assert (back.rank, back.step, back.facts) == (3, 7, {"world": 4})
    assert (back.samples.tolist(), back.losses.tolist()) == ([0, 1], [1.0])
    assert back.figures[GRADIENT].places == figures.places
    with pytest.raises(PackedError):
        parity.RankStep.unpack(packed[:cut])


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        *((1.01 + shift, "× 1.01") for shift in (-1e-7, 0, 1e-7)),
        *((0.99 + shift, "× 0.99") for shift in (-1e-7, 0, 1e-7)),
        (1.003, "× 1.003"),
        (0.9955, "× 0.9955"),
        (2.0001, "× 2"),
        (0.50001, "× 1/2"),
        (1.0001, "nearly the same"),
    ],
)
def test_a_factor_near_one_reads_alike_however_it_was_rounded(factor: float, words: str) -> None:
    assert factor_in_words(factor) == words
