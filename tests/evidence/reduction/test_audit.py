from dataclasses import replace

import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.bus.step import StepReport
from rankscope.evidence.reduction.audit import ReductionAudit
from rankscope.evidence.reduction.levels import STEPS
from rankscope.stats.direction import gram, leave_one_out
from rankscope.stats.rounding import round_to_bfloat16
from support.stepping import describe, evidence_of
from support.streams import gathered

SIZES = {"embed": 600, "blocks.0": 300, "blocks.1": 300, "norm": 32}


def to_type(values, dtype):
    return round_to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)


def reduced(gradients_WP, dtype="float32"):
    total = np.zeros(gradients_WP.shape[1], np.float32)
    for gradient in gradients_WP:
        total = to_type(total + to_type(gradient, dtype), dtype).astype(np.float32)
    return to_type(total / len(gradients_WP), dtype).astype(np.float32)


def gradients(rng, num_workers, sizes, scale=1.0, common=0.3):
    def draw(n):
        return scale * (rng.standard_normal((num_workers, n)) + common * rng.standard_normal(n))

    return {name: draw(n).astype(np.float32) for name, n in sizes.items()}


def audited(step, local, results_W, rng, floor=4e-7, **columns):
    """Return a step's record: W results of each group, against the mean in float64."""
    norms, cosines, residuals = [], [], []
    for name, own in local.items():
        own_WP = own.astype(np.float64)
        mean_P = own_WP.mean(axis=0)
        norms.append(np.linalg.norm(own_WP, axis=1))
        cosines.append(leave_one_out(gram(own_WP)))
        distances = [np.linalg.norm(result[name] - mean_P) for result in results_W]
        lengths = [np.linalg.norm(result[name].astype(np.float64)) for result in results_W]
        noise = floor * np.linalg.norm(own_WP) / len(own_WP) * np.exp(0.02 * rng.standard_normal())
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.hypot(distances, noise) / lengths
        each[np.array(lengths) == 0] = 0.0
        residuals.append(np.where(np.isfinite(each), each, np.nan))
    one = replace(
        gathered(step, [[]] * len(results_W), **columns),
        observed=True,
        groups=tuple(local),
        group_norms_WG=np.stack(norms, axis=1),
        residuals_WG=np.stack(residuals, axis=1),
    )
    values = {"reduction_residual": float(np.nanmax(residuals))}
    return StepReport(one, values, group_cosine_rest_WG=np.stack(cosines, axis=1))


def watch(num_steps, make, num_workers=4, reduced_in=None, detector=None, seed=0):
    """Return the evidence, the last of each kind, of steps ``make(t, rng)``: gradients, results."""
    rng = np.random.default_rng(seed)
    detector = detector or ReductionAudit(num_workers, reduced_in)
    told = {}
    for t in range(num_steps):
        local, results_W = make(t, rng)
        for evidence in evidence_of(detector, audited(t, local, results_W, rng)):
            describe(evidence)
            told.setdefault(evidence.key, []).append((t, evidence))
    for evidence in detector.close():
        told.setdefault(evidence.key, []).append((num_steps, evidence))
    return told


def healthy(num_workers=4, dtype="float32", sizes=SIZES, **kinds):
    def make(t, rng):
        local = gradients(rng, num_workers, sizes, **kinds)
        return local, [{name: reduced(own, dtype) for name, own in local.items()}] * num_workers

    return make


def flipped(values, rng, bit):
    values = values.copy()
    largest = np.argsort(np.abs(values))[-max(len(values) // 100, 1) :]
    values.view(np.uint32)[rng.choice(largest)] ^= np.uint32(1 << bit)
    return values


@pytest.mark.parametrize(
    ("num_workers", "dtype", "common"),
    [(2, "float32", 3.0), (3, "bfloat16", 0.3), (8, "float16", 0.3)],
)
def test_rounding_in_the_type_that_is_meant_is_no_error(num_workers, dtype, common):
    meant = dict.fromkeys(SIZES, dtype)
    assert watch(40, healthy(num_workers, dtype, common=common), num_workers, meant) == {}


@pytest.mark.parametrize(("dtype", "num_workers"), [("float32", 5), ("bfloat16", 2)])
def test_groups_of_few_elements_often_cancel(num_workers, dtype):
    sizes = {"scale": 1, "bias": 2, "norm": 5, "rest": 500}
    make = healthy(num_workers, dtype, sizes=sizes, common=0.0)
    assert watch(500, make, num_workers, dict.fromkeys(sizes, dtype)) == {}


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e20])
def test_tiny_zero_and_huge_gradients(scale):
    def make(t, rng):
        local = gradients(rng, 4, SIZES)
        local["norm"] = (local["norm"] * np.float32(scale) * (t % 3 > 0)).astype(np.float32)
        local["blocks.1"][0] = 0.0  # not used by worker 0
        return local, [{name: reduced(own) for name, own in local.items()}] * 4

    assert watch(60, make) == {}


@pytest.mark.parametrize(
    ("at", "steps", "told_at", "bit"),  # of one element; None for all groups
    [(9, 1, 9, 18), (9, 1, 9, 30), (7, 1, 8, None), (7, 3, 10, None), (39, 1, 40, None)],
)
def test_a_reduction_that_is_wrong_for_a_moment(at, steps, told_at, bit):
    def make(t, rng):
        local, results_W = healthy()(t, rng)
        if at <= t < at + steps:
            wrong = {name: 1.3 * value for name, value in results_W[0].items()}
            if bit is not None:
                wrong = {**results_W[0], "blocks.1": flipped(results_W[0]["blocks.1"], rng, bit)}
            results_W = [wrong] * 4
        return local, results_W

    told = watch(40, make)
    assert list(told) == ["reduction-spike"]
    ((step, evidence),) = told["reduction-spike"]
    assert (step, evidence.first_step, evidence.count) == (told_at, at, steps)
    assert evidence.groups == (tuple(sorted(SIZES)) if bit is None else ("blocks.1",))
    assert (evidence.ranks, str(evidence.severity)) == ((0, 1, 2, 3), "error")


def test_without_a_step_before_the_next_one_decides():
    def make(t, rng):
        local, results_W = healthy()(t, rng)
        if t == 0:
            results_W = [{**results_W[0], "embed": flipped(results_W[0]["embed"], rng, 22)}] * 4
        return local, results_W

    ((step, evidence),) = watch(40, make)["reduction-spike"]
    assert (step, evidence.first_step, evidence.last_step) == (1, 0, 0)


def test_one_worker_that_gets_another_result():
    def make(t, rng):
        local, results_W = healthy(3)(t, rng)
        if t in (0, 11):
            results_W = [dict(result) for result in results_W]
            results_W[1]["norm"] = results_W[1]["norm"] * np.float32(1.0001)
        return local, results_W

    told = watch(40, make, 3)
    assert list(told) == ["reduction-one-worker"]
    assert [step for step, _ in told["reduction-one-worker"]] == [0, 11]
    _, evidence = told["reduction-one-worker"][1]
    assert (evidence.ranks, evidence.groups) == ((1,), ("norm",))
    assert str(evidence.severity) == "error"


@pytest.mark.parametrize(("begin", "dtype", "width"), [(0, "float16", 16), (25, "bfloat16", 2)])
def test_a_reduction_in_a_narrower_type_than_meant(width, dtype, begin):
    def make(t, rng):
        return healthy(width, dtype if t >= begin else "float32")(t, rng)

    told = watch(60, make, width)
    assert list(told) == ["numerics.reduction_error"]
    step, evidence = told["numerics.reduction_error"][0]
    assert (step, evidence.first_step, evidence.count) == (begin + STEPS - 1, begin, STEPS)
    assert evidence.numbers["fits"] == dtype
    assert evidence.groups == tuple(sorted(SIZES))
    assert str(evidence.severity) == "warning"
    assert told["numerics.reduction_error"][-1][1].count == 60 - begin


def one_lost(at, value, num_steps=20, dtype="float32", **columns):
    """Return what is told at once where a group's residual is this in one step."""
    rng = np.random.default_rng(0)
    detector, told = ReductionAudit(4, dict.fromkeys(SIZES, dtype)), []
    for t in range(num_steps):
        local, results_W = healthy(dtype=dtype)(t, rng)
        report = audited(t, local, results_W, rng, **columns)
        if t == at:
            report.gathered.residuals_WG[:, 0] = value
        told += [(t, evidence.key) for evidence in evidence_of(detector, report)]
    return told


def test_a_reduced_gradient_that_is_not_finite_is_an_error_where_it_cannot_overflow():
    found = [(9, "reduction-spike")]
    assert one_lost(9, np.nan, reduced_norm=[1, 1, np.inf, 1]) == found
    assert one_lost(9, np.nan, dtype="bfloat16") == found
    small = {"grad_max": [4.0] * 4, "grad_scale": [1024.0] * 4}
    assert one_lost(9, np.nan, dtype="float16", **small) == found


def test_gradients_that_may_overflow_in_float16_are_no_error():
    large = {"grad_max": [4.0] * 4, "grad_scale": [16384.0] * 4}  # what a scaler tries
    assert one_lost(9, np.nan, dtype="float16", **large) == []
    assert one_lost(9, np.nan, dtype="float16") == []


def compressed(lossy, begin, sizes=SIZES):
    def make(t, rng):
        local, (result, *_) = healthy(sizes=sizes)(t, rng)
        for name in lossy if t >= begin else ():
            large = np.abs(result[name]) > np.quantile(np.abs(result[name]), 0.3)
            result[name] = result[name] * large
        return local, [result] * 4

    return make


def test_compression_by_a_hook_of_torchs_is_a_note():
    hook = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.powerSGD_hook"
    told = watch(60, compressed(list(SIZES), 20), detector=ReductionAudit(4, hook=hook))
    _, evidence = told["reduction-lossy"][-1]
    assert evidence.severity is Severity.NOTE
    assert "The communication hook powerSGD_hook compresses" in describe(evidence)[0]
