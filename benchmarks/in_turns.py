"""What watching costs a training: wall and processor time, in blocks of ten steps in turns.

Two models that are alike train side by side, one watched; blocks, so that nothing is left over for
the unwatched turn. Processor time is of the whole training process, with all its threads; the
agent's is read off the system. A ratio of wall time needs a core for the agent: with ``--pin``,
both ranks share the first core, and the agent has the second.

Run ``python benchmarks/in_turns.py``, or ``make bench``.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import Step, run_ranks
from probe_cost import llama
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope

Row = dict[str, Any]
Seconds = np.ndarray[Any, Any]
BLOCK = 10
WARM_UPS = {"always observed": 7, "within the budget": 31}
"""Blocks before those that count: by 7, the first canary and the first looks at all state are over;
by 31, the 300 steps that are observed whatever it costs."""

MODELS = {
    "2 layers": (64, 2, 2, 32),
    "24 layers": (64, 24, 2, 32),
    "6 wide layers": (320, 6, 4, 128),
}
"""Width, layers, batch and length."""


def measure(
    name: str,
    blocks: int,
    pin: bool,
    ranks: int = 2,
    phase: str = "",
    warm_up: int | None = None,
) -> Row:
    """Return a row for one model.

    Args:
        name: Of the model.
        blocks: Pairs of blocks that count.
        pin: Whether the ranks share the first core, and leave the second to the agent.
        ranks: How many ranks.
        phase: A key of ``WARM_UPS``, by default the last one.
        warm_up: Blocks that do not count; as many as the phase wants when None.
    """
    phase = phase or list(WARM_UPS)[-1]
    before = WARM_UPS[phase] if warm_up is None else warm_up
    row: Row = run_ranks(_train, ranks, name, blocks, pin, before)
    return {"model": name, "pinned": pin, "ranks": ranks, "phase": phase, **row}


def _train(name: str, blocks: int, pin: bool, warm_up: int) -> Row:
    os.environ["RANKSCOPE_AGENT"] = "process"
    width, layers, batch, length = MODELS[name]
    cores = sorted(os.sched_getaffinity(0))
    if pin:
        os.sched_setaffinity(0, cores[:1])
    trained = [_make(width, layers) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        scope = rankscope.watch(*trained[1], run_dir=Path(folder) / "run")
        agent = scope._handle.agent
        pid = None if agent is None else agent.pid
        if pin and pid is not None:
            os.sched_setaffinity(pid, cores[1:2] or cores)
        generator = torch.Generator().manual_seed(dist.get_rank())

        def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            ids = torch.randint(0, 4096, (batch, length), generator=generator)
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()

        steps = [partial(step, *each) for each in trained]
        wall, processor, own = time_blocks(steps, (warm_up, blocks), pid)
        scope.close()
    return {
        "tensors": sum(1 for _ in trained[0][0].parameters()),
        "parameters": sum(p.numel() for p in trained[0][0].parameters()),
        **added(wall, processor),
        "agent_cpu_ms": 1e3 * own / (BLOCK * blocks),
    }


def added(wall: Seconds, processor: Seconds) -> Row:
    """Return what watching adds to a step, from what :func:`time_blocks` has measured."""
    return {
        "step_ms": 1e3 * float(np.median(wall[0])),
        "ratio": float(np.median(wall[1] / wall[0])),
        "added_wall_ms": 1e3 * float(np.median(wall[1] - wall[0])),
        "added_cpu_ms": 1e3 * float(np.median(processor[1] - processor[0])),
    }


def _make(width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(llama(width, layers))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def time_blocks(
    steps: Sequence[Step], numbers: tuple[int, int], agent: int | None
) -> tuple[Seconds, Seconds, float]:
    """Return wall and processor seconds a step ``[2, blocks]``, and the agent's in all.

    Args:
        steps: Trains the unwatched model on a batch, and the watched one.
        numbers: Of blocks that do not count, and that do.
        agent: Its process, if it has one.
    """
    warm_up, blocks = numbers
    wall, processor = np.zeros((2, blocks)), np.zeros((2, blocks))
    begun = 0.0
    for number in range(-warm_up, blocks):
        if number == 0:
            begun = _seconds_of(agent)
        for which in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            for _ in range(BLOCK):
                steps[which]()
            dist.barrier()
            seconds = time.perf_counter() - start
            time.sleep(0.1)  # what was left to a thread counts, too
            if number >= 0:
                wall[which, number] = seconds / BLOCK
                processor[which, number] = (time.process_time() - used) / BLOCK
    return wall, processor, _seconds_of(agent) - begun


def _seconds_of(pid: int | None) -> float:
    """Return the processor time of a process so far."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def render(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| model | gradients | cores | step, ms | watched / unwatched | added wall, ms "
        "| added CPU, a rank, ms | agent's CPU, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['model']} | {row['phase']} | {'apart' if row['pinned'] else 'shared'} "
        f"| {row['step_ms']:.1f} | {row['ratio']:.3f} | {row['added_wall_ms']:+.2f} "
        f"| {row['added_cpu_ms']:.2f} | {row['agent_cpu_ms']:.2f} |"
        for row in rows
    ]
    sizes = {row["model"]: (row["parameters"] / 1e6, row["tensors"]) for row in rows}
    models = (f"{name}: {size:.1f} M in {count}" for name, (size, count) in sizes.items())
    lines += [
        "",
        "*Always observed* are a run's first 300 steps; *within the budget* those after. Cores "
        "*apart*: the ranks on one, the agent on another. Parameters and their tensors: "
        f"{'; '.join(models)}. A ratio moves by 0.02 from run to run.",
    ]
    return "\n".join(lines)


def run_all(blocks: int) -> list[Row]:
    """Return a row for each model, pinned and not."""
    return [
        measure(name, max(blocks // (4 if "wide" in name else 1), 4), pin, phase=phase)
        for name in MODELS
        for pin in (True, False)
        for phase in (list(WARM_UPS)[:1] if "wide" in name else WARM_UPS)
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--model", choices=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--phase", choices=list(WARM_UPS))
    parser.add_argument("--warm-up", type=int, help="blocks that do not count, of one model")
    options = parser.parse_args()
    if options.model is None:
        rows = run_all(options.blocks)
    else:
        chosen = (options.blocks, options.pin, options.ranks, options.phase, options.warm_up)
        rows = [measure(options.model, *chosen)]
    Console(width=200).print(render(rows), markup=False)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
