"""The figures of a run, computed from its Parquet files alone, with pandas.

Nothing of rankscope is used: what a page or a terminal shows is held against this.
"""

from pathlib import Path

import numpy as np
import pandas as pd


def rounded(value: float) -> str:
    """A number as tiles and sentences have it: three significant digits."""
    return "0" if value == 0 else f"{value:.3g}"


def rounded_alike(first: float, last: float) -> str:
    """Two losses as a tile has them: both with as many decimals as the finer one needs."""
    decimals = max(len(rounded(value).partition(".")[2]) for value in (first, last))
    return f"{first:.{decimals}f} → {last:.{decimals}f}"


def _std(values_TW: np.ndarray) -> np.ndarray:
    """The population std over workers; 0, without rounding, where all are equal."""
    return np.where(np.ptp(values_TW, axis=1) == 0, 0.0, values_TW.std(axis=1))


class Recomputed:
    """The values of a run: by step (T), by worker (W).

    ``first`` and ``last`` are the averaged loss of five steps; ``ratio`` is the losses' spread over
    what sampling gives.
    """

    def __init__(self, run: Path) -> None:
        workers = pd.read_parquet(run / "workers")
        self.steps = sorted(workers["step"].unique())
        self.losses_TW = self._pivot(workers, "loss")
        norms_TW = self._pivot(workers, "grad_norm")
        pairs = pd.read_parquet(run / "pairs").sort_values("step")
        pairs_TP = np.stack(list(pairs["cosines"])).astype(float)
        by_step = {
            "loss_mean": self.losses_TW.mean(axis=1),
            "loss_std": _std(self.losses_TW),
            "grad_norm_std": _std(norms_TW),
            "cosine_mean": pairs_TP.mean(axis=1),
        }
        self.by_step = by_step
        self.mean = {name: float(values.mean()) for name, values in by_step.items()}
        self.first = float(by_step["loss_mean"][:5].mean())
        self.last = float(by_step["loss_mean"][-5:].mean())
        expected = pd.read_parquet(run / "steps")["loss_std_expected"].to_numpy()
        self.ratio = float(np.sqrt((by_step["loss_std"] ** 2).sum() / (expected**2).sum()))
        drawn = np.concatenate(list(pd.read_parquet(run / "samples")["samples"]))
        self.drawn, self.distinct = len(drawn), len(set(drawn))

    def _pivot(self, workers: pd.DataFrame, name: str) -> np.ndarray:
        table = workers.pivot(index="step", columns="rank", values=name)
        return table.to_numpy().astype(float)
