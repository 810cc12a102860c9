"""What four real ranks record against an exact oracle: whole gradients gathered in float64."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rankscope import Run
from rankscope.core.signals import Table
from support.modes import MODES, Mode, local_gradient, micro_batches, train_watched
from support.ranks import run_ranks

STEPS = 3
WIDTH = 1021


def gather_exactly(rank: int, mode: Mode, run_dir: str) -> list[dict[str, np.ndarray]]:
    """Train watched; return each step's losses ``[W]`` and whole gradients ``[W, P]``."""
    steps: list[dict[str, np.ndarray]] = []

    def before_step(step: int, model: torch.nn.Module) -> None:
        gradient, loss = local_gradient(rank, mode, step, model)
        both = torch.cat([torch.tensor([loss], dtype=torch.float64), gradient])
        gathered = [torch.empty_like(both) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, both)
        matrix = torch.stack(gathered).numpy()
        steps.append({"losses": matrix[:, 0], "gradients": matrix[:, 1:]})

    train_watched(rank, mode, STEPS, run_dir, before_step, sketch_width=WIDTH)
    return steps


def work(rank: int, folder: str) -> dict[str, list[dict[str, np.ndarray]]]:
    return {mode.name: gather_exactly(rank, mode, f"{folder}/{mode.name}") for mode in MODES}


@pytest.fixture(scope="module")
def recorded():
    """Return the oracle's steps and the recorded run of every mode."""
    with tempfile.TemporaryDirectory() as folder:
        oracle = run_ranks(work, 4, folder, timeout=240)[0]
        yield {name: (steps, Run.open(Path(folder) / name)) for name, steps in oracle.items()}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
class TestAgainstTheOracle:
    def test_norms_and_losses(self, recorded, mode):
        oracle, run = recorded[mode.name]
        steps, norms_TW = run.per_worker("grad_norm")
        _, losses_TW = run.per_worker("loss")
        assert steps.tolist() == list(range(STEPS))
        exact_TW = [np.linalg.norm(step["gradients"], axis=1) for step in oracle]
        np.testing.assert_allclose(norms_TW, exact_TW, rtol=1e-6)
        np.testing.assert_allclose(losses_TW, [step["losses"] for step in oracle], rtol=1e-6)
        columns = run.columns(Table.STEPS, "loss_std", "loss_range", "grad_norm_std")
        np.testing.assert_allclose(columns["grad_norm_std"], np.std(exact_TW, axis=1), rtol=1e-5)
        np.testing.assert_allclose(
            columns["loss_std"], [step["losses"].std() for step in oracle], rtol=1e-5
        )

    def test_cosines(self, recorded, mode):
        oracle, run = recorded[mode.name]
        _, cosines_TWW = run.cosines()
        units = [s["gradients"] / np.linalg.norm(s["gradients"], axis=1)[:, None] for s in oracle]
        exact_TWW = np.array([unit @ unit.T for unit in units])
        upper = np.triu_indices(4, 1)
        errors = np.array([c[upper] for c in cosines_TWW - exact_TWW])
        assert np.sqrt(np.mean(errors**2)) <= 1.25 / WIDTH**0.5
        assert np.abs(errors).max() <= 5 / WIDTH**0.5
        mean = run.columns(Table.STEPS, "cosine_mean")["cosine_mean"]
        exact_mean = [cosines[upper].mean() for cosines in exact_TWW]
        np.testing.assert_allclose(mean, exact_mean, atol=4 / WIDTH**0.5)

    def test_weights_and_micro_batches(self, recorded, mode):
        _, run = recorded[mode.name]
        _, weights_TW = run.per_worker("loss_weight")
        expected = [
            [
                sum(int((b["labels"] != -100).sum()) for b in micro_batches(rank, step, mode))
                for rank in range(4)
            ]
            for step in range(STEPS)
        ]
        assert weights_TW.tolist() == expected
        rows = run.table(Table.MICRO).num_rows
        assert rows == (mode.accumulate * 4 * STEPS if mode.accumulate > 1 else 0)
