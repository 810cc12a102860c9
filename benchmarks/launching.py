"""How long a forward pass that launches small operations waits for the interpreter's lock.

Run ``python benchmarks/launching.py``. On an accelerator a forward pass is a row of launches, and
the device idles while the first of them wait: no work is queued yet. The monitor's thread needs
the same lock for milliseconds in each step. Here the operations are small ones on the CPU.
"""

import argparse
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from harness import WARM_UP, Model, make_row, run_ranks, time_in_turns
from rich.console import Console
from steps import make_ddp_step
from torch import Tensor

OPERATIONS, ELEMENTS, TOKENS, ROUNDS = 3000, 20_000, 16, 100


class Launching(Model):
    """Runs small operations at the beginning of a forward pass, and times them.

    Attributes:
        seconds: What all of them took, by forward pass.
        longest: What the longest took.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.longest: list[float] = []

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Launch, and go on as the model does."""
        numbers, longest = torch.zeros(ELEMENTS), 0.0
        start = last = time.perf_counter()
        for _ in range(OPERATIONS):
            numbers.add_(1.0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        self.seconds.append(last - start)
        self.longest.append(longest)
        return super().forward(input_ids, labels)


def time_launches(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Time the operations, watched and not, in turns, on one rank of several."""
    models = {name: Launching() for name in ("plain", "sketch")}
    with ExitStack() as stack:
        steps = {name: make_ddp_step(name, TOKENS, stack, one) for name, one in models.items()}
        time_in_turns(steps, rounds)
    return {
        name: {"seconds": one.seconds[WARM_UP:], "longest": one.longest[WARM_UP:]}
        for name, one in models.items()
    }


def run_launches(rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the row of the table."""
    times = run_ranks(time_launches, 2, rounds)
    watched, plain = times["sketch"], times["plain"]
    what = f"{OPERATIONS:,} additions of {ELEMENTS:,} numbers in the forward pass"
    return {
        **make_row(what, watched["seconds"], plain["seconds"]),
        "longest_milliseconds": 1e3 * float(np.median(watched["longest"])),
        "plain_longest_milliseconds": 1e3 * float(np.median(plain["longest"])),
    }


def render(rows: list[dict[str, Any]]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| what | pairs | watched / unwatched | added | the longest, watched | unwatched |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['what']}, {row['plain_milliseconds']:.1f} ms | {row['pairs']} "
        f"| {row['median']:.3f} ({row['low']:.3f} – {row['high']:.3f}) "
        f"| {row['added_milliseconds']:.2f} ms | {row['longest_milliseconds']:.2f} ms "
        f"| {row['plain_longest_milliseconds']:.2f} ms |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    Console().print(render([run_launches(parser.parse_args().rounds)]), markup=False)


if __name__ == "__main__":
    main()
