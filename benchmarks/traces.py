"""What tracing costs rank 0, next to the training step that it traces.

Both are timed in turns on the clock of the training thread, on one thread, so that other load on
the machine counts little. The reference of the second column is fp32 ``torch.dot`` over as many
elements as are read. The wall time of whole steps is in ``benchmarks/steps.py``.

Run ``python benchmarks/traces.py``.
"""

import argparse
import time
from typing import Any

import torch
from harness import WARM_UP, Model, make_batch, median_interval
from rich.console import Console

from rankscope.bus.probe import StepEnd
from rankscope.evidence.state.trace import TraceMeter

Row = dict[str, Any]


def run_traces(tokens: int, rounds: int) -> Row:
    """Return the ratio of a traced step over a plain one, with its bounds, and milliseconds."""
    torch.set_num_threads(1)
    model, batch = Model(), make_batch(tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trained = dict(model.named_parameters())
    meter = TraceMeter(
        model, trained, torch.device("cpu"), optimizer, every=1, leave_out=lambda seconds: None
    )
    flat = torch.randn(sum(parameter.numel() for parameter in model.parameters()))
    plain, traced, dots, monitor = [], [], [], []
    for step in range(WARM_UP + rounds):
        meter.begin_step(step, paused=False)
        begin = time.thread_time()
        model(**batch)["loss"].backward()
        reduced = time.thread_time()
        meter.see_reduced()
        update = time.thread_time()
        optimizer.step()
        collect = time.thread_time()
        pending = meter.collect(StepEnd(step, comparable=True, idle=frozenset(), num_passes=1))
        end = time.thread_time()
        optimizer.zero_grad()
        assert pending is not None
        dotting = time.thread_time()
        torch.dot(flat, flat)
        reading = time.thread_time()
        pending.read()
        plain.append((reduced - begin) + (collect - update))
        traced.append((update - reduced) + (end - collect))
        dots.append(2 * (reading - dotting))
        monitor.append(time.thread_time() - reading)
    plain, traced, dots = plain[WARM_UP:], traced[WARM_UP:], dots[WARM_UP:]
    median, low, high = median_interval(
        [1 + a / b for a, b in zip(traced, plain, strict=True)],
    )
    return {
        "what": f"a traced step over a plain one, {tokens:,} tokens",
        "median": median,
        "low": low,
        "high": high,
        "pairs": rounds,
        "plain_milliseconds": 1e3 * median_interval(plain)[0],
        "traced_milliseconds": 1e3 * median_interval(traced)[0],
        "dots": median_interval([a / b for a, b in zip(traced, dots, strict=True)])[0],
        "monitor_milliseconds": 1e3 * median_interval(monitor[WARM_UP:])[0],
    }


def render(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| step | ratio | 95 % interval | plain, ms | traces, ms | over dot | monitor, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['what']} | {row['median']:.2f} | {row['low']:.2f} – {row['high']:.2f} "
        f"| {row['plain_milliseconds']:.0f} | {row['traced_milliseconds']:.1f} "
        f"| {row['dots']:.1f} | {row['monitor_milliseconds']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    rows = [run_traces(int(tokens), options.rounds) for tokens in options.tokens.split(",")]
    Console(width=200).print(render(rows), markup=False)


if __name__ == "__main__":
    main()
