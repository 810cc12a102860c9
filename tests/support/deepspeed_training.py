"""What the DeepSpeed tap saw of one step, beside an independent computation of it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankscope.bus.groups import group_parameters
from rankscope.evidence.reference.models import loss_scale
from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.deepspeed import DeepSpeedTap
from rankscope.wrappers.tap import LocalGradient, ReadReduced
from support.deepspeed_modes import (
    Mode,
    accumulated,
    make_engine,
    micro_gradients,
    state_of,
    train_step,
)

WIDTH = 1021
_INTERCEPTED = (
    "_backward_prologue", "_backward_epilogue", "allreduce_gradients", "_take_model_step",
)  # fmt: skip


@dataclass(frozen=True)
class Observation:
    """One rank in one step.

    Attributes:
        truth: The accumulated local gradient, in float64, by parameter.
        micro_norms: Norms of the micro-batches' own gradients.
        gradient: What the tap returned.
    """

    truth: dict[str, np.ndarray]
    micro_norms: list[float]
    gradient: dict[str, Any]
    estimated: bool
    loss_scale: float
    reduced_copies: int


def unguarded(work: Any, *args: Any) -> None:
    work(*args)


def make_sketcher(names: Any) -> Sketcher:
    return Sketcher(torch.device("cpu"), group_parameters(names), WIDTH, seed=3)


def make_tap(engine: Any, *, reduced: ReadReduced = ReadReduced.SKETCH) -> DeepSpeedTap:
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    return DeepSpeedTap(engine, trained, make_sketcher(trained), unguarded, reduced=reduced)


def sketch_of(gradients: dict[str, np.ndarray]) -> GradientTotals:
    """Measure whole gradients with the sketcher that the tap uses."""
    sketcher = make_sketcher(gradients)
    totals = sketcher.new_totals()
    for name, gradient in gradients.items():
        sketcher.measure(name, torch.from_numpy(gradient), totals)
    return totals


@dataclass(frozen=True)
class Ended:
    """What a training has left at its end.

    Attributes:
        state: Every byte of its state.
        hooked: Hooks and replaced functions of the engine.
    """

    state: dict[str, np.ndarray]
    hooked: int

    @classmethod
    def of(cls, engine: Any) -> "Ended":
        """Look at an engine, and destroy it."""
        hooked = sum(len(p._backward_hooks or ()) for p in engine.module.parameters())
        hooked += sum(name in vars(engine) for name in _INTERCEPTED)
        ended = cls(state_of(engine), hooked)
        engine.destroy()
        return ended


def train_untapped(rank: int, mode: Mode, steps: int) -> Ended:
    engine = make_engine(rank, mode, dropout=0.0)
    for step in range(steps):
        train_step(rank, mode, step, engine)
    return Ended.of(engine)


def observe(rank: int, mode: Mode, steps: int) -> tuple[list[Observation], Ended]:
    """Train tapped, and compute each step's gradient on a copy as well; the last step untapped."""
    engine = make_engine(rank, mode, dropout=0.0)
    tap = make_tap(engine)
    seen = []
    for step in range(steps - 1):
        with torch.random.fork_rng(devices=[]):
            micro = micro_gradients(rank, mode, step, engine)
        tap.begin_forward(measure=True)
        assert not tap.complete
        train_step(rank, mode, step, engine)
        assert tap.complete
        assert not tap.aborted
        gradient = tap.collect()
        assert gradient is not None
        total = accumulated(mode, micro)
        seen.append(
            Observation(
                truth={name: value.double().numpy() for name, value in total.items()},
                micro_norms=[_norm(part) for part in micro],
                gradient=to_numpy(gradient),
                estimated=gradient.norm_estimated,
                loss_scale=float(loss_scale(engine)),
                reduced_copies=tap.reduced_copies,
            )
        )
    tap.remove()
    train_step(rank, mode, steps - 1, engine)
    return seen, Ended.of(engine)


def to_numpy(gradient: LocalGradient) -> dict[str, Any]:
    """Return a gradient as arrays, which travel between processes."""
    micro = gradient.micro_squared_norms
    carried = gradient.carried_over
    return {
        "totals": _arrays(gradient.totals),
        "reduced": None if gradient.reduced is None else _arrays(gradient.reduced),
        "micro_norms": None if micro is None else micro.sqrt().tolist(),
        "kept": None
        if gradient.accumulator_changes is None
        else gradient.accumulator_changes.numpy(),
        "carried_over": carried is not None and bool(carried),
    }


def _arrays(totals: GradientTotals) -> dict[str, np.ndarray]:
    names = ("sketches", "squared_norms", "largest", "nonfinite")
    return {name: getattr(totals, name).numpy() for name in names}


def _norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt())
