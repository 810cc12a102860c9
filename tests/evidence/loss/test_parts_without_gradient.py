"""Groups of trained parameters that never have a gradient."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.bus.step import StepReport
from rankscope.evidence.loss.judge import PARTS, PartsWithoutGradient
from support.stepping import describe, evidence_of
from support.streams import gathered

W = 2
GROUPS = ("embed", "blocks.0", "blocks.1", "head")


def watch(norms_SG, detector=None, first=0):
    """Return the evidence on steps with these norms of the groups, the same on all workers."""
    detector = detector or PartsWithoutGradient()
    found = []
    for step, norms_G in enumerate(norms_SG, start=first):
        one = gathered(step, [[]] * W)
        norms_WG = np.array([norms_G] * W, float)
        one = replace(one, groups=GROUPS, group_norms_WG=norms_WG, observed=True)
        found += evidence_of(detector, StepReport(one, {}))
    return found


@pytest.mark.parametrize(
    ("norms", "severity", "names"),
    [
        ([1, 0, 0, 1], Severity.WARNING, ["blocks.0", "blocks.1"]),
        ([1, 1, 1, 0], Severity.NOTE, ["head"]),
    ],
)
def test_half_of_the_groups_is_a_warning(norms, severity, names):
    [found] = watch([norms] * 40)
    assert (found.key, found.cause, found.severity) == (PARTS, "loss.no_gradient", severity)
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
