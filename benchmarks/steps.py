"""What watching costs a step: every variant trains the same model, in turns, in one run.

Run ``python benchmarks/steps.py``. The naive way copies the whole local gradient and gathers it
from all ranks, as one would without a sketch.
"""

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import (
    WARM_UP,
    Model,
    Step,
    make_batch,
    make_row,
    run_ranks,
    time_in_turns,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope import Run
from rankscope.agent.step_message import StepMessage, pack_values
from rankscope.bus.evidence import Table
from rankscope.stats.audit import AUDIT_WIDTH

VARIANTS: dict[str, dict[str, Any]] = {
    "scalars": {"tier": "scalars"},
    "sketch": {"tier": "sketch"},
    "sketch, without the audit": {"tier": "sketch", "reduced": "norm"},
    "sketch without exact evidence": {"tier": "sketch", "evidence": False},
    "sketch and traces": {"tier": "sketch", "trace": True},
}
"""What ``watch`` is asked for."""


class NaiveGather:
    """Copies every local gradient and gathers the copies whole."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._copies: list[Tensor] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._copy)  # type: ignore[no-untyped-call]

    def _copy(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._copies.append(parameter.grad.flatten().clone())

    def cosines(self) -> Tensor:
        """Gather the copies of the step from all ranks and compare all pairs."""
        own = torch.cat(self._copies)
        self._copies.clear()
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        units = torch.stack([whole / whole.norm() for whole in gathered])
        return units @ units.T


def make_ddp_step(variant: str, tokens: int, stack: ExitStack, inner: Model | None = None) -> Step:
    """Return a training step under DDP: plain, naive, or watched as a variant says."""
    batch = make_batch(tokens)
    model = DistributedDataParallel(inner or Model())
    naive = NaiveGather(model) if variant == "naive" else None
    return _stepper(model, batch, variant, stack, naive)


def make_fsdp2_step(
    variant: str, tokens: int, stack: ExitStack, inner: Model | None = None
) -> Step:
    """Return a training step under FSDP2, plain or watched as a variant says."""
    batch = make_batch(tokens)
    model = inner or Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return _stepper(model, batch, variant, stack, None)


def _stepper(
    model: nn.Module,
    batch: dict[str, Tensor],
    variant: str,
    stack: ExitStack,
    naive: NaiveGather | None,
) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if variant in VARIANTS:
        run_dir = stack.enter_context(tempfile.TemporaryDirectory()) + "/run"
        stack.enter_context(
            rankscope.watch(
                model, optimizer, run_dir=run_dir, overhead_budget=None, **VARIANTS[variant]
            )
        )

    def step() -> None:
        model(**batch)["loss"].backward()
        if naive is not None:
            naive.cosines()
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_variants(kind: str, variants: list[str], tokens: int, rounds: int) -> dict[str, Any]:
    """Time all variants in turns, on one rank of several."""
    make = make_ddp_step if kind == "DDP" else make_fsdp2_step
    with ExitStack() as stack:
        steps = {name: make(name, tokens, stack) for name in ["plain", *variants]}
        return time_in_turns(steps, rounds)


def run_steps(
    kind: str, variants: list[str], tokens: int, rounds: int, ranks: int = 2
) -> list[dict[str, Any]]:
    """Return a row of the table for each variant."""
    seconds = run_ranks(time_variants, ranks, kind, variants, tokens, rounds)
    rows = []
    for name in variants:
        what = f"{kind}, {name}, {tokens:,} tokens per rank"
        rows.append(make_row(what, seconds[name], seconds["plain"]))
    return rows


def measure_own_cost(
    variant: str, tokens: int, rounds: int, optimize: bool = False
) -> dict[str, float]:
    """Return what a watched DDP job records of itself: time on the training thread, bytes moved.

    Args:
        variant: How it is watched.
        tokens: Tokens per rank and step.
        rounds: Steps.
        optimize: Whether AdamW takes a step, so that it has state.
    """
    model, batch = DistributedDataParallel(Model()), make_batch(tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if optimize else None
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        scope = rankscope.watch(
            model, optimizer, run_dir=run_dir, overhead_budget=None, **VARIANTS[variant]
        )
        for _ in range(WARM_UP + rounds):
            model(**batch)["loss"].backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
        scope.close()
        bytes_per_step = scope.traffic.total / (WARM_UP + rounds)
        if dist.get_rank() != 0:
            return {}
        run = Run.open(run_dir)
        seconds = run.columns(Table.STEPS, "overhead_seconds")["overhead_seconds"]
        _, step_seconds_TW = run.per_worker("step_seconds")
    return {
        "step_milliseconds": 1e3 * float(np.median(step_seconds_TW[WARM_UP:])),
        "overhead_milliseconds": 1e3 * float(np.median(seconds[WARM_UP:])),
        "bytes_per_step": bytes_per_step,
    }


def bytes_of_a_message(num_groups: int) -> int:
    """Return the size of a default message of a model with so many groups."""
    numbers, sketches = 2 * num_groups + 3, 4093 + 2 * num_groups * AUDIT_WIDTH
    message = StepMessage(
        0,
        slots=np.frombuffer(pack_values({}), np.int64),
        digests_D=np.zeros(32, np.int64),
        numbers=np.zeros(numbers),
        sketches=np.zeros(sketches, np.float32),
    )
    return len(message.pack())


def main() -> None:
    """Print a quick table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--kind", choices=["DDP", "FSDP2"], default="DDP")
    parser.add_argument("--variants", default="sketch,scalars,naive")
    options = parser.parse_args()
    variants = options.variants.split(",")
    for row in run_steps(options.kind, variants, options.tokens, options.rounds):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
