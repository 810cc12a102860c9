"""The reference step: how long it takes, and how much memory, against other steps of the training.

Run ``python benchmarks/reference_step.py``. In one watched training on two ranks, steps whose
gradient is computed again take turns with steps without. Memory is what malloc has given at the
peak of a step, as in ``memory.py``.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import Model, make_batch, median_interval, num_parameters, run_ranks
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

import rankscope

ROUNDS, WARM_UP = 12, 3
TOKENS = 512
MICRO_BATCHES = (1, 4)
_HEAP = Path(__file__).with_name("heap.c")


def run_cases(
    rounds: int = ROUNDS, tokens: int = TOKENS, cases: Sequence[int] = MICRO_BATCHES
) -> list[dict[str, Any]]:
    """Return a row for each number of micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        counted = {"PYTHONMALLOC": "malloc", "ARROW_DEFAULT_MEMORY_POOL": "system"}
        compiler = shutil.which("cc")
        if compiler is not None:
            library = str(Path(folder) / "heap.so")
            command = [compiler, "-O2", "-shared", "-fPIC", "-o", library, str(_HEAP)]
            subprocess.run(command, check=True)
            counted["LD_PRELOAD"] = library
        with mock.patch.dict(os.environ, counted if compiler else {}):
            return [run_ranks(measure, 2, micro, bool(compiler), rounds, tokens) for micro in cases]


def measure(num_micro: int, counts: bool, rounds: int, tokens: int) -> dict[str, Any]:
    """Return the seconds and the peak of steps with and without a reference step."""
    heap = ctypes.CDLL(None)
    if counts:
        heap.heap_peak.restype = ctypes.c_long
    ddp = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(ddp.parameters())
    seen: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        scope = rankscope.watch(
            ddp, optimizer, run_dir=Path(folder) / "run", canary=False, announce=False
        )
        for number in range(2 * (WARM_UP + rounds)):
            verified = number % 2 == 1
            if verified:
                scope.verify()
            dist.barrier()
            if counts:
                heap.heap_peak()
            start = time.perf_counter()
            for micro in range(num_micro):
                last = micro == num_micro - 1
                with nullcontext() if last else ddp.no_sync():
                    (ddp(**make_batch(tokens))["loss"] / num_micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - start
            seen[verified].append((seconds, heap.heap_peak() if counts else 0))
        scope.close()
        run = rankscope.Run.open(Path(folder) / "run") if dist.get_rank() == 0 else None
        causes = {one.cause for one in run.findings()} if run is not None else set()
    assert dist.get_rank() or "verify.agrees" in causes, causes
    plain, again = (seen[verified][WARM_UP:] for verified in (False, True))
    ratios = [b[0] / a[0] for a, b in zip(plain, again, strict=True)]
    ratio, low, high = median_interval(ratios)
    return {
        "micro": num_micro,
        "ratio": ratio,
        "low": low,
        "high": high,
        "plain_seconds": median(one for one, _ in plain),
        "extra_bytes": median(peak for _, peak in again) - median(peak for _, peak in plain),
    }


def render(rows: list[dict[str, Any]], tokens: int = TOKENS) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        f"{num_parameters() / 1e6:.1f} M parameters ({4 * num_parameters() / 1e6:.0f} MB in "
        f"float32), AdamW, DDP on two ranks, {tokens} tokens a micro-batch:",
        "",
        "| micro-batches | other steps | a reference step takes | memory at its peak |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['micro']} | {1e3 * row['plain_seconds']:.0f} ms | {row['ratio']:.2f} times as "
        f"long ({row['low']:.2f} – {row['high']:.2f}) | {row['extra_bytes'] / 1e6:+.0f} MB |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--micro", type=int, nargs="+", default=MICRO_BATCHES)
    options = parser.parse_args()
    rows = run_cases(options.rounds, options.tokens, options.micro)
    Console(soft_wrap=True).print(render(rows, options.tokens), highlight=False)


if __name__ == "__main__":
    main()
