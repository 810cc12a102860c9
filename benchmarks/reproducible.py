"""The reproducible reductions beside DDP's own: which bits they give, and what they cost.

Run ``python benchmarks/reproducible.py`` for everything, or ``--parts bits bytes times``. Each
prints a Markdown table; ``--json`` prints the rows instead.

* ``bits``: the same training with buckets of 1, 5, 25 and 100 MB, each run twice: how many
  different ends it has, and how far apart they are.
* ``bytes``: what a step sends, by Linux's counters of the ranks' connections.
* ``times``: step times, all reductions in turns in one run: median of the ratios to ``plain`` of
  the same round, and the 95 % interval of that median.
"""

import argparse
import json
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import (
    Model,
    Step,
    make_batch,
    median_interval,
    num_parameters,
    run_ranks,
    time_in_turns,
)
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wire import bytes_sent

import rankscope

Row = dict[str, Any]
PLAIN = "plain"
REDUCTIONS: dict[str, Callable[[nn.Module], object]] = {
    PLAIN: lambda model: None,
    "fixed_order": rankscope.fixed_order,
    "order_free": rankscope.order_free,
}
"""What is done to a model in DDP before it trains, by the name of the reduction."""

BUCKETS = (1, 5, 25, 100)
REPEATS = 2


def make_step(
    reduction: str, tokens: int, bucket: float = 25
) -> tuple[Step, DistributedDataParallel]:
    """Return a training step, and its model; the model is the same on every rank and every time."""
    batch = make_batch(tokens)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(), bucket_cap_mb=bucket)
    REDUCTIONS[reduction](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def measure_bits(tokens: int, steps: int) -> Row:
    """Train with every reduction and bucket size; return digests and distances of the ends."""
    ends: dict[str, Any] = {}
    for name in REDUCTIONS:
        digests, first, distance = [], None, 0.0
        for bucket in BUCKETS * REPEATS:
            torch.manual_seed(1 + dist.get_rank())
            step, model = make_step(name, tokens, bucket)
            for _ in range(steps):
                step()
            end = torch.cat([p.detach().flatten() for p in model.parameters()])
            digests.append(blake2b(end.numpy().tobytes()).hexdigest())
            first = end if first is None else first
            distance = max(distance, float((end - first).abs().max()))
        same: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(same, digests)
        ends[name] = {
            "ends": len({digest for rank in same for digest in rank}),
            "repeats_agree": all(rank[: len(BUCKETS)] == rank[len(BUCKETS) :] for rank in same),
            "largest_difference": distance,
        }
    return ends


def measure_bytes(tokens: int, steps: int) -> Row:
    """Return the bytes that all ranks together send in a step, by reduction."""
    sent = {}
    for name in REDUCTIONS:
        step, _ = make_step(name, tokens)
        step()
        step()  # buckets are rebuilt after the first
        dist.barrier()
        before = bytes_sent()
        for _ in range(steps):
            step()
        dist.barrier()
        total = torch.tensor(bytes_sent() - before)
        dist.all_reduce(total)
        sent[name] = int(total) / steps
    return sent


def measure_times(tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each reduction's steps, taken in turns on one rank of several."""
    return time_in_turns({name: make_step(name, tokens)[0] for name in REDUCTIONS}, rounds)


def run_bits(options: argparse.Namespace) -> list[Row]:
    """Return a row for each number of ranks and reduction."""
    return [
        {"ranks": ranks, "reduction": name, "trainings": len(BUCKETS) * REPEATS, **end}
        for ranks in track(options.bits_ranks, "bits", console=Console(stderr=True))
        for name, end in run_ranks(measure_bits, ranks, 128, options.steps).items()
    ]


def run_bytes(options: argparse.Namespace) -> list[Row]:
    """Return a row for each number of ranks and reduction."""
    gradient = 4 * num_parameters()
    return [
        {"ranks": ranks, "reduction": name, "bytes_per_gradient_byte": sent / ranks / gradient}
        for ranks in track(options.ranks, "bytes", console=Console(stderr=True))
        for name, sent in run_ranks(measure_bytes, ranks, 128, options.steps).items()
    ]


def run_times(options: argparse.Namespace) -> list[Row]:
    """Return a row for each number of ranks and reduction but the plain one."""
    rows = []
    for ranks in track(options.ranks, "times", console=Console(stderr=True)):
        seconds = run_ranks(measure_times, ranks, options.tokens, options.pairs)
        for name in [name for name in seconds if name != PLAIN]:
            ratios = [a / b for a, b in zip(seconds[name], seconds[PLAIN], strict=True)]
            median, low, high = median_interval(ratios)
            row = {"ranks": ranks, "reduction": name, "tokens": options.tokens, "median": median}
            plain = 1e3 * float(np.median(seconds[PLAIN]))
            rows.append(
                {**row, "low": low, "high": high, "pairs": len(ratios), "plain_milliseconds": plain}
            )
    return rows


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "bits": run_bits,
    "bytes": run_bytes,
    "times": run_times,
}


def render(rows: list[Row]) -> str:
    """Return rows as a Markdown table."""
    lines = [[key.replace("_", " ") for key in rows[0]], ["---"] * len(rows[0])]
    lines += [[_cell(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or value > 1e-3 else f"{value:.1e}"
    return str(value)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bits-ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for part in options.parts:
        rows = PARTS[part](options)
        print(json.dumps({part: rows}) if options.json else f"{part}\n\n{render(rows)}\n")


if __name__ == "__main__":
    main()
