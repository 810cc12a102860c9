"""What the optimizer does between two steps: how often it was called, and its learning rate."""

from typing import Any

import torch
from torch import Tensor


class OptimizerMeter:
    """Counts calls of ``optimizer.step``; a gradient scaler skips some.

    Args:
        optimizer: The optimizer; None when it is not known.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._known = optimizer is not None
        self._steps = 0
        self._lr = float("nan")

    def count(self, optimizer: Any) -> None:
        """Take one call of ``optimizer.step`` that has ended."""
        self._steps += 1
        lr = optimizer.param_groups[0]["lr"]
        if not isinstance(lr, Tensor) or lr.device.type == "cpu":  # else reading it would wait
            self._lr = float(lr)

    def collect(self) -> dict[str, float]:
        """Return ``lr`` and ``optimizer_steps`` (NaN when unknown), and count from 0 again."""
        steps, self._steps = self._steps, 0
        return {"lr": self._lr, "optimizer_steps": steps if self._known else float("nan")}
