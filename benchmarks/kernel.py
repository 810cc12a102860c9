"""The kernels against what the memory gives: bytes of the gradient per second, as ratios.

On the CPU the reference is fp32 ``torch.dot`` of the same elements, on one thread, and seconds are
the thread's own; a kernel and the reference take turns. On CUDA the reference is a device-to-device
copy, with the bytes that it reads and those that it writes.

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

from rankscope.capture import GradientTotals
from rankscope.capture.kernels import Kernel, ParameterSigns, choose_kernel, period_signs
from rankscope.capture.kernels.plain import PlainKernel

Row = dict[str, Any]
Clock = Callable[[], float]
WIDTH = 4093
ELEMENTS = 16_000_000
ELEMENTS_CUDA = 256_000_000
PAIRS = 40
WARM_UP = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU_REFERENCE = "fp32 torch.dot, CPU, one thread"
CUDA_REFERENCE = "copy, bytes read + written, CUDA"


def run_kernels(pairs: int = PAIRS) -> list[Row]:
    """Return a row for each kernel and dtype: what, median, low, high, pairs.

    A row that cannot be measured here has no ``median``.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [row for kernel in _cpu_kernels() for row in _cpu_rows(kernel, pairs)]
    finally:
        torch.set_num_threads(threads)
    return [*rows, *_cuda_rows(pairs)]


def render(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "Bytes of the gradient per second, over those of the reference.",
        "",
        "| kernel | gradient | reference | median ratio | 95 % interval | pairs |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        what = f"| {row['kernel']} | {row['dtype']} | {row['reference']} "
        if "median" in row:
            interval = f"{row['low']:.2f} – {row['high']:.2f}"
            lines.append(what + f"| {row['median']:.2f} | {interval} | {row['pairs']} |")
        else:
            lines.append(what + "| not measured | – | – |")
    return "\n".join(lines)


def _cpu_kernels() -> list[Kernel]:
    device = torch.device("cpu")
    period = period_signs(0)
    plain, best = PlainKernel(device, WIDTH, period), choose_kernel(device, WIDTH, period)
    return [plain] if best.name == plain.name else [best, plain]


def _cpu_rows(kernel: Kernel, pairs: int) -> list[Row]:
    values = torch.randn(ELEMENTS)
    reference = partial(torch.dot, values, values)
    rows = []
    for dtype in DTYPES:
        gradient = values.to(dtype)
        work = _sketching(kernel, gradient)
        ratios = _ratios(work, reference, time.thread_time, pairs)
        scale = gradient.element_size() / values.element_size()
        rows.append(_row(kernel.name, dtype, CPU_REFERENCE, [scale * ratio for ratio in ratios]))
    return rows


def _cuda_rows(pairs: int) -> list[Row]:
    if not torch.cuda.is_available():
        return [_row("triton", dtype, CUDA_REFERENCE, []) for dtype in DTYPES]
    device = torch.device("cuda")
    kernel = choose_kernel(device, WIDTH, period_signs(0))
    rows = []
    for dtype in DTYPES:
        gradient = torch.randn(ELEMENTS_CUDA, device=device).to(dtype)
        copy = partial(torch.empty_like(gradient).copy_, gradient)
        ratios = _ratios(_sketching(kernel, gradient), copy, _synchronised, pairs)
        rows.append(_row(kernel.name, dtype, CUDA_REFERENCE, [ratio / 2 for ratio in ratios]))
    return rows


def _sketching(kernel: Kernel, gradient: Tensor) -> Callable[[], object]:
    signs = ParameterSigns("parameter", 0, gradient.device)
    totals = GradientTotals.zeros(1, WIDTH, gradient.device)
    return partial(kernel.measure, gradient, signs, 0, totals, 0)


def _ratios(
    work: Callable[[], object], reference: Callable[[], object], clock: Clock, pairs: int
) -> list[float]:
    """Return the reference's seconds over those of the work, pair by pair."""
    ratios = []
    for number in range(WARM_UP + pairs):
        start = clock()
        work()
        middle = clock()
        reference()
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
    options = parser.parse_args()
    Console().print(render(run_kernels(options.pairs)), markup=False)


if __name__ == "__main__":
    main()
