"""A plain training loop on one rank, with the warnings that the monitor logs beside it."""

import copy
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from support.models import make_batch, make_model

PLAN = {"local_buffers": True, "loss_weighting": "worker"}
"""The model normalises batches by itself, and each worker's mean loss counts alike."""


def collect_warnings() -> list[str]:
    """Return a list that gets every warning of the monitor in this process from now on.

    One that is logged with a traceback ends in ``[traceback]``. What is said of findings is none.
    """
    warnings: list[str] = []

    def collect(record: logging.LogRecord) -> None:
        line = record.getMessage()
        if not line.startswith("rankscope: "):
            warnings.append(line + (" [traceback]" if record.exc_info else ""))

    handler = logging.Handler(logging.WARNING)
    handler.emit = collect  # type: ignore[method-assign]
    logger = logging.getLogger("rankscope")
    logger.handlers, logger.propagate = [handler], False
    return warnings


def collect_lines() -> list[str]:
    """Return a list that gets every line of the monitor in this process, notes too."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("rankscope")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return lines


def root_of(loop: "Loop") -> Any:
    """Return what judges the steps of a loop, which lives in a thread of rank 0."""
    agent = loop.scope._handle.agent.agent
    while agent.root is None:
        time.sleep(0.01)
    return agent.root


def wait_for(scope: Any, step: int) -> None:
    """Let the monitor, which may lag behind so small a model, judge a step; none before the first.

    Without a scope, there is nothing to wait for.
    """
    deadline = time.monotonic() + 60
    while scope is not None and step >= 0 and (scope.latest is None or scope.latest.step < step):
        assert time.monotonic() < deadline, f"step {step} was not judged within a minute"
        time.sleep(0.0005)


def train_watched(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run_dir: str,
    num_steps: int,
    loss_of: Callable[[int], torch.Tensor],
) -> None:
    """Train a wrapped model under ``watch``; ``loss_of`` returns the loss of a step."""
    with watch(model, optimizer, run_dir=run_dir, canary=False):
        for step in range(num_steps):
            loss_of(step).backward()
            optimizer.step()
            optimizer.zero_grad()


def watch(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    """Watch gradients in every step, and leave findings to the record."""
    return rankscope.watch(
        model, optimizer, **{"overhead_budget": None, "announce": False, **options}
    )


def bits_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, bytes]:
    """Return every bit of a training's state."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    kept = [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
    return {
        **{name: value.numpy().tobytes() for name, value in model.state_dict().items()},
        "optimizers": b"".join(value.numpy().tobytes() for value in kept),
        "rng": torch.get_rng_state().numpy().tobytes(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].tobytes(),  # noqa: NPY002
    }


class Loop:
    """A small training on one rank, watched from its first step on if ``run_dir`` is given."""

    def __init__(self, rank: int, run_dir: str | None, **options: Any) -> None:
        self.rank = rank
        self.warnings = collect_warnings()
        self.model = make_model(branch=options.pop("branch", False))
        self.ddp = DistributedDataParallel(self.model, **options.pop("ddp", {}))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(100 + rank)
        self.scope: Any = None
        self.failed_on: list[int] = []
        if run_dir is not None:
            self.watch(run_dir, **options)

    def watch(self, run_dir: str, **options: Any) -> None:
        self.scope = watch(self.ddp, self.optimizer, run_dir=run_dir, **{"plan": PLAN, **options})

    def close(self) -> None:
        if self.scope is not None:
            self.scope.close(timeout=60.0)  # an agent may wait long for a busy processor

    def step(self, step: int, *, optimize: bool = True, rank: int | None = None) -> None:
        self.forward(step, rank=rank).backward()
        if optimize:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def forward(self, step: int, *, rank: int | None = None) -> torch.Tensor:
        batch = make_batch(self.rank if rank is None else rank, step)
        loss: torch.Tensor = self.ddp(**batch)["loss"]
        return loss

    def exact_norm(self, *batches: int, branch: tuple[bool, ...] = ()) -> float:
        """Return the norm of the mean gradient over the batches that come next.

        Computed on a copy without DDP, with the random numbers that the training will draw.
        """
        alone = copy.deepcopy(self.model)
        alone.zero_grad()
        with torch.random.fork_rng(devices=[]):
            for index, number in enumerate(batches):
                options = {"use_branch": True} if branch and branch[index] else {}
                loss = alone(**make_batch(self.rank, number), **options)["loss"]
                (loss / len(batches)).backward()
        parts = [p.grad.double().flatten() for p in alone.parameters() if p.grad is not None]
        return torch.cat(parts).norm().item()

    def bits(self) -> dict[str, bytes]:
        return bits_of(self.model, [self.optimizer])
