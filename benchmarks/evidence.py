"""Exact evidence: how fast bits are digested.

The reference is fp32 ``torch.dot`` over the very same bytes, on one thread, timed by its own clock;
several buffers take turns.

Run ``python benchmarks/evidence.py``.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import median_interval
from rich.console import Console
from torch import Tensor

from rankscope.gradients.kernels.bits import native_sum, plain_sum

Row = dict[str, Any]
Work = Callable[[], object]
ELEMENTS = 10_000_000
BUFFERS = 3
PAIRS = 40
WARM_UP = 4


def run_digests(pairs: int = PAIRS) -> list[Row]:
    """Return a row for each way and dtype: GB/s, and the median ratio over dot with its bounds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _digest_row(name, dtype, digest, pairs)
            for dtype in (torch.float32, torch.bfloat16)
            for name, digest in _ways().items()
        ]
    finally:
        torch.set_num_threads(threads)


def render(digests: list[Row]) -> str:
    """Return the rows as Markdown tables."""
    types = list(dict.fromkeys(row["dtype"] for row in digests))
    lines = [
        f"Digests of {ELEMENTS // 10**6} M elements on one thread: GB/s, and the ratio to fp32 "
        "torch.dot.",
        "",
        f"| digest | {' | '.join(types)} |",
        "|---" * (1 + len(types)) + "|",
    ]
    cells = {(row["digest"], row["dtype"]): _cell(row) for row in digests}
    lines += [
        f"| {name} | {' | '.join(cells[name, each] for each in types)} |"
        for name in dict.fromkeys(row["digest"] for row in digests)
    ]
    return "\n".join(lines)


def _cell(row: Row) -> str:
    return f"{row['speed']:.1f}, {row['median']:.2f} ({row['low']:.2f} – {row['high']:.2f})"


def _ways() -> dict[str, Callable[[Tensor], object]]:
    native = native_sum()
    ways: dict[str, Callable[[Tensor], object]] = {}
    if native is not None:
        ways["native"] = lambda tensor: native.at(tensor.data_ptr(), tensor.nbytes)
    ways["torch"] = lambda tensor: plain_sum([tensor], tensor.device)
    return ways


def _digest_row(
    name: str, dtype: torch.dtype, digest: Callable[[Tensor], object], pairs: int
) -> Row:
    buffers = [torch.randn(ELEMENTS).to(dtype) for _ in range(BUFFERS)]
    works: list[tuple[Work, Work]] = []
    for buffer in buffers:
        view = buffer.view(torch.float32)
        works.append((partial(digest, buffer), partial(torch.dot, view, view)))
    ratios, seconds = [], []
    for number in range(WARM_UP + pairs):
        work, reference = works[number % BUFFERS]
        start = time.thread_time()
        work()
        middle = time.thread_time()
        reference()
        end = time.thread_time()
        if number >= WARM_UP:
            seconds.append(middle - start)
            ratios.append((end - middle) / (middle - start))
    median, low, high = median_interval(ratios)
    return {
        "what": f"{name} digest, {str(dtype).removeprefix('torch.')}, / fp32 torch.dot",
        "digest": name,
        "dtype": str(dtype).removeprefix("torch."),
        "speed": buffers[0].nbytes / 1e9 / float(np.median(seconds)),
        "median": median,
        "low": low,
        "high": high,
        "pairs": pairs,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    options = parser.parse_args()
    tables = render(run_digests(options.pairs))
    Console().print(tables, markup=False)


if __name__ == "__main__":
    main()
