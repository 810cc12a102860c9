from dataclasses import replace

import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.bus.step import StepReport
from rankscope.evidence.loss import judge
from support.stepping import describe, evidence_of, observe, run, words
from support.streams import gathered


def test_a_scaler_that_begins_too_high_is_a_note_until_its_scale_has_fallen_to_1():
    detector, found = judge.NonFinite(), []
    for step in range(60):
        columns = {"nonfinite": [True] * 4, "loss": [1.0] * 4, "optimizer_steps": [0] * 4}
        found += observe(detector, step, grad_scale=[2.0 ** (40 - step)] * 4, **columns)
    assert all("skipped every such step" in each.fields["outcome"] for each in found)
    assert [each.severity for each in found] == [Severity.NOTE] * 40 + [Severity.WARNING] * 20


def test_twenty_skips_in_a_row_are_a_warning_though_no_update_is_applied():
    bad = {"nonfinite": [True, False] * 2, "loss": [1.0] * 4, "optimizer_steps": [0] * 4}
    found = run(judge.NonFinite(), 30, **bad)
    assert [one.severity for one in found] == [Severity.NOTE] * 19 + [Severity.WARNING] * 11
    assert "the parameters are as they were" in words(found[-1])


def test_what_the_optimizer_got_decides():
    """A loop without a scaler drops an overflow, and its next pass belongs to the same step."""
    severities = []
    for reduced in (1.0, float("nan")):
        columns = {"nonfinite": [True] * 4, "loss": [1.0] * 4, "optimizer_steps": [1] * 4}
        (found,) = observe(judge.NonFinite(), 0, reduced_norm=[reduced] * 4, **columns)
        severities.append(found.severity)
        assert "did not reach the parameters" in found.fields["outcome"] or reduced != 1
    assert severities == [Severity.NOTE, Severity.ERROR]


def test_ranks_that_follow_an_update_with_nan_are_not_blamed():
    detector, nan = judge.NonFinite(), float("nan")
    for t, flags in enumerate([[False] * 4, [False, False, True, False], [True] * 4]):
        losses = [nan if flag else 1.0 for flag in flags]
        columns = {"nonfinite": flags, "loss": losses, "optimizer_steps": [1] * 4}
        found = observe(detector, t, reduced_norm=[nan] * 4, **columns)
        assert len(found) == (t > 0)
    [found] = found
    assert (found.ranks, found.first_step, found.severity) == ((2,), 1, Severity.ERROR)
    assert "loss of rank 2" in words(found)
    assert found.fields["applied"] == ", and the optimizer went on; ranks 0, 1 and 3 followed"


def test_batches_without_labels_are_named_and_their_loss_is_no_gradient_with_nan():
    detector, nan = judge.NonFinite(), float("nan")
    columns = {"nonfinite": [True] * 4, "loss": [nan] * 4, "loss_weight": [0.0] * 4}
    columns |= {"optimizer_steps": [1] * 4}
    measured = {"grad_norm": [0.0] * 4, "reduced_norm": [0.0] * 4}
    for step in range(6):  # gradients are measured in the first steps only
        (found,) = observe(detector, step, **columns, **(measured if step < 3 else {}))
        assert found.severity is Severity.WARNING
        assert found.fields["what"] == "loss"
        assert "did not reach the parameters" in found.fields["outcome"]
    assert "In 6 steps, the batches had no label token: a mean over none" in found.fields["labels"]
    assert found.fields["label_check"].startswith("Look for what masks or cuts off all labels")


W = 2
GROUPS = ("embed", "blocks.0", "blocks.1", "head")


def watch(norms_SG):
    reports = []
    for step, norms_G in enumerate(norms_SG):
        norms = {"groups": GROUPS, "group_norms_WG": np.array([norms_G] * W, float)}
        one = replace(gathered(step, [[]] * W), observed=True, **norms)
        reports.append(StepReport(one, {}))
    return evidence_of(judge.PartsWithoutGradient(), *reports)


@pytest.mark.parametrize(
    ("norms", "severity", "names"),
    [
        ([1, 0, 0, 1], Severity.WARNING, ["blocks.0", "blocks.1"]),
        ([1, 1, 1, 0], Severity.NOTE, ["head"]),
    ],
)
def test_half_of_the_groups_is_a_warning(norms, severity, names):
    [found] = watch([norms] * 40)
    assert (found.key, found.cause, found.severity) == (judge.PARTS, "loss.no_gradient", severity)
    assert (found.first_step, found.last_step, found.numbers["names"]) == (0, 15, names)
    assert f"{len(names)} of 4 groups ({names[0]}" in describe(found)[0]


@pytest.mark.parametrize(
    "norms_SG",
    [
        [[1, 1, 1, 1]] * 40,
        [[np.nan, 0, 0, 1]] * 40,
        [[1, 1, 1, 1]] + [[1, 0, 0, 1]] * 40,  # frozen later
        [[1, 0, 0, 1], [0, 1, 1, 0]] * 20,  # two optimizers in turn
    ],
)
def test_gradients_at_some_time_are_silent(norms_SG):
    assert watch(norms_SG) == []


def test_a_worker_whose_tokens_alone_are_unknown_is_named():
    losses = {"loss": [2.0] * 4, "loss_weight": [3.0, 4.0, np.nan, 5.0]}
    assert run(judge.LossKinds(4), 23, **losses) == []
    [*_, told] = run(judge.LossKinds(4), 30, **losses)
    assert (told.key, told.severity, told.ranks) == (judge.OTHER_KIND, Severity.WARNING, (2,))
    assert "of rank 2 is computed by other operators" in words(told)
    assert run(judge.LossKinds(4), 30, loss=[2.0] * 4, loss_weight=[np.nan] * 4) == []
