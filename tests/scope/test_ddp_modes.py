"""Every way of using DDP: what real ranks record, against an oracle; and the same bits as alone."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from support.mode_runs import STEPS, ModeRun, train_in_modes
from support.modes import MODES, MORE_MODES
from support.ranks import run_ranks
from support.recorded import WIDTH

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

OTHERS = ("plain", "bucket views", "no_sync", "unused parameters")
"""Modes whose hooks are those of a harder one."""

ALL = [mode for mode in MODES + MORE_MODES if mode.name not in OTHERS]


@pytest.fixture(scope="module")
def runs():
    """Return each mode's run by its name."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(train_in_modes, 3, ALL, folder, timeout=240)
        yield {
            mode.name: ModeRun([rank[mode.name] for rank in ranks], mode, Path(folder))
            for mode in ALL
        }


@pytest.mark.parametrize("mode", ALL, ids=lambda mode: mode.name)
def test_a_mode_is_measured_as_it_is_and_keeps_its_bits(runs, mode):
    run = runs[mode.name]
    # How often a shared parameter's hook is called is learnt in the first step.
    first = 1 if mode.checkpoint == "shared reentrant" else 0
    assert run.steps.tolist() == list(range(first, STEPS))
    assert run.run.status == "complete"
    run.check_bits()
    run.check_norms()
    run.check_spreads_and_losses()
    run.check_reduction()
    run.check_groups()
    run.check_micro_batches()
    run.check_scale_and_skipped_steps()
    run.check_directions_without_sketches()


@pytest.mark.parametrize("mode", ALL, ids=lambda mode: mode.name)
def test_workers_that_hold_the_same_are_not_said_to_differ(runs, mode):
    """The model normalises batches: its buffers do differ, and so may the random overflow."""
    expected = {"state.buffers_differ", "numerics.nonfinite", "loss.scale"}
    if mode.hook in ("rounding", "PowerSGD"):  # which the audit tells, of all workers
        expected.add("numerics.reduction_error")
    found = {f.cause: f.explanation for f in runs[mode.name].run.findings()}
    assert not [words for cause, words in found.items() if cause not in expected]


def test_cosines_err_as_theory_says(runs):
    by_mode = [run.cosine_errors() for run in runs.values()]
    assert all(len(errors) >= 3 for errors in by_mode)
    errors = np.concatenate([errors.ravel() for errors in by_mode])
    assert np.abs(errors).max() <= 4 / WIDTH**0.5
    assert np.sqrt(np.mean(errors**2)) <= 1.25 / WIDTH**0.5
