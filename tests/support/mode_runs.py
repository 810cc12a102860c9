"""What real ranks record in a mode of using DDP, held against the truth and an unwatched twin.

Arrays over steps T, workers W.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from rankscope import Run
from rankscope.bus.evidence import Table
from support.loops import collect_warnings
from support.modes import POISONED_STEP, Mode, Training, assert_same_bits, micro_batches

STEPS = 4
WIDTH = 1021


def train_in_modes(rank: int, modes: list[Mode], folder: str) -> dict[str, dict[str, Any]]:
    """Train in each mode alone, then watched with a look at the truth before each step.

    Three ranks train once more in the tier without sketches, where the reduced gradient tells
    directions.
    """
    warnings = collect_warnings()
    results = {mode.name: _train(rank, mode, f"{folder}/{mode.name}") for mode in modes}
    assert warnings == []
    return results


def _train(rank: int, mode: Mode, run_dir: str) -> dict[str, Any]:
    alone = Training(rank, mode)
    for step in range(STEPS):
        alone.step(step)
    watched = Training(rank, mode, run_dir, sketch_width=WIDTH, reduced="sketch")
    result: dict[str, Any] = {"truth": [], "reduced_norm": [], "grad_scale": []}
    for step in range(STEPS):
        result["truth"].append(watched.oracle(step))
        result["grad_scale"].append(watched.multiplier)
        result["reduced_norm"].append(watched.step(step))
    watched.close()
    states = {"alone": alone.state(), "watched": watched.state()}
    if dist.get_world_size() == 3:
        scalars = Training(rank, mode, f"{run_dir} in scalars", tier="scalars")
        for step in range(STEPS):
            scalars.step(step)
        scalars.close()
        states["scalars"] = scalars.state()
    return {**result, **states}


class ModeRun:
    """One mode's recorded run, and the truth."""

    def __init__(self, ranks: list[dict[str, Any]], mode: Mode, folder: Path) -> None:
        self.ranks = ranks
        self.mode = mode
        self.run = Run.open(folder / mode.name)
        self._scalars = folder / f"{mode.name} in scalars"
        self.steps = np.flatnonzero(self.column("observed"))
        self.overflowed_TW = np.zeros((STEPS, len(ranks)), bool)
        self.overflowed_TW[POISONED_STEP, 1] = mode.scaler

    def column(self, name: str) -> np.ndarray:
        """Return a column of the steps table ``[T]``."""
        return self.run.columns(Table.STEPS, name)[name]

    def per_worker(self, name: str) -> np.ndarray:
        """Return a column of the workers table ``[T, W]``."""
        return self.run.per_worker(name)[1]

    def truth(self, name: str) -> np.ndarray:
        """Return an attribute of the truth ``[T, W]``."""
        return np.array(
            [[getattr(rank["truth"][step], name) for rank in self.ranks] for step in range(STEPS)]
        )

    def gradients(self, step: int) -> np.ndarray:
        """Return the workers' gradients ``[W, P]``."""
        parts = [rank["truth"][step].gradient.values() for rank in self.ranks]
        return np.array([np.concatenate(list(part)) for part in parts])

    def fine_steps(self) -> list[int]:
        """Return the observed steps without an overflow."""
        return [step for step in self.steps.tolist() if not self.overflowed_TW[step].any()]

    def cosine_errors(self) -> np.ndarray:
        """Return the errors of all pairs in the fine steps ``[T, pairs]``."""
        _, cosines_TWW = self.run.cosines()
        upper = np.triu_indices(len(self.ranks), 1)
        errors = []
        for step in self.fine_steps():
            gradients = self.gradients(step)
            units = gradients / np.linalg.norm(gradients, axis=1)[:, None]
            row = self.steps.tolist().index(step)
            errors.append((cosines_TWW[row] - units @ units.T)[upper])
        return np.array(errors)

    def check_bits(self) -> None:
        for rank in self.ranks:
            assert_same_bits(rank["alone"], rank["watched"])
            assert_same_bits(rank["alone"], rank.get("scalars", rank["watched"]))

    def check_norms_and_losses(self) -> None:
        norms_TW, exact_TW = self.per_worker("grad_norm"), self.truth("norm")
        steps = self.steps
        fine = ~self.overflowed_TW[steps]
        np.testing.assert_allclose(norms_TW[steps][fine], exact_TW[steps][fine], rtol=1e-6)
        assert not np.isfinite(norms_TW[steps][~fine]).any()
        stds_T = [np.std(norms[f]) for norms, f in zip(exact_TW[steps], fine, strict=True)]
        np.testing.assert_allclose(
            self.column("grad_norm_std")[steps], stds_T, rtol=1e-4, atol=1e-9
        )
        losses_TW = self.truth("loss")
        np.testing.assert_allclose(self.per_worker("loss"), losses_TW, rtol=1e-6)
        np.testing.assert_allclose(
            self.column("loss_std"), losses_TW.std(axis=1), rtol=1e-4, atol=1e-9
        )

    def check_reduced_norm(self) -> None:
        fine = self.fine_steps()
        expected = np.array(self.ranks[0]["reduced_norm"])[fine]
        np.testing.assert_allclose(self.column("grad_norm_reduced")[fine], expected, rtol=1e-6)

    def check_directions_without_sketches(self) -> None:
        """Hold each worker's cosine with the others against their gradients in float64."""
        cosines_TW = Run.open(self._scalars).per_worker("cosine_rest")[1]
        for step in range(STEPS):
            shown = step in self.fine_steps() and self.mode.shows_both_gradients()
            if not shown:
                assert np.isnan(cosines_TW[step]).all()
            elif self.mode.hook == "PowerSGD" and step >= 2:
                assert np.isfinite(cosines_TW[step]).all()  # of what is not their mean
            else:
                gradients = self.gradients(step)
                sent = to_bfloat16(gradients) if self.mode.hook == "rounding" else gradients
                rests = sent.sum(axis=0) - gradients
                lengths = np.linalg.norm(gradients, axis=1) * np.linalg.norm(rests, axis=1)
                expected_W = np.sum(gradients * rests, axis=1) / lengths
                np.testing.assert_allclose(cosines_TW[step], expected_W, atol=1e-6)

    def check_groups(self) -> None:
        names = {}
        for parameter in self.ranks[0]["truth"][0].gradient:
            parts = parameter.split(".")
            names[parameter] = ".".join(parts[: 2 if parts[0] == "blocks" else 1])
        rows = self.run.columns(Table.GROUPS, "step", "rank", "group", "grad_norm")
        assert set(rows["group"]) == set(names.values())
        for step, rank, group, norm in zip(*rows.values(), strict=True):
            if not self.overflowed_TW[step, rank]:
                gradient = self.ranks[rank]["truth"][step].gradient
                parts = [vector for name, vector in gradient.items() if names[name] == group]
                np.testing.assert_allclose(norm, np.linalg.norm(np.concatenate(parts)), rtol=1e-6)

    def check_micro_batches(self) -> None:
        assert self.per_worker("loss_weight").tolist() == self.truth("tokens").tolist()
        names = ("step", "rank", "micro", "loss_weight", "grad_norm")
        rows = self.run.columns(Table.MICRO, *names)
        several = self.mode.accumulate if self.mode.accumulate > 1 else 0
        assert len(rows["step"]) == several * STEPS * len(self.ranks)
        for step, rank, micro, weight, norm in zip(*rows.values(), strict=True):
            labels = micro_batches(int(rank), int(step), self.mode)[micro]["labels"]
            assert weight == (labels != -100).sum()
            if step in self.steps and not self.overflowed_TW[step, rank]:
                exact = self.ranks[rank]["truth"][step].micro_norms[micro]
                error = 1e-6 if micro == 0 else 4 * (2 / WIDTH) ** 0.5
                np.testing.assert_allclose(norm, exact, rtol=error)

    def check_scale_and_skipped_steps(self) -> None:
        expected_TW = np.array([rank["grad_scale"] for rank in self.ranks]).T
        np.testing.assert_allclose(self.per_worker("grad_scale"), expected_TW, rtol=1e-6)
        skipped = self.mode.scaler * (np.arange(STEPS) == POISONED_STEP)
        calls = [[1 - skip] * len(self.ranks) for skip in skipped.tolist()]
        assert self.per_worker("optimizer_steps").tolist() == calls
        nonfinite_TW = self.per_worker("nonfinite").astype(bool)
        assert nonfinite_TW.tolist() == self.overflowed_TW.tolist()
        assert all(finding.severity != "error" for finding in self.run.findings())

    def check_reduction(self) -> None:
        """Hold the reduced gradient against the mean, or against what a hook makes of it."""
        residuals, norms = self.column("reduction_residual"), self.column("grad_norm_reduced")
        for step in self.steps:
            gradients = self.gradients(step)
            mean = gradients.mean(axis=0)
            if self.overflowed_TW[step].any():
                assert not np.isfinite(residuals[step])
            elif self.mode.hook == "rounding":
                hooked = to_bfloat16(gradients).mean(axis=0)
                exact = np.linalg.norm(hooked - mean) / np.linalg.norm(mean)
                np.testing.assert_allclose(residuals[step], exact, rtol=4 * (2 / WIDTH) ** 0.5)
                np.testing.assert_allclose(norms[step], np.linalg.norm(hooked), rtol=1e-6)
            elif self.mode.hook == "PowerSGD" and step >= 2:
                assert residuals[step] > 0.01
            else:
                assert residuals[step] < 1e-5


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to 8 significant bits, ties to even, by the bits of float32."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)
