from dataclasses import replace

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.finding import Severity
from rankscope.bus.step import as_recorded
from rankscope.evidence.loss import scale
from rankscope.evidence.loss.judge import MICRO, STARVED, TokenWeighting
from support.stepping import describe, evidence_of, words
from support.streams import gathered

W = 4


def observation(step, tokens, scales):
    """Return a step of workers with these micro-batches ``[W][M]``; NaN where unknown."""
    tokens, scales = ([np.asarray(row, float) for row in rows] for rows in (tokens, scales))
    one = gathered(
        step,
        [[]] * len(tokens),
        loss=[2.0] * len(tokens),
        loss_weight=[row.sum() for row in tokens],
        grad_scale=[row.sum() for row in scales],
        optimizer_steps=[1] * len(tokens),
    )
    losses = [np.full(len(row), 2.0) for row in tokens]
    micro = {"micro_losses": losses, "micro_weights": tokens, "micro_scales": scales}
    return as_recorded(summarize(replace(one, **{n: tuple(rows) for n, rows in micro.items()})))


def told(detector, steps, **columns):
    """Return all evidence in order; ``columns`` are of all workers, or follow from the tokens."""
    found = []
    for step, parts in enumerate(steps):
        seen = observation(step, *parts)
        for name, value in columns.items():
            seen.gathered.workers[name][:] = value(parts[0]) if callable(value) else value
        found += evidence_of(detector, seen)
    assert "{" not in "".join(map(words, found))
    return found


def watch(detector, steps):
    return {one.key or one.cause: one for one in told(detector, steps)}


def lengths(steps, *, micro=1, width=W, ratio=4.0, seed=0):
    """Yield token counts ``[W][M]`` whose largest and smallest differ by about this ratio."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        spread = rng.uniform(0, np.log(ratio), (width, micro))
        spread -= spread.min(axis=0)
        yield np.round(100 * np.exp(spread * np.log(ratio) / np.maximum(spread.max(axis=0), 1e-9)))


def means_of_means(tokens):
    return np.full(tokens.shape, 1 / tokens.shape[1])


def by_tokens(tokens):
    return tokens * len(tokens) / tokens.sum()


# Token weighting -----------------------------------------------------------------------------


def test_means_of_means_between_workers_are_a_warning():
    steps = [(t, means_of_means(t)) for t in lengths(40)]
    found = watch(TokenWeighting(W, None), steps)
    assert set(found) == {"loss.token_weighting"}
    evidence = found["loss.token_weighting"]
    assert (evidence.severity, evidence.ranks) == (Severity.WARNING, (0, 1, 2, 3))
    assert (evidence.first_step, evidence.count) == (0, 40)
    assert evidence.numbers["token_weight_ratio"] == pytest.approx(4, rel=0.03)
    assert watch(TokenWeighting(W, None), steps[:15]) == {}
    assert watch(TokenWeighting(W, None), steps[:16]).keys() == found.keys()


def test_means_of_means_between_micro_batches():
    steps = []
    for tokens in lengths(40, width=4):  # equal totals on all workers, unequal micro-batches
        row = tokens[:, 0]
        table = np.stack([np.roll(row, rank) for rank in range(W)])
        steps.append((table, means_of_means(table)))
    found = watch(TokenWeighting(W, None), steps)
    assert set(found) == {MICRO}
    assert (found[MICRO].cause, found[MICRO].severity) == ("loss.token_weighting", Severity.WARNING)


@pytest.mark.parametrize(("ratio", "micro"), [(2.1, 1), (10, 4)])
def test_weights_that_follow_the_tokens_are_silent(micro, ratio):
    steps = [(t, by_tokens(t)) for t in lengths(60, micro=micro, ratio=ratio)]
    assert watch(TokenWeighting(W, None), steps) == {}
    assert watch(scale.LossScale(W), steps) == {}


def test_what_is_meant_is_silent():
    steps = [(t, means_of_means(t)) for t in lengths(40)]
    assert watch(TokenWeighting(W, "worker"), steps) == {}
    assert watch(TokenWeighting(W, "token"), steps)


def test_one_short_batch_at_an_epochs_end_is_silent():
    steps = []
    for step in range(200):
        tokens = np.full((W, 1), 64.0)
        tokens[1] = 4 if step % 33 == 32 else 64
        steps.append((tokens, np.ones((W, 1))))
    assert watch(TokenWeighting(W, None), steps) == {}
    assert watch(scale.LossScale(W), steps) == {}


def test_a_fault_in_the_middle_of_a_run_is_found_in_a_window():
    good = [(t, by_tokens(t)) for t in lengths(500)]
    bad = [(t, means_of_means(t)) for t in lengths(64, seed=1)]
    found = watch(TokenWeighting(W, None), good + bad)
    assert found["loss.token_weighting"].severity is Severity.WARNING
    assert found["loss.token_weighting"].first_step == 500


@pytest.mark.parametrize(("width", "left"), [(2, 0), (8, 1)])
def test_a_worker_with_one_filler_token_is_named_soon(width, left):
    tokens = np.full((width, 1), 64.0)
    tokens[1] = left
    found = watch(TokenWeighting(width, None), [(tokens, np.ones((width, 1)))] * 12)
    assert set(found) == {STARVED}
    evidence = found[STARVED]
    assert (evidence.severity, evidence.ranks) == (Severity.WARNING, (1,))
    assert (evidence.first_step, evidence.count) == (0, 12)
    words, _ = describe(evidence)
    assert f"{left} label token" in words


# Multipliers ---------------------------------------------------------------------------------


def constant(value, *, micro=1, width=W, steps=20):
    return [(np.full((width, micro), 64.0), np.full((width, micro), value))] * steps


@pytest.mark.parametrize(
    ("value", "micro", "words"),
    [
        (4.0, 1, "multiplied by 4 in all before backward: the number of workers (4 workers"),
        (0.25, 1, "one over the number of workers"),
        (1 / 9, 3, "one over the number of micro-batches"),
        (1.0, 4, "the number of workers or the number of micro-batches"),
        (4.0, 2, "multiplied by 8 in all before backward: the number of workers times that of"),
    ],
)
def test_a_wrong_factor_is_named(value, micro, words):
    found = watch(scale.LossScale(W), constant(value, micro=micro))
    assert set(found) == {"loss.scale"}
    evidence = found["loss.scale"]
    assert (evidence.severity, evidence.ranks) == (Severity.WARNING, (0, 1, 2, 3))
    assert (evidence.first_step, evidence.count) == (0, 20)
    assert words in describe(evidence)[0]


@pytest.mark.parametrize(("summed", "found"), [(W, 0), (1.0, 13)])
def test_one_over_the_workers_is_right_where_a_loop_adds_up_their_gradients(summed, found):
    detector = scale.LossScale(W, by_loop=True)
    assert len(told(detector, constant(1 / W), summed_workers=summed)) == found


@pytest.mark.parametrize(("others", "severity"), [([], Severity.WARNING), ([2], Severity.NOTE)])
def test_the_rest_of_an_epoch_that_stays_in_the_gradient_is_named(others, severity):
    sizes = [*others, *([4] * 5 + [6]) * 3]
    steps = [constant(1 / 4, micro=micro, steps=1)[0] for micro in [4, *sizes]]
    found = watch(scale.LossScale(W), steps)
    evidence = found[scale.LONG_WINDOW]
    assert (evidence.severity, evidence.count) == (severity, 3)
    assert "with 6 micro-batches, the gradient is 1.5 times their mean" in describe(evidence)[0]
    assert set(found) == {scale.LONG_WINDOW, *([scale.SHORT_WINDOW] if others else [])}


def sums(detector, tokens=None, **columns):
    drawn = (t if tokens is None else np.full_like(t, tokens) for t in lengths(20))
    return told(detector, [(tokens_W, tokens_W) for tokens_W in drawn], **columns)


def test_sums_over_tokens_are_a_note_and_a_warning_where_gradients_are_clipped():
    assert {one.severity for one in sums(scale.LossScale(W))} == {Severity.NOTE}
    [*_, last] = sums(scale.LossScale(W), clip_limit=1.0)
    assert last.severity is Severity.WARNING
    words, check = describe(last)
    assert "the number of its label tokens" in words
    assert "Divide it by the label tokens of all workers" in check


def test_a_gradient_scaler_that_is_the_number_of_tokens_by_chance_is_silent():
    unscaled = {"clip_limit": 1.0, "clip_factor": 1e-3, "applied_scale": 1e-3 / 65536}
    assert sums(scale.LossScale(W), tokens=65536, **unscaled) == []
    assert sums(scale.LossScale(W), tokens=65536) == []  # it is not known what became of it


@pytest.mark.parametrize(("power", "keys"), [(-1, set()), (-2, {scale.UNSCALED_TWICE})])
def test_gradients_that_are_divided_by_the_scaler_twice_are_a_warning(power, keys):
    steps = [(tokens, [[4096.0]] * W) for tokens in lengths(20)]
    clipped = {"clip_factor": 0.5, "applied_scale": 0.5 * 4096.0**power}
    found = told(scale.LossScale(W), steps, **clipped)
    assert {one.key for one in found} == keys
    assert all("gets 1/4,096 of each gradient" in describe(one)[0] for one in found)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("times", "words"),
    [(1, "multiplied by 0.25 in all before backward and after the reduction"), (W, ""), (1.9, "")],
)
def test_gradients_that_are_divided_by_all_weights_need_the_number_of_workers(times, words, known):
    def applied(tokens):
        return times / tokens.sum()

    columns = {} if known else {"loss_weight": np.nan}
    steps = [(t, t) for t in lengths(20, micro=3)]
    found = told(scale.LossScale(W), steps, applied_scale=applied, clip_limit=1.0, **columns)
    if words:
        assert {one.severity for one in found} == {Severity.WARNING}
        assert words in describe(found[-1])[0]
        assert "one over the number of workers" in describe(found[-1])[0]
        assert "Divide the gradients by the weights" in describe(found[-1])[1]
    elif times == W or not known:
        assert found == []


@pytest.mark.parametrize(
    ("loss", "schedule", "applied", "said"),
    [
        (1.0, 1 / 3, 1 / 3, ""),  # torch's default: a mean loss, divided after the backward passes
        (1.0, np.nan, 0.2, ""),  # and clipped
        (1 / 3, 1 / 3, 1 / 3, "multiplied by 0.3333 in all before backward and by the pipeline"),
        (1.0, 1.0, 1.0, "multiplied by 3 in all before backward: the number of micro-batches"),
        (1.0, 1 / 3, np.nan, ""),  # what is applied is not read on some meshes
    ],
)
def test_what_divides_after_the_backward_passes_counts(loss, schedule, applied, said):
    columns = {"schedule_scale": schedule, "applied_scale": applied}
    found = told(scale.LossScale(W), constant(loss, micro=3), **columns)
    assert bool(found) == bool(said)
    for evidence in found[-1:]:
        assert said in describe(evidence)[0]


def test_a_division_by_micro_batches_that_never_come_is_named():
    """Accelerate divides each loss by gradient_accumulation_steps; accumulate() was forgotten."""
    steps = constant(0.2, micro=1)
    assert watch(scale.LossScale(W), steps) == {}
    [found] = watch(scale.LossScale(W, declared=5), steps).values()
    assert found.severity is Severity.WARNING
    assert (
        "1 of the 5 micro-batches that gradient_accumulation_steps declares"
        in (found.fields["factor"])
    )
    assert watch(scale.LossScale(W, declared=5), constant(1.0, micro=1)) == {}


@pytest.mark.parametrize(
    "values",
    [[1.0] * 40, [65536.0] * 20 + [32768.0] * 20, [65536.0] * 5 + [4.0] * 40, [3.0] * 40],
    ids=["plain", "scaler", "falling scaler", "no known factor"],
)
def test_other_factors_are_silent(values):
    steps = [step for value in values for step in constant(value, steps=1)]
    assert watch(scale.LossScale(W), steps) == {}


def test_a_last_step_with_fewer_micro_batches_is_a_note_unless_it_is_divided_by_their_number():
    rest = [(np.full((W, 2), 64.0), np.full((W, 2), 0.25))]
    uneven = [tuple([np.full(n, value) for n in (4, 4, 4, 3)] for value in (64.0, 0.25))]
    full = constant(0.25, micro=4, steps=15)
    found = watch(scale.LossScale(W), (full + rest + uneven) * 10)
    assert set(found) == {scale.SHORT_WINDOW}
    note = found[scale.SHORT_WINDOW]
    assert (note.severity, note.first_step, note.count) == (Severity.NOTE, 15, 10)
    assert "with 2 micro-batches, the gradient is 0.5 of their mean" in words(note)
    often = watch(scale.LossScale(W), (full[:1] + rest) * 16)
    assert often[scale.SHORT_WINDOW].severity is Severity.WARNING
    assert watch(scale.LossScale(W), (full + constant(0.5, micro=2, steps=1) + uneven) * 10) == {}


@pytest.mark.parametrize(("idle", "severity"), [(0, Severity.WARNING), (1, None)])
def test_a_micro_batch_that_is_left_out_on_purpose_makes_no_short_window(idle, severity):
    windows = scale.UnevenWindows()
    found = list(windows.observe(0, 1.0, 4, 0, W))
    for step in range(1, 17):
        found += windows.observe(step, 0.75, 3, idle, W)
    assert (found[-1].severity if found else None) == severity


def test_a_first_window_that_lacks_its_beginning_is_a_note_once_a_full_one_follows():
    rest = [(np.full((W, 2), 64.0), np.full((W, 2), 0.25))]
    assert watch(scale.LossScale(W), rest) == {}
    [note] = watch(scale.LossScale(W), rest + constant(0.25, micro=4, steps=3)).values()
    assert (note.key, note.severity, note.first_step) == (scale.SHORT_WINDOW, Severity.NOTE, 0)


def test_last_steps_with_fewer_micro_batches_look_like_no_gradient_scaler():
    last = constant(1.0, micro=2, steps=1) + constant(1.0, micro=1, steps=1)
    found = watch(
        scale.LossScale(W), constant(1.0, micro=4, steps=5) + last + constant(1.0, micro=4)
    )
    assert found["loss.scale"].first_step == 7


@pytest.mark.parametrize("width", [3, 8])
def test_a_worker_with_a_factor_of_its_own_is_named(width):
    scales = np.ones((width, 1))
    scales[2] = 2.5
    found = watch(scale.LossScale(width), [(np.full((width, 1), 64.0), scales)] * 3)
    assert set(found) == {scale.ONE_WORKER}
    evidence = found[scale.ONE_WORKER]
    assert (evidence.cause, evidence.severity) == ("loss.scale", Severity.WARNING)
    assert (evidence.ranks, evidence.first_step, evidence.count) == ((2,), 0, 3)
    words, _ = describe(evidence)
    assert "loss of rank 2 has a factor before backward that is 2.5 times the others'" in words


def test_of_several_factors_the_farthest_is_told_with_its_worker():
    scales = np.ones((9, 1))
    scales[[1, 3, 5, 6], 0] = 0.5, 2.0, 4.0, 0.0625
    found = watch(scale.LossScale(9), [(np.full((9, 1), 64.0), scales)] * 3)[scale.ONE_WORKER]
    words, _ = describe(found)
    assert "that is 0.0625 times the others' on rank 6, the farthest of 4 workers, and" in words
    assert found.numbers["ratios"] == {"1": 0.5, "3": 2.0, "5": 4.0, "6": 0.0625}


def test_of_two_workers_nobody_tells_who_is_wrong():
    found = watch(scale.LossScale(2), [(np.full((2, 1), 64.0), np.array([[1.0], [2.0]]))] * 5)
    evidence = found[scale.ONE_WORKER]
    assert evidence.ranks == (0, 1)
    words, _ = describe(evidence)
    assert "loss of rank 1 has a factor before backward that is 2 times rank 0's" in words


def test_factors_that_change_from_step_to_step_are_silent():
    rng = np.random.default_rng(0)
    steps = [(np.full((W, 1), 64.0), rng.uniform(0.5, 2, (W, 1))) for _ in range(60)]
    assert watch(scale.LossScale(W), steps) == {}
