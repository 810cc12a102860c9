"""Training loops under the ways of using DDP that must be watched, run on real ranks."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from support.models import make_batch, make_model


@dataclass(frozen=True)
class Mode:
    name: str
    ddp: dict[str, Any]
    accumulate: int = 1
    branch: str = ""  # "never": an unused branch; "rank 0": used by rank 0 only
    zero_in_place: bool = False


MODES = [
    Mode("plain", {}),
    Mode("bucket views", {"gradient_as_bucket_view": True}),
    Mode("bucket views zeroed in place", {"gradient_as_bucket_view": True}, zero_in_place=True),
    Mode("small buckets", {"bucket_cap_mb": 0.001}),
    Mode("no_sync", {}, accumulate=3),
    Mode("no_sync with bucket views", {"gradient_as_bucket_view": True}, accumulate=3),
    Mode("static graph", {"static_graph": True}),
    Mode("static graph with unused", {"static_graph": True}, branch="never"),
    Mode("unused parameters", {"find_unused_parameters": True}, branch="never"),
    Mode("used on one rank", {"find_unused_parameters": True}, branch="rank 0"),
]


def micro_batches(rank: int, step: int, mode: Mode) -> list[dict[str, Any]]:
    batches = []
    for micro in range(mode.accumulate):
        batch: dict[str, Any] = make_batch(rank, mode.accumulate * step + micro)
        if mode.branch == "rank 0" and rank == 0:
            batch["use_branch"] = True
        batches.append(batch)
    return batches


def train(rank: int, mode: Mode, steps: int, run_dir: str | None) -> dict[str, Any]:
    """Train with dropout; return every bit of the state at the end."""
    model, ddp, optimizer = _make(rank, mode, dropout=0.1)
    scope = (
        rankscope.watch(ddp, optimizer, run_dir=run_dir, overhead_budget=None) if run_dir else None
    )
    for step in range(steps):
        train_step(rank, mode, step, ddp, optimizer)
    if scope is not None:
        scope.close()
    dist.barrier()
    return {"state": state_of(model, optimizer)}


def train_watched(
    rank: int,
    mode: Mode,
    steps: int,
    run_dir: str,
    before_step: Callable[[int, nn.Module], None],
    **options: Any,
) -> None:
    """Train without dropout, watched, with a look at the model before each step."""
    model, ddp, optimizer = _make(rank, mode, dropout=0.0)
    options = {"overhead_budget": None, **options}
    with rankscope.watch(ddp, optimizer, run_dir=run_dir, **options):
        for step in range(steps):
            before_step(step, model)
            train_step(rank, mode, step, ddp, optimizer)


def train_step(
    rank: int,
    mode: Mode,
    step: int,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
) -> None:
    batches = micro_batches(rank, step, mode)
    for micro, batch in enumerate(batches):
        last = micro == len(batches) - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            (ddp(**batch)["loss"] / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not mode.zero_in_place)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "parameters": {k: v.numpy().copy() for k, v in model.state_dict().items()},
        "optimizer": [
            {k: v.numpy().copy() for k, v in state.items()}
            for state in optimizer.state_dict()["state"].values()
        ],
        "rng": torch.get_rng_state().numpy().copy(),
    }


def local_gradient(
    rank: int, mode: Mode, step: int, model: nn.Module
) -> tuple[torch.Tensor, float]:
    """Return this rank's own gradient, computed on a copy without DDP, and its loss per token."""
    alone = copy.deepcopy(model)
    for parameter in alone.parameters():
        parameter.grad = None
    batches = micro_batches(rank, step, mode)
    losses, tokens = [], []
    for batch in batches:
        loss = alone(**batch)["loss"]
        (loss / len(batches)).backward()
        losses.append(loss.item())
        tokens.append(int((batch["labels"] != -100).sum()))
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]
    gradient = torch.cat([part.double().flatten() for part in parts])
    return gradient, sum(a * b for a, b in zip(losses, tokens, strict=True)) / sum(tokens)


def _make(
    rank: int, mode: Mode, *, dropout: float
) -> tuple[nn.Module, DistributedDataParallel, torch.optim.Optimizer]:
    model = make_model(dropout=dropout, branch=bool(mode.branch))
    ddp = DistributedDataParallel(model, **mode.ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    return model, ddp, optimizer
