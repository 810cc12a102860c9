"""The kernels against what the memory gives: bytes of the gradient per second, as ratios.

On the CPU the reference is fp32 ``torch.dot`` over the very same bytes, since pages of memory
differ in speed by more than kernels do; several buffers take turns. Both run on one thread and
are timed by its own clock. On CUDA the reference is a device-to-device copy, with the bytes that
it reads and those that it writes.

Run ``python benchmarks/kernel.py``, or ``make bench``.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import median_interval
from rich.console import Console
from torch import Tensor

from rankscope.gradients.kernels import choose_kernel
from rankscope.gradients.kernels.interface import Kernel, ParameterSigns, period_signs
from rankscope.gradients.kernels.plain import PlainKernel
from rankscope.gradients.totals import GradientTotals

Row = dict[str, Any]
Clock = Callable[[], float]
Work = Callable[[], object]
WIDTH = 4093
BYTES = 64_000_000  # twice what a large cache holds
BUFFERS = 4
BYTES_CUDA = 1_024_000_000
PAIRS = 40
WARM_UP = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPERATIONS = "torch, signs + rows + dot alone"
CPU_REFERENCE = "fp32 torch.dot, CPU, one thread"
CUDA_REFERENCE = "copy, bytes read + written, CUDA"


def run_kernels(pairs: int = PAIRS, num_bytes: int = BYTES) -> list[Row]:
    """Return a row for each kernel and dtype: what, median, low, high, pairs.

    A row that cannot be measured here has no ``median``.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        works: list[tuple[str, Callable[[Tensor], Work]]] = [
            *((kernel.name, partial(_sketching, kernel)) for kernel in _cpu_kernels()),
            (OPERATIONS, _operations_alone),
        ]
        rows = [row for name, make in works for row in _cpu_rows(name, make, pairs, num_bytes)]
    finally:
        torch.set_num_threads(threads)
    return [*rows, *_cuda_rows(pairs)]


def render(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    types = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    cells = {(row["kernel"], row["dtype"]): _cell(row) for row in rows}
    kernels = dict.fromkeys(row["kernel"] for row in rows)
    pairs = max((row["pairs"] for row in rows if "median" in row), default=0)
    lines = [
        f"Bytes of the gradient per second, over those of a reference ({CPU_REFERENCE}; for "
        f"triton, {CUDA_REFERENCE}): median ratio and 95 % interval of {pairs} pairs.",
        "",
        f"| kernel | {' | '.join(types)} |",
        "|---" * (1 + len(types)) + "|",
    ]
    lines += [
        f"| {kernel} | {' | '.join(cells[kernel, each] for each in types)} |" for kernel in kernels
    ]
    return "\n".join(lines)


def _cell(row: Row) -> str:
    if "median" not in row:
        return "not measured"
    return f"{row['median']:.2f} ({row['low']:.2f} – {row['high']:.2f})"


def _cpu_kernels() -> list[Kernel]:
    device = torch.device("cpu")
    period = period_signs(0)
    plain, best = PlainKernel(device, WIDTH, period), choose_kernel(device, WIDTH, period)
    return [plain] if best.name == plain.name else [best, plain]


def _cpu_rows(name: str, make: Callable[[Tensor], Work], pairs: int, num_bytes: int) -> list[Row]:
    rows = []
    for dtype in DTYPES:
        buffers = [torch.randn(num_bytes // dtype.itemsize).to(dtype) for _ in range(BUFFERS)]
        views = [buffer.view(torch.float32) for buffer in buffers]
        ratios = _ratios(
            [make(buffer) for buffer in buffers],
            [partial(torch.dot, view, view) for view in views],
            time.thread_time,
            pairs,
        )
        rows.append(_row(name, dtype, CPU_REFERENCE, ratios))
    return rows


def _cuda_rows(pairs: int) -> list[Row]:
    if not torch.cuda.is_available():
        return [_row("triton", dtype, CUDA_REFERENCE, []) for dtype in DTYPES]
    device = torch.device("cuda")
    kernel = choose_kernel(device, WIDTH, period_signs(0))
    rows = []
    for dtype in DTYPES:
        gradient = torch.randn(BYTES_CUDA // dtype.itemsize, device=device).to(dtype)
        copy = partial(torch.empty_like(gradient).copy_, gradient)
        ratios = _ratios([_sketching(kernel, gradient)], [copy], _synchronised, pairs)
        rows.append(_row(kernel.name, dtype, CUDA_REFERENCE, [ratio / 2 for ratio in ratios]))
    return rows


def _sketching(kernel: Kernel, gradient: Tensor) -> Work:
    signs = ParameterSigns("parameter", 0, gradient.device)
    totals = GradientTotals.zeros(1, WIDTH, gradient.device)
    return partial(kernel.measure, gradient, signs, 0, totals, 0)


def _operations_alone(gradient: Tensor) -> Work:
    """Return what no kernel in plain torch can do without, chunk by chunk in cache, and no more.

    Signs element by element, the sum of rows with a sign each, and the squared norm; neither the
    largest magnitude, nor non-finite values, nor the edges of parameters.
    """
    size = 64 * WIDTH
    scratch, signs, rows, sketch = (
        torch.ones(length) for length in (size, size, size // WIDTH, WIDTH)
    )

    def work() -> None:
        for first in range(0, len(gradient) - size, size):
            chunk = gradient[first : first + size]
            if chunk.dtype == torch.float32:
                torch.mul(chunk, signs, out=scratch)
            else:
                scratch.copy_(chunk).mul_(signs)
            sketch.addmv_(scratch.view(-1, WIDTH).t(), rows)
            torch.dot(scratch, scratch)

    return work


def _ratios(works: list[Work], references: list[Work], clock: Clock, pairs: int) -> list[float]:
    """Return the references' seconds over those of the work, pair by pair."""
    ratios = []
    for number in range(WARM_UP + pairs):
        start = clock()
        works[number % len(works)]()
        middle = clock()
        references[number % len(references)]()
        end = clock()
        if number >= WARM_UP:
            ratios.append((end - middle) / (middle - start))
    return ratios


def _synchronised() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _row(kernel: str, dtype: torch.dtype, reference: str, ratios: list[float]) -> Row:
    row: Row = {
        "what": f"{kernel} kernel, {str(dtype).removeprefix('torch.')}, / {reference}",
        "kernel": kernel,
        "dtype": str(dtype).removeprefix("torch."),
        "reference": reference,
    }
    if ratios:
        median, low, high = median_interval(ratios)
        row.update(median=median, low=low, high=high, pairs=len(ratios))
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--bytes", type=int, default=BYTES, help="of a gradient on the host")
    options = parser.parse_args()
    Console().print(render(run_kernels(options.pairs, options.bytes)), markup=False)


if __name__ == "__main__":
    main()
