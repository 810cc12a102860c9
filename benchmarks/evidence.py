"""Exact evidence: how fast bits are digested, and what a step's digests cost in Python.

The reference for the digest is fp32 ``torch.dot`` over the very same bytes, on one thread, timed
by its own clock; several buffers take turns. The second part rotates through a model of 300
parameters, on the clock of the training thread, once as it is and once with digests that read
nothing.

Run ``python benchmarks/evidence.py``.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from harness import median_interval
from rich.console import Console
from torch import Tensor, nn

from rankscope.capture import state_meter, state_reading
from rankscope.capture.digest import PendingDigest
from rankscope.capture.kernels.bits import native_sum, plain_sum
from rankscope.capture.state_meter import StateMeter

Row = dict[str, Any]
Work = Callable[[], object]
ELEMENTS = 10_000_000
BUFFERS = 3
PAIRS = 40
WARM_UP = 4
LAYERS = 150  # of two parameters each
WIDTH = 64
STEPS = 256


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


def run_overhead(steps: int = STEPS) -> list[Row]:
    """Return a row with the milliseconds of a median step, for the whole and without reading."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = _milliseconds_of_steps(steps)
        with (
            mock.patch.object(state_meter, "digest_bits", _read_nothing),
            mock.patch.object(state_reading, "digest_bits", _read_nothing),
            mock.patch.object(state_reading.GradientNorms, "add", _read_nothing),
        ):
            bare = _milliseconds_of_steps(steps)
    finally:
        torch.set_num_threads(threads)
    return [
        {"what": "all of it", **whole},
        {"what": "without reading any tensor", **bare},
    ]


def render(digests: list[Row], overhead: list[Row]) -> str:
    """Return the rows as Markdown tables."""
    lines = [
        f"Digests of {ELEMENTS // 10**6} M elements on one thread.",
        "",
        "| digest | elements | GB/s | over fp32 torch.dot | 95 % interval | pairs |",
        "|---|---|---|---|---|---|",
    ]
    for row in digests:
        interval = f"{row['low']:.2f} – {row['high']:.2f}"
        lines.append(
            f"| {row['digest']} | {row['dtype']} | {row['speed']:.1f} | {row['median']:.2f} "
            f"| {interval} | {row['pairs']} |"
        )
    lines += [
        "",
        f"A step's digests, {2 * LAYERS} parameters of {WIDTH} × {WIDTH} and {WIDTH}, Adam, in "
        "milliseconds.",
        "",
        "| what | training thread | monitor's thread |",
        "|---|---|---|",
    ]
    lines += [
        f"| {row['what']} | {row['training']:.3f} | {row['monitor']:.3f} |" for row in overhead
    ]
    return "\n".join(lines)


def _read_nothing(*_: object) -> PendingDigest:
    return PendingDigest()


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


def _milliseconds_of_steps(steps: int) -> dict[str, float]:
    """Return what a median step costs, with every call that a training makes."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
    gradients = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    meter = StateMeter(model, optimizer, replicated=True)
    training, monitor = [], []
    for step in range(steps + WARM_UP):
        start = time.thread_time()
        meter.begin_step(step)
        for name, gradient in gradients:
            assert gradient is not None
            meter.see_local(name, gradient)
        meter.see_reduced()
        meter.see_applied()
        meter.see_state()
        pending = meter.collect()
        middle = time.thread_time()
        pending.read()
        training.append(1e3 * (middle - start))
        monitor.append(1e3 * (time.thread_time() - middle))
    return {
        "training": float(np.median(training[WARM_UP:])),
        "monitor": float(np.median(monitor[WARM_UP:])),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    tables = render(run_digests(options.pairs), run_overhead(options.steps))
    Console().print(tables, markup=False)


if __name__ == "__main__":
    main()
