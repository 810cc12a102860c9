"""Parts of ``make gpu``: what the probe starts in a step, and what a watched step takes."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_common import (
    NotPossibleError,
    Setup,
    Spread,
    Values,
    agreed,
    attempt,
    recorded,
    run_ranks,
    scratch,
)
from gpu_model import Llama, make_batch
from gpu_page import DDP_WAYS, FSDP2_WAYS, LAUNCHES, OBSERVED, OWN, PLAIN, RATIO, TENSORS
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankscope

Step = Callable[[], None]
BLOCK = 10  # steps at most, so that nothing is left over for the other turn
TURNS = 64  # steps within which the digests of everything have their turn
MOST_BLOCKS = 40


# Launches --------------------------------------------------------------------------------------


def measure_launches(setup: Setup) -> Iterator[Values]:
    """Count what watching starts on the device, by the profiler, and the host's time for it."""
    for column, count in TENSORS.items():
        rows = [row.format(column) for row in LAUNCHES]
        yield attempt(rows, partial(_launches, setup, count, rows))


def _launches(setup: Setup, count: int, rows: list[str]) -> Values:
    tensors = setup.pick(count, 5 * len(str(count)))
    return dict(
        zip(rows, run_ranks(_count, 1, setup.pick("nccl", "gloo"), setup, tensors), strict=True)
    )


class _Many(nn.Module):
    """A model of so many parameter tensors."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ParameterList(torch.randn(64) / 64 for _ in range(5)) for _ in range(tensors // 5)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a scalar."""
        total = inputs.sum()
        for parameter in self.parameters():
            total = total + inputs @ parameter
        return total


def _count(setup: Setup, tensors: int) -> tuple[float, float, float]:
    """Return what a watched step has more than an unwatched one; on one rank.

    Returns:
        Launches and copies; milliseconds by the probe's own clock, and of the CPU.
    """
    steps = setup.pick(8, 2)
    with scratch() as folder, ExitStack() as stack:
        works = {}
        for name in ("plain", "watched"):
            model = _wrapped(setup, _Many(tensors).to(setup.device))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            if name == "watched":
                watched = rankscope.watch(
                    model, optimizer, run_dir=f"{folder}/run", overhead_budget=None
                )
                stack.callback(watched.close)
            works[name] = _stepper(model, optimizer, (torch.ones(64, device=setup.device),))
        for step in works.values():
            for _ in range(setup.pick(TURNS + 6, 3)):
                step()
        counts = {name: _events(setup, step, steps) for name, step in works.items()}
        cpu = {name: _cpu_of(setup, step, setup.pick(40, 3)) for name, step in works.items()}
        stack.close()
        (own,) = recorded(Path(folder) / "run", "overhead_seconds")
    launches = (counts["watched"] - counts["plain"]) / steps
    return launches, 1e3 * float(np.nanmedian(own)), 1e3 * (cpu["watched"] - cpu["plain"])


def _events(setup: Setup, step: Step, steps: int) -> int:
    """Return how many kernels, copies and fills run on the device; on the CPU, operations."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not setup.dry:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    setup.synchronise()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        setup.synchronise()
    wanted = "CPU" if setup.dry else "CUDA"
    events: Any = profile.events()
    return sum(
        event.device_type.name == wanted and not getattr(event, "is_user_annotation", False)
        for event in events
    )


def _cpu_of(setup: Setup, step: Step, steps: int) -> float:
    """Return seconds of all threads of this process, a step; waiting for the device is none."""
    setup.synchronise()
    start = time.process_time()
    for _ in range(steps):
        step()
    seconds = time.process_time() - start
    setup.synchronise()
    return seconds / steps


# Step time -------------------------------------------------------------------------------------


def measure_steps(setup: Setup) -> Iterator[Values]:
    """Time steps under DDP."""
    one, shared, each = DDP_WAYS
    yield from _time_ways(
        setup, {one: (1, "nccl"), shared: (2, "gloo"), each: (setup.num_devices, "nccl")}
    )


def measure_fsdp2(setup: Setup) -> Iterator[Values]:
    """Time steps under FSDP2; one device is a mesh of one rank."""
    each, shared = FSDP2_WAYS
    yield from _time_ways(setup, {each: (setup.num_devices, "nccl"), shared: (2, "gloo")})


def _time_ways(setup: Setup, ways: dict[str, tuple[int, str]]) -> Iterator[Values]:
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Llama(setup).parameters())
    yield {"parameters": parameters, "tokens a step and rank": _tokens(setup)}
    for way, (ranks, backend) in ways.items():
        rows = [row.format(way) for row in (RATIO, PLAIN, OWN, OBSERVED)]
        yield attempt(rows, partial(_time_way, setup, way, ranks, backend))


def _time_way(setup: Setup, way: str, ranks: int, backend: str) -> Values:
    if way == DDP_WAYS[-1] and ranks == 1:
        raise NotPossibleError("there is one device")
    try:
        times = run_ranks(_time_both, ranks, setup.pick(backend, "gloo"), setup, way)
    except RuntimeError as error:
        if setup.dry or way != FSDP2_WAYS[-1]:
            raise
        print(error)  # gloo need not know what FSDP2 asks for on a device
        raise NotPossibleError(str(error).strip().splitlines()[-1][:150]) from error
    return {
        RATIO.format(way): Spread.of(times["ratio"]),
        PLAIN.format(way): Spread.of([1e3 * seconds for seconds in times["plain"]]),
        OWN.format(way): 1e3 * times["own"],
        OBSERVED.format(way): 100 * times["observed"],
    }


def _tokens(setup: Setup) -> int:
    """Return how many tokens a step has: fewer where two ranks with two models each lack room."""
    if setup.dry:
        return 32
    return 8192 if torch.cuda.get_device_properties(0).total_memory > 70e9 else 2048


def _seconds(setup: Setup, step: Step, steps: int) -> float:
    """Return seconds of a step, over several of them."""
    dist.barrier()
    setup.synchronise()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    setup.synchronise()
    return (time.perf_counter() - start) / steps


def _time_both(setup: Setup, way: str) -> dict[str, Any]:
    """Return figures of watched and unwatched steps, block by block in turns."""
    with scratch() as folder, ExitStack() as stack:
        works = {}
        for name in ("plain", "watched"):
            torch.manual_seed(0)
            model, optimizer = _llama(setup, way)
            torch.manual_seed(os.getpid())
            if name == "watched":
                scope = rankscope.watch(model, optimizer, run_dir=f"{folder}/run")
                stack.callback(scope.close)
            inner: Any = getattr(model, "module", model)
            works[name] = _stepper(model, optimizer, make_batch(setup, inner, _tokens(setup)))
        blocks = _in_turns(setup, works)
        stack.close()
        if dist.get_rank() != 0:  # which writes the record
            return {}
        own, observed = recorded(Path(folder) / "run", "overhead_seconds", "observed")
    return {
        "ratio": [a / b for a, b in zip(blocks["watched"], blocks["plain"], strict=True)],
        "plain": blocks["plain"],
        "own": float(np.nanmedian(own)),
        "observed": float(np.mean(observed)),
    }


def _in_turns(setup: Setup, works: dict[str, Step]) -> dict[str, list[float]]:
    """Time blocks in an order drawn anew in every round, as many as there is time for."""
    for number in range(2):  # the first steps compile
        pair = agreed(sum(_seconds(setup, step, setup.pick(2, 1)) for step in works.values()))
        if number == 0 and pair > 3 * setup.seconds:
            raise NotPossibleError("a step takes longer than there is time for")
    for _ in range(setup.pick(min(TURNS + 6, int(setup.seconds / 4 / pair)), 0)):
        for step in works.values():
            step()
    block = setup.pick(max(1, min(BLOCK, int(setup.seconds / 16 / pair))), 2)
    rounds = setup.pick(max(3, min(MOST_BLOCKS, int(setup.seconds / block / pair))), 1)
    order = Random(0)
    blocks: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name in order.sample(list(works), len(works)):
            blocks[name].append(_seconds(setup, works[name], block))
    return blocks


def _llama(setup: Setup, way: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model in bf16, wrapped, and its optimizer."""
    with setup.device:
        inner = Llama(setup).to(torch.bfloat16)
    if way in FSDP2_WAYS:
        for layer in inner.layers:
            fully_shard(layer)
        fully_shard(inner)
        model: nn.Module = inner
    else:
        model = _wrapped(setup, inner)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def _wrapped(setup: Setup, model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, device_ids=None if setup.dry else [setup.device.index])


def _stepper(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Step:
    def step() -> None:
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        (output["loss"] if isinstance(output, dict) else output).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
