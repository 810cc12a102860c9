"""The audit of reductions: simulated gradients, reduced in one type or another, or corrupted."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.evidence.reduction.audit import ReductionAudit
from rankscope.evidence.reduction.levels import STEPS, sums_of_gradients
from rankscope.stats.direction import gram, leave_one_out
from support.reductions import SIZES, audited, flipped, gradients, healthy, reduced, watch
from support.stepping import describe, evidence_of


@pytest.mark.parametrize("num_workers", [2, 3, 8])
@pytest.mark.parametrize(
    ("dtype", "common"), [("float32", 0.0), ("float32", 3.0), ("bfloat16", 0.3), ("float16", 0.3)]
)
def test_rounding_in_the_type_that_is_meant_is_no_error(num_workers, dtype, common):
    meant = dict.fromkeys(SIZES, dtype)
    make = healthy(num_workers, dtype, common=common)
    assert watch(40, make, num_workers, meant) == {}


@pytest.mark.parametrize("num_workers", [2, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_of_few_elements_often_cancel(num_workers, dtype):
    sizes = {"scale": 1, "bias": 2, "norm": 5, "rest": 500}
    make = healthy(num_workers, dtype, sizes=sizes, common=0.0)
    assert watch(500, make, num_workers, dict.fromkeys(sizes, dtype)) == {}


@pytest.mark.parametrize("left", [1e-1, 1e-3, 1e-5])
def test_gradients_that_cancel_between_workers(left):
    def make(t, rng):
        local = gradients(rng, 2, SIZES)
        for own in local.values():
            own[1] = left * own[1] - own[0]
        return local, [{name: reduced(own) for name, own in local.items()}] * 2

    assert watch(60, make, 2) == {}


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-30, 1e-9, 1e20])
def test_tiny_zero_and_huge_gradients(scale):
    def make(t, rng):
        local = gradients(rng, 4, SIZES)
        local["norm"] = (local["norm"] * np.float32(scale) * (t % 3 > 0)).astype(np.float32)
        local["blocks.1"][0] = 0.0  # not used by worker 0
        return local, [{name: reduced(own) for name, own in local.items()}] * 4

    assert watch(60, make) == {}


@pytest.mark.parametrize("bit", [18, 20, 22, 23, 30, 31])
def test_a_corrupted_element_is_found_in_the_same_step(bit):
    def make(t, rng):
        local, results_W = healthy()(t, rng)
        if t == 9:
            result = {**results_W[0], "blocks.1": flipped(results_W[0]["blocks.1"], rng, bit)}
            results_W = [result] * 4
        return local, results_W

    told = watch(40, make)
    assert list(told) == ["reduction-spike"]
    ((step, evidence),) = told["reduction-spike"]
    assert (step, evidence.first_step, evidence.count) == (9, 9, 1)
    assert evidence.groups == ("blocks.1",)
    assert evidence.ranks == (0, 1, 2, 3)
    assert str(evidence.severity) == "error"


def test_an_element_that_is_corrupted_again_and_again():
    def make(t, rng):
        local, results_W = healthy()(t, rng)
        if t % 5 == 2:
            results_W = [{**results_W[0], "embed": flipped(results_W[0]["embed"], rng, 23)}] * 4
        return local, results_W

    told = watch(42, make)["reduction-spike"]
    assert [step for step, _ in told] == list(range(2, 42, 5))
    assert [evidence.count for _, evidence in told] == list(range(1, 9))


def test_without_a_step_before_the_next_one_decides():
    def make(t, rng):
        local, results_W = healthy()(t, rng)
        if t == 0:
            results_W = [{**results_W[0], "embed": flipped(results_W[0]["embed"], rng, 22)}] * 4
        return local, results_W

    ((step, evidence),) = watch(40, make)["reduction-spike"]
    assert (step, evidence.first_step, evidence.last_step) == (1, 0, 0)


@pytest.mark.parametrize(("at", "steps", "told_at"), [(7, 1, 8), (7, 3, 10), (39, 1, 40)])
def test_a_reduction_that_is_wrong_in_all_groups_for_a_moment(at, steps, told_at):
    def make(t, rng):
        local, results_W = healthy()(t, rng)
        if at <= t < at + steps:
            results_W = [{name: 1.3 * value for name, value in results_W[0].items()}] * 4
        return local, results_W

    told = watch(40, make)
    assert list(told) == ["reduction-spike"]
    ((step, evidence),) = told["reduction-spike"]
    assert (step, evidence.first_step, evidence.count) == (told_at, at, steps)
    assert evidence.groups == tuple(sorted(SIZES))


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_one_worker_that_gets_another_result(num_workers):
    def make(t, rng):
        local, results_W = healthy(num_workers)(t, rng)
        if t in (0, 11):
            results_W = [dict(result) for result in results_W]
            results_W[1]["norm"] = results_W[1]["norm"] * np.float32(1.0001)
        return local, results_W

    told = watch(40, make, num_workers)
    assert list(told) == ["reduction-one-worker"]
    assert [step for step, _ in told["reduction-one-worker"]] == [0, 11]
    _, evidence = told["reduction-one-worker"][1]
    assert evidence.ranks == (1,)
    assert evidence.groups == ("norm",)
    assert str(evidence.severity) == "error"


@pytest.mark.parametrize("num_workers", [2, 4, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("begin", [0, 25])
def test_a_reduction_in_a_narrower_type_than_meant(num_workers, dtype, begin):
    def make(t, rng):
        return healthy(num_workers, dtype if t >= begin else "float32")(t, rng)

    told = watch(60, make, num_workers)
    assert list(told) == ["numerics.reduction_error"]
    step, evidence = told["numerics.reduction_error"][0]
    assert (step, evidence.first_step, evidence.count) == (begin + STEPS - 1, begin, STEPS)
    assert evidence.numbers["fits"] == dtype
    assert evidence.groups == tuple(sorted(SIZES))
    assert str(evidence.severity) == "warning"
    assert told["numerics.reduction_error"][-1][1].count == 60 - begin


@pytest.mark.parametrize("begin", [0, 20])
def test_small_groups_err_only_now_and_then(begin):
    sizes = {"scale": 1, "bias": 2, "many": 300, "more": 300, "most": 300}

    def make(t, rng):
        return healthy(2, "bfloat16" if t >= begin else "float32", sizes=sizes)(t, rng)

    told = watch(150, make, 2)
    assert list(told) == ["numerics.reduction_error"]


def test_a_short_run_is_told_in_the_end():
    ((step, evidence),) = watch(6, healthy(dtype="bfloat16"))["numerics.reduction_error"]
    assert (step, evidence.first_step, evidence.count) == (6, 0, 6)


def test_bfloat16_is_no_float16():
    told = watch(30, healthy(dtype="bfloat16"), reduced_in=dict.fromkeys(SIZES, "float16"))
    assert told["numerics.reduction_error"][0][1].numbers["fits"] == "bfloat16"
    assert told["numerics.reduction_error"][0][1].fields["meant"] == "float16"


@pytest.mark.parametrize("begin", [0, 25])
def test_a_lasting_error_that_no_rounding_explains(begin):
    def make(t, rng):
        local, results_W = healthy()(t, rng)
        if t >= begin:
            result = {
                name: value * (np.abs(value) > 0.3 * np.abs(value).max())
                if len(value) > 32
                else value
                for name, value in results_W[0].items()
            }
            results_W = [result] * 4
        return local, results_W

    told = watch(60, make)
    assert list(told) == ["reduction-lossy"]
    assert told["reduction-lossy"][0][1].groups == ("blocks.0", "blocks.1", "embed")
    assert str(told["reduction-lossy"][0][1].severity) == "warning"


def test_sections_that_are_too_large_for_sketches_are_judged_by_their_past():
    def make(t, rng):
        return healthy()(t, rng)

    rng = np.random.default_rng(0)
    detector, told = ReductionAudit(4), []
    for t in range(60):
        local, results_W = make(t, rng)
        if t == 50:
            results_W = [{**results_W[0], "embed": flipped(results_W[0]["embed"], rng, 22)}] * 4
        report = audited(t, local, results_W, rng, floor=8e-6)
        told += [(t, evidence.key) for evidence in evidence_of(detector, report)]
    assert told == [(50, "reduction-spike")]


def test_its_state_goes_on_after_a_restart():
    def make(t, rng):
        dtype = "bfloat16" if t >= 10 else "float32"
        return healthy(dtype=dtype)(t, rng)

    before = ReductionAudit(4)
    watch(20, make, detector=before)
    after = ReductionAudit(4)
    after.restore(before.state())
    told = watch(30, lambda t, rng: make(t + 20, rng), detector=after)
    _, evidence = told["numerics.reduction_error"][0]
    assert evidence.first_step == 10
    assert evidence.count > STEPS // 2


def test_beyond_64_workers_most_groups_are_judged_by_how_they_cancelled_before():
    sizes = {"one": 1, "many": 300}

    def make(t, rng):
        local, results_W = healthy(66, sizes=sizes)(t, rng)
        if t == 30:
            results_W = [{**results_W[0], "many": flipped(results_W[0]["many"], rng, 22)}] * 66
        return local, results_W

    rng = np.random.default_rng(3)
    detector, told = ReductionAudit(66), []
    for t in range(60):
        local, results_W = make(t, rng)
        report = audited(t, local, results_W, rng)
        cosines_WG = report.group_cosine_rest_WG.copy()
        cosines_WG[:, t % 2] = np.nan
        report = replace(report, group_cosine_rest_WG=cosines_WG)
        told += [(t, evidence.key) for evidence in evidence_of(detector, report)]
    assert told == [(30, "reduction-spike")]


@pytest.mark.parametrize("num_workers", [2, 3, 8, 64])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_norm_of_the_sum_is_known_or_under_estimated(num_workers, size):
    rng = np.random.default_rng(num_workers + size)
    ratios = []
    for _ in range(100):
        own_WP = rng.standard_normal((num_workers, size)) * np.exp(rng.standard_normal())
        own_WP += rng.choice([0.0, 1.0]) * rng.standard_normal(size)
        if rng.random() < 0.3:
            own_WP -= own_WP.mean(axis=0) * (1 - 10.0 ** -rng.uniform(0, 6))
        norms_W1 = np.linalg.norm(own_WP, axis=1)[:, None]
        estimate = sums_of_gradients(norms_W1, leave_one_out(gram(own_WP))[:, None])[0]
        ratios.append(estimate / np.linalg.norm(own_WP.sum(axis=0)))
    assert max(ratios) < 2
    if size == 1000:
        assert np.quantile(ratios, 0.5) > 0.9


def test_the_norm_of_the_sum_is_unknown_where_a_gradient_is_infinite():
    norms_WG = np.array([[1.0, np.inf], [1.0, 2.0], [1.0, 3.0]])
    known, unknown = sums_of_gradients(norms_WG, np.full((3, 2), 0.5))
    assert known > 0
    assert np.isnan(unknown)


def test_a_single_worker_has_no_reduction():
    assert watch(5, healthy(1, "bfloat16"), 1) == {}


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


def test_a_residual_that_is_not_known_is_no_error_where_all_is_finite():
    assert one_lost(9, np.nan, reduced_norm=[1.0] * 4) == []


def compressed(lossy, begin, sizes=SIZES):
    """Keep the largest elements alone in some groups, from some step on."""

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


@pytest.mark.parametrize("lossy", [["embed"], ["embed", "blocks.0"], list(SIZES)])
def test_compression_that_begins_late_under_a_hook_is_no_corrupted_element(lossy):
    told = watch(60, compressed(lossy, 20), detector=ReductionAudit(4, hook="hooks.own"))
    assert list(told) == ["reduction-lossy"]
    step, evidence = told["reduction-lossy"][0]
    assert (step, evidence.first_step) == (20 + STEPS - 1, 20)


def test_without_a_hook_only_its_first_step_is_taken_for_one():
    told = watch(60, compressed(["embed"], 20))
    assert [step for step, _ in told["reduction-spike"]] == [20]
    assert told["reduction-lossy"][0][0] == 20 + STEPS - 1


@pytest.mark.parametrize(("hook", "told_at"), [("", [9, 11]), ("hooks.own", [11])])
def test_two_corrupted_steps_in_a_row(hook, told_at):
    def make(t, rng):
        return compressed(["embed"], 9 if t < 11 else 99)(t, rng)

    told = watch(40, make, detector=ReductionAudit(4, hook=hook))
    assert list(told) == ["reduction-spike"]
    assert [step for step, _ in told["reduction-spike"]] == told_at
    _, evidence = told["reduction-spike"][-1]
    assert (evidence.first_step, evidence.last_step, evidence.count) == (9, 10, 2)
