"""Every way of using DDP: what real ranks record, against an oracle; and the same bits as alone."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from support.mode_runs import STEPS, WIDTH, ModeRun, train_in_modes
from support.modes import MODES, MORE_MODES
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ALL = MODES + MORE_MODES
OF_TWO = [mode for mode in MODES if mode.name in ("plain", "no_sync", "used on one rank")]
"""Tried on two ranks as well; all modes are on three."""

CASES = [(2, mode) for mode in OF_TWO] + [(3, mode) for mode in ALL]
in_every_mode = pytest.mark.parametrize(
    ("num_ranks", "mode"), CASES, ids=[f"W={num_ranks}-{mode.name}" for num_ranks, mode in CASES]
)


@pytest.fixture(scope="module")
def runs():
    """Return each mode's run by the number of ranks and its name."""
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for num_ranks, modes in ((2, OF_TWO), (3, ALL)):
            path = Path(folder) / str(num_ranks)
            ranks = run_ranks(train_in_modes, num_ranks, modes, str(path), timeout=240)
            for mode in modes:
                of_ranks = [rank[mode.name] for rank in ranks]
                found[num_ranks, mode.name] = ModeRun(of_ranks, mode, path)
        yield found


@pytest.fixture
def run(runs, num_ranks, mode):
    return runs[num_ranks, mode.name]


@in_every_mode
class TestInEveryMode:
    def test_every_bit_is_as_without_the_monitor(self, run):
        run.check_bits()

    def test_every_step_is_observed(self, run, mode):
        """How often a shared parameter's hook is called is learnt in the first step."""
        first = 1 if mode.checkpoint == "shared reentrant" else 0
        assert run.steps.tolist() == list(range(first, STEPS))
        assert run.run.status == "complete"

    def test_norms_and_losses(self, run):
        run.check_norms_and_losses()

    def test_the_reduced_norm_is_what_the_training_gets(self, run):
        run.check_reduced_norm()

    def test_the_reduction_is_audited(self, run):
        run.check_reduction()

    def test_workers_that_hold_the_same_are_not_said_to_differ(self, run, mode):
        """The model normalises batches: its buffers do differ, and so may the random overflow."""
        expected = {"state.buffers_differ", "numerics.nonfinite", "loss.scale"}
        if mode.hook in ("rounding", "PowerSGD"):  # which the audit tells, of all workers
            expected.add("numerics.reduction_error")
        found = {finding.cause: finding.explanation for finding in run.run.findings()}
        assert not [words for cause, words in found.items() if cause not in expected]

    def test_groups(self, run):
        run.check_groups()

    def test_micro_batches(self, run):
        run.check_micro_batches()

    def test_the_scale_and_skipped_steps(self, run):
        run.check_scale_and_skipped_steps()

    def test_cosines(self, run):
        errors = run.cosine_errors()
        assert len(errors) == len(run.fine_steps()) >= 3
        assert np.abs(errors).max() <= 4 / WIDTH**0.5


@pytest.mark.parametrize("mode", ALL, ids=lambda mode: mode.name)
def test_directions_without_sketches(runs, mode):
    """Two workers need no more than norms."""
    runs[3, mode.name].check_directions_without_sketches()


def test_the_sketch_errs_as_theory_says(runs):
    errors = np.concatenate([run.cosine_errors().ravel() for run in runs.values()])
    assert np.sqrt(np.mean(errors**2)) <= 1.25 / WIDTH**0.5


def test_the_comparison_would_see_a_difference(runs):
    one, other = (runs[2, mode.name].ranks[0]["alone"] for mode in (OF_TWO[0], OF_TWO[1]))
    name = "head.weight"
    assert (one["parameters"][name] != other["parameters"][name]).any()
