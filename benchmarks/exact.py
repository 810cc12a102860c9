"""What the exact tier's reduction alone costs: DDP with it over plain DDP, without ``watch``.

Run ``python benchmarks/exact.py``. The memory is the growth of a process's peak over plain DDP,
in runs of their own.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import (
    WARM_UP,
    Model,
    Step,
    make_batch,
    median_interval,
    num_parameters,
    run_ranks,
    time_in_turns,
)
from torch.nn.parallel import DistributedDataParallel

from rankscope.reduce.exact import ExactGram


def run_steps(pairs: int = 300, tokens: int = 2048, ranks: int = 2) -> dict[str, Any]:
    """Return the row of step times: median ratio and its 95 % interval."""
    seconds = run_ranks(time_pairs, ranks, tokens, pairs)
    ratios = [a / b for a, b in zip(seconds["exact"], seconds["plain"], strict=True)]
    added = [a - b for a, b in zip(seconds["exact"], seconds["plain"], strict=True)]
    median, low, high = median_interval(ratios)
    return {
        "what": f"DDP, exact reduction alone, {tokens:,} tokens per rank, {ranks} ranks",
        "median": median,
        "low": low,
        "high": high,
        "pairs": pairs,
        "plain_milliseconds": 1e3 * float(np.median(seconds["plain"])),
        "added_milliseconds": 1e3 * float(np.median(added)),
    }


def run_memory(tokens: int = 512, ranks: int = 2) -> dict[str, Any]:
    """Return by how many bytes a step's peak grows, and the size of the largest bucket."""
    plain, _ = min(run_ranks(measure_peak, ranks, tokens, False) for _ in range(3))
    exact, bucket = min(run_ranks(measure_peak, ranks, tokens, True) for _ in range(3))
    return {
        "what": f"peak memory, exact reduction − plain DDP, {num_parameters() / 1e6:.1f} M "
        "parameters",
        "extra_bytes": exact - plain,
        "largest_bucket_bytes": bucket,
    }


def make_step(tokens: int, *, exact: bool) -> tuple[Step, DistributedDataParallel]:
    """Return a training step, and its model."""
    batch = make_batch(tokens)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gram = ExactGram.register(model, lambda work, *args: work(*args)) if exact else None

    def step() -> None:
        model(**batch)["loss"].backward()
        if gram is not None and gram.take_gram() is None:
            raise RuntimeError("the step was not measured")
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def time_pairs(tokens: int, pairs: int) -> dict[str, list[float]]:
    """Time both variants in turns, on one rank of several."""
    steps = {name: make_step(tokens, exact=name == "exact")[0] for name in ("plain", "exact")}
    return time_in_turns(steps, pairs)


def measure_peak(tokens: int, exact: bool) -> tuple[int, int]:
    """Return the peak memory of a process in later steps, and the size of its largest bucket."""
    step, model = make_step(tokens, exact=exact)
    for _ in range(WARM_UP):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    for _ in range(WARM_UP):
        step()
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(line for line in status if line.startswith("VmHWM"))
    sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]  # type: ignore[no-untyped-call]
    return 1024 * int(peak.split()[1]), max(int(size) for size in sizes.split(","))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 512])
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(json.dumps(run_memory(ranks=options.ranks)), flush=True)
    for tokens in options.tokens:
        print(json.dumps(run_steps(options.pairs, tokens, options.ranks)), flush=True)


if __name__ == "__main__":
    main()
