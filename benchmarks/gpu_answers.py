"""A part of ``make gpu``: faults in trainings on a device, and what is said about them."""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_common import Setup, Values, attempt, run_ranks, scratch
from gpu_model import Llama, make_batch
from gpu_page import ANSWERS
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.bus.finding import Severity

VERIFY_AT = 3


def measure_answers(setup: Setup) -> Iterator[Values]:
    """Train with each fault and without; say what was found, and whether that was expected."""
    for what, (kind, ranks, expected) in ANSWERS.items():
        backend = setup.pick("gloo" if ranks > 1 else "nccl", "gloo")
        found = attempt((what,), partial(run_ranks, _found, ranks, backend, setup, kind, what))
        if found[what] != expected and not str(found[what]).startswith(("failed", "not possible")):
            found[what] = f"failed: {expected} was expected, and {found[what]} was found"
        yield found


def _found(setup: Setup, kind: str, what: str) -> Values:
    """Return the causes that are found in a training; on rank 0, which reads the record."""
    rank = dist.get_rank()
    with scratch() as folder, ExitStack() as stack:
        inner, model = _model(setup, kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scope = rankscope.watch(
            model, optimizer, run_dir=f"{folder}/run", verify_at=[VERIFY_AT], overhead_budget=None
        )
        stack.callback(scope.close)
        torch.manual_seed(1 if kind == "sampler" else 1 + rank)
        steps, changed_at = setup.pick((60, 30), (24, 6))
        for step in range(steps if kind in ("sampler", "weights") else 3 * VERIFY_AT):
            for micro in range(2):
                last = micro == 1
                with nullcontext() if last or kind == "sharded" else model.no_sync():  # type: ignore[operator]
                    loss = model(**make_batch(setup, inner, 64))["loss"] / 2
                    if kind == "lost" and last:
                        optimizer.zero_grad()
                    (loss / dist.get_world_size() if kind == "divided" else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            if kind == "weights" and step == changed_at and rank == 1:
                with torch.no_grad():
                    inner.layers[0].q.weight[0, 0] += 1e-3  # type: ignore[index, union-attr, operator]
        stack.close()
        if rank:
            return {}
        findings = rankscope.Run.open(Path(folder) / "run").findings()
        loud = {each.cause for each in findings if each.severity >= Severity.WARNING}
        causes = loud - {"inconclusive"}  # statistics may say so before a canary has settled it
        agreed = {each.cause for each in findings} & {"verify.agrees"}
        return {what: ", ".join(sorted(causes | agreed)) or "nothing"}


def _model(setup: Setup, kind: str) -> tuple[Llama, nn.Module]:
    torch.manual_seed(0)
    with setup.device:
        inner = Llama(Setup(dry=True, seconds=0))
        for parameter in inner.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)
    if kind == "sharded":
        for layer in inner.layers:
            fully_shard(layer)
        fully_shard(inner)
        return inner, inner
    return inner, DistributedDataParallel(
        inner, device_ids=None if setup.dry else [setup.device.index]
    )
