import math
from dataclasses import replace

import numpy as np
import pytest

from rankscope.agent import host_summary as summaries
from rankscope.agent.assembly import Assembly, summarize
from rankscope.agent.step_message import StepMessage, pack_values
from rankscope.bus.gradient_part import sizes_of
from rankscope.bus.messages import Layout
from rankscope.bus.steps import common_scale
from rankscope.evidence.loss.combine import amend
from support.streams import gathered

# A worker's loss of a step, from those of its micro-batches -------------------------------------

LOSSES_M, TOKENS_M = np.array([1.0, 3.0]), np.array([10.0, 30.0])
BY_TOKENS, ALIKE = 2.5, 2.0


def loss_of(multipliers_M):
    message = StepMessage(
        step=0,
        slots=np.frombuffer(pack_values({}), np.int64),
        losses_U=LOSSES_M,
        weights_U=TOKENS_M,
        units_M=np.array([1, 1]),
        multipliers_M=np.array(multipliers_M, np.float64),
    )
    assembly = Assembly(Layout(num_workers=1), 0)
    workers = assembly.step_of(summaries.as_columns([message]), 1).workers
    return workers["loss"][0], workers["loss_weight"][0]


@pytest.mark.parametrize(
    ("multipliers_M", "loss"),
    [
        *[((0.5, 0.5), ALIKE), ((0.25, 0.75), BY_TOKENS), ((0.0, 1.0), 3.0)],
        *[((), BY_TOKENS), ((np.nan, 1.0), BY_TOKENS)],
    ],
)
def test_micro_batches_count_as_they_do_in_the_gradient_and_else_by_tokens(multipliers_M, loss):
    assert loss_of(multipliers_M) == pytest.approx((loss, TOKENS_M.sum()))


def summed(tokens_M, divisor, weight, *, known=True):
    rows = [(tokens, divisor, 2.0, weight) for tokens in tokens_M]
    return StepMessage(
        step=0,
        slots=np.frombuffer(pack_values({}), np.int64),
        losses_U=np.array([2.0 * tokens / divisor for tokens in tokens_M]),
        weights_U=np.full(len(tokens_M), np.nan),
        units_M=np.ones(len(tokens_M), np.int64),
        multipliers_M=np.ones(len(tokens_M)),
        sums_M4=np.array(rows if known else [], np.float64).ravel(),
    )


@pytest.mark.parametrize("own", [[3.0], [2.0, 1.0]], ids=["one micro-batch", "two"])
@pytest.mark.parametrize(
    "divisor", [10.0, 5.0, 4.0], ids=["all", "all, times workers", "another number"]
)
def test_a_sum_over_tokens_is_a_mean_only_if_its_divisor_counts_all_of_them(own, divisor):
    assembly = Assembly(Layout(num_workers=2), 0)
    sent = [summed(own, divisor, 0.5), summed([7.0], divisor, 0.25)]
    step = assembly.step_of(summaries.as_columns(sent), 1)
    assert step.workers["loss_divided"].tolist() == [divisor > 4.0] * 2
    if divisor > 4.0:
        assert step.workers["loss"] == pytest.approx([2.0, 2.0])
        assert step.workers["loss_weight"] == pytest.approx([3.0, 7.0])
        assert step.workers["grad_scale"] == pytest.approx([0.5 * len(own), 0.25])
    else:
        assert step.workers["loss"][1] == 14.0 / divisor
        assert np.isnan(step.workers["loss_weight"]).all()
        assert step.workers["grad_scale"] == pytest.approx([len(own), 1.0])


def test_sums_over_tokens_beside_another_kind_of_loss_are_means():
    sent = [summed([3.0], 10.0, 0.5), summed([1.0], 0.4, 1.0, known=False)]
    workers = Assembly(Layout(2), 0).step_of(summaries.as_columns(sent), 1).workers
    assert workers["loss"].tolist() == [2.0, 5.0]
    np.testing.assert_array_equal(workers["loss_weight"], [3.0, np.nan])


@pytest.mark.parametrize(
    ("own", "divisor", "known"),
    [
        ([3.0], 3.0, True),
        ([2.0, 1.0], 3.0, True),
        ([3.0, 3.0], 6.0, True),
        ([2.0, 1.0], 4.0, False),
    ],
    ids=["of the micro-batch", "of the step", "of each, twice", "another number"],
)
def test_a_sum_over_the_worker_s_own_tokens_is_their_mean(own, divisor, known):
    assembly = Assembly(Layout(num_workers=2), 0)
    sent = [summed(own, divisor, 1 / len(own)), summed([7.0], 7.0, 1.0)]
    step = assembly.step_of(summaries.as_columns(sent), 1)
    assert not step.workers["loss_divided"].any()
    assert np.isfinite(step.workers["loss_weight"]).tolist() == [known] * 2
    if known:
        assert step.workers["loss"] == pytest.approx([2.0, 2.0])
        assert step.workers["loss_weight"] == pytest.approx([sum(own), 7.0])
        assert step.workers["grad_scale"] == pytest.approx([1.0, 1.0])


# A step by way of summaries of hosts, against the same step of whole messages -------------------

COUNTS = (1, 3, 2)  # sections of three groups
LAYOUT = Layout(
    num_workers=80,
    groups=("a", "b", "c"),
    section_counts=COUNTS,
    sketch_width=1021,
    group_width=251,
    audit_width=1021,
    reduced_copies=80,
)


def messages_of(step, layout=LAYOUT, faulty=None):
    rng = np.random.default_rng(step)
    num_sections, width = sum(COUNTS), layout.audit_width
    local = rng.normal(size=(layout.num_workers, num_sections, width)) + rng.normal(
        size=(num_sections, width)
    )
    mean = local.mean(axis=0)
    messages = {}
    for rank in range(layout.num_workers):
        reduced = mean * 1.5 if rank == faulty else mean
        held = 1.0
        if layout.reduced_copies == 1:  # each holds its own part of every section
            reduced = np.where(np.arange(width) % layout.num_workers == rank, reduced, 0.0)
            held = np.square(reduced).sum() / np.square(mean).sum()
        squares = np.square(local[rank]).sum(axis=1)
        numbers = [*squares, *(np.square(mean).sum(axis=1) * held), 1.0, 2.0, 0.0, 0.0]
        groups = rng.normal(size=(3, 251)) + np.linspace(-1, 1, 251)
        parts = [local[rank].sum(axis=0), groups.ravel(), local[rank].ravel(), reduced.ravel()]
        sizes = {"squares": num_sections, "reduced_squares": num_sections, "micro": 1}
        sizes |= dict.fromkeys(("largest", "nonfinite", "carried"), 1)
        sketches = dict(zip(("total", "groups", "local", "reduced"), map(len, parts), strict=True))
        messages[rank] = StepMessage(
            step=step,
            slots=np.frombuffer(
                pack_values({"overhead_seconds": 0.25, "step_seconds": rank + 1.0}), np.int64
            ),
            losses_U=rng.normal(size=4),
            weights_U=np.ones(4),
            units_M=np.array([4]),
            samples_B=rng.integers(2**62, size=2 + rank % 3),
            digests_D=np.arange(5),
            unchanged_D=np.zeros(5, np.uint8),
            numbers=np.array(numbers),
            sizes=np.array(sizes_of(sizes, sketches, norm_estimated=False)),
            sketches=np.concatenate(parts).astype(np.float32),
        )
    return messages


def whole(messages):
    columns = summaries.as_columns([messages[rank] for rank in sorted(messages)])
    return Assembly(LAYOUT, 0).step_of(columns, 1)


def by_hosts(messages, layout=LAYOUT):
    """Return the step as the root has it; hosts of 7 workers, the ranks dealt out in turn."""
    num_hosts = -(-len(messages) // 7)
    hosts = [{r: m for r, m in messages.items() if r % num_hosts == h} for h in range(num_hosts)]
    sent = summaries.JoinedSummaries(
        [summaries.HostSummary.unpack(summaries.host_summary(own, layout)) for own in hosts]
    )
    gathered = Assembly(summaries.summary_layout(layout), 0).step_of(sent.messages, 1)
    return summaries.with_directions(gathered, sent, layout)


def test_what_needs_no_sketch_is_the_same():
    messages = messages_of(3)
    expected, found = whole(messages), by_hosts(messages)
    assert found.observed
    for name, column in expected.workers.items():
        np.testing.assert_allclose(found.workers[name], column, rtol=1e-14, err_msg=name)
    for one, other in zip(found.samples, expected.samples, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(found.micro_losses, expected.micro_losses)
    np.testing.assert_allclose(found.group_norms_WG, expected.group_norms_WG)


def test_directions_are_those_of_the_sketches():
    messages = messages_of(3)
    expected, found = summarize(whole(messages)), summarize(by_hosts(messages))
    np.testing.assert_allclose(
        found.derived["cosine_rest"], expected.derived["cosine_rest"], atol=1e-3
    )
    for name in ("cosine_mean", "cosine_weighted"):
        assert found.values[name] == pytest.approx(expected.values[name], abs=1e-4)
    np.testing.assert_allclose(found.group_cosine_rest_WG, expected.group_cosine_rest_WG, atol=1e-3)


def test_a_worker_that_holds_another_result_is_named():
    found = by_hosts(messages_of(3, faulty=33))
    np.testing.assert_allclose(found.total_residuals_W[33], 0.5, rtol=0.2)
    assert (np.delete(found.total_residuals_W, 33) < 1e-6).all()
    known_G = np.isfinite(found.residuals_WG).all(axis=0)
    assert (found.residuals_WG[33, known_G] > 0.3).all()
    assert (np.delete(found.residuals_WG[:, known_G], 33, axis=0) < 1e-6).all()


def test_a_sharded_result_is_put_together():
    layout = replace(LAYOUT, reduced_copies=1)
    found = by_hosts(messages_of(3, layout), layout)
    assert found.total_residuals_W.shape == (80,)
    assert (found.total_residuals_W < 1e-5).all()
    wrong = by_hosts(messages_of(3, layout, faulty=5), layout)
    assert len(set(wrong.total_residuals_W)) == 1
    assert wrong.total_residuals_W[0] > 1e-2


def test_a_step_that_one_worker_did_not_measure_is_not_observed():
    messages = messages_of(3)
    messages[5].without_bulk()
    found = by_hosts(messages)
    assert not found.observed
    assert found.consensus is None
    np.testing.assert_array_equal(found.workers["loss"], whole(messages_of(3)).workers["loss"])


# A step's report from the workers' values, of which some are missing ----------------------------


def test_losses_norms_and_overhead_by_hand():
    step = gathered(
        3,
        [[]] * 4,
        loss=[1.0, np.nan, 3.0, np.inf],
        loss_sem=[0.3, np.nan, 0.4, np.nan],
        grad_norm=[2.0, 2.0, 4.0, 4.0],
        overhead_seconds=[0.1, 0.3, np.nan, 0.2],
    )
    report = summarize(replace(step, observed=True))
    assert (report.loss_mean, report.loss_std, report.loss_range) == (2.0, 1.0, 2.0)
    assert report.loss_std_expected == pytest.approx(math.sqrt(0.25 / 2 / 2))
    assert (report.grad_norm_mean, report.grad_norm_std) == (3.0, 1.0)
    assert report.overhead_seconds == 0.3

    partly = summarize(step)  # some worker could not measure
    assert math.isnan(partly.grad_norm_mean)
    assert math.isnan(partly.grad_norm_std)
    assert partly.loss_mean == 2.0


@pytest.mark.parametrize(
    ("samples", "num_samples", "drawn", "distinct"),
    [
        ([[1, 2], [2, 3]], [2, 2], 4, 3),
        ([[1, 2], [2, 3]], [5, 2], 7, math.nan),
        ([[], []], [0, 0], math.nan, math.nan),
    ],
)
def test_samples_are_counted_and_unknown_ones_are_not_guessed(
    samples, num_samples, drawn, distinct
):
    report = summarize(gathered(3, samples, num_samples=num_samples))
    np.testing.assert_equal((report.samples_drawn, report.samples_distinct), (drawn, distinct))


def test_sketches_are_those_of_the_loss_before_it_was_scaled():
    sketches_WK = np.arange(8, dtype=np.float32).reshape(2, 4)
    step = gathered(3, [[], []], sketches_WK, grad_scale=[-8.0, -8.0])
    undone = amend(replace(step, group_sketches_WGK=sketches_WK[:, None]))
    np.testing.assert_array_equal(undone.sketches_WK, sketches_WK / 8)
    np.testing.assert_array_equal(undone.group_sketches_WGK, sketches_WK[:, None] / 8)


@pytest.mark.parametrize(("tokens", "scale"), [(1, 1.0), (7, 7.0)])
def test_weights_by_tokens_leave_the_norm_of_the_reduced_gradient(tokens, scale):
    counts_W = np.array([53.0, 71.0, 97.0, 94.0])
    own_WK = np.random.default_rng(0).standard_normal((4, 11)).astype(np.float32)
    scales_W = tokens * counts_W / counts_W.mean()
    step = gathered(
        3,
        [[]] * 4,
        scales_W[:, None].astype(np.float32) * own_WK,
        grad_scale=scales_W,
        loss_weight=counts_W,
        reduced_norm=[float(np.linalg.norm(scales_W @ own_WK / 4))] * 4,
    )
    whole = np.linalg.norm(np.average(own_WK, axis=0, weights=counts_W))  # of all tokens' mean
    np.testing.assert_allclose(amend(step).workers["reduced_norm"], whole, rtol=1e-6)
    assert common_scale(step) == pytest.approx(scale)


def test_each_group_is_compared_with_the_same_group_of_the_others():
    rows_WGK = np.random.default_rng(0).standard_normal((4, 3, 11)).astype(np.float32)
    step = gathered(3, [[]] * 4, rows_WGK.sum(axis=1))
    step = replace(step, groups=("a", "b", "c"), group_sketches_WGK=rows_WGK)
    found_WG = summarize(step).group_cosine_rest_WG
    for group, rows_WK in enumerate(rows_WGK.astype(np.float64).swapaxes(0, 1)):
        expected_W = cosines_with_the_rest(rows_WK)
        np.testing.assert_allclose(found_WG[:, group], expected_W, atol=1e-9)


def cosines_with_the_rest(rows_WK):
    rests_WK = rows_WK.sum(axis=0) - rows_WK
    lengths_W = np.linalg.norm(rows_WK, axis=1) * np.linalg.norm(rests_WK, axis=1)
    return np.sum(rows_WK * rests_WK, axis=1) / lengths_W
