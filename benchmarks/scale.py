"""Bytes and time of a step on 8 to 1,024 workers, and a model of them for 10,240.

Every worker is a thread that runs the monitor's real exchange on a channel in memory, which counts
the bytes that the real channel moves. Time has two parts. What the workers compute is measured: the
least processor time of their threads, since a thousand threads disturb each other. The network is
modelled, from the messages that follow each other and the bytes that rank 0, the busiest worker,
moves. Training waits for neither.
"""

import argparse
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.core.consensus import SKETCH_WIDTH
from rankscope.core.signals import DType, Source, Table, signals
from rankscope.core.step import MeasuredGradient
from rankscope.core.summarize import summarize
from rankscope.diagnose.diagnosis import Diagnosis
from rankscope.reduce import (
    MAX_PAIRED,
    Layout,
    MemoryChannel,
    Traffic,
    WorkerStep,
    choose_gathering,
)

WORKERS = (8, 16, 32, 64, 65, 128, 256, 512, 1024)
EXTRAPOLATED = 10_240
NUM_GROUPS = 40
GROUP_WIDTH = 251
BATCH = 8


@dataclass(frozen=True, slots=True)
class Network:
    """What a message costs.

    Attributes:
        latency: Seconds from one worker to another, gloo's own handling included.
        bandwidth: Bytes per second and direction.
    """

    latency: float = 100e-6
    bandwidth: float = 1.25e9

    def seconds(self, messages: int, moved: Traffic) -> float:
        """Return the time of messages that follow each other."""
        return messages * self.latency + max(moved.sent, moved.received) / self.bandwidth


@dataclass(frozen=True, slots=True)
class Row:
    """What a step costs.

    Attributes:
        workers: W.
        worker_bytes: Sent plus received by the busiest worker but rank 0.
        root_bytes: Sent plus received by rank 0.
        worker_seconds: Processor time of a worker, from its message to the end of the exchange.
        root_seconds: The same of rank 0, with the verdict.
        messages: Messages that follow each other.
        network_seconds: Modelled.
        measured: Whether the step was run; else a model fitted to those that were.
    """

    workers: int
    worker_bytes: float
    root_bytes: float
    worker_seconds: float
    root_seconds: float
    messages: int
    network_seconds: float
    measured: bool = True

    @property
    def seconds(self) -> float:
        """Time from message to verdict."""
        return self.worker_seconds + self.network_seconds + self.root_seconds


def layout_for(num_workers: int) -> Layout:
    """Return what ``watch`` would send for a model of 40 groups."""
    return Layout(
        sketch_width=4093 if num_workers <= MAX_PAIRED else SKETCH_WIDTH,
        groups=tuple(f"layers.{group}" for group in range(NUM_GROUPS)),
        group_width=GROUP_WIDTH,
    )


def make_message(layout: Layout, rank: int, step: int) -> WorkerStep:
    """Return a message with a value in every slot."""
    rng = np.random.default_rng((rank, step))
    local = signals(Table.WORKERS, Source.LOCAL)
    values = {s.name: float(rng.uniform(1, 2)) for s in local if s.dtype is DType.FLOAT}
    values |= {s.name: float(rng.integers(2**31)) for s in local if s.dtype is DType.INT}
    gradient = MeasuredGradient(
        group_norms_G=rng.uniform(1, 2, NUM_GROUPS),
        sketch_K=rng.normal(size=layout.sketch_width).astype(np.float32),
        group_sketches_GK=rng.normal(size=(NUM_GROUPS, GROUP_WIDTH)).astype(np.float32),
        gram=np.empty(0),
    )
    return WorkerStep(
        step=step,
        values={**values, "samples_named": 1, "num_samples": BATCH},
        gradient=gradient,
        samples=rng.integers(2**62, size=BATCH),
        micro=rng.uniform(1, 2, (4, 1)),  # loss, weight, gradient norm, multiplier
    )


class Worker:
    """One simulated worker: exchanges steps, and judges them where it has them.

    Args:
        channel: Its channel.
        steps: How many steps to exchange.
    """

    def __init__(self, channel: MemoryChannel, steps: int) -> None:
        self.seconds: list[float] = []
        self.traffic = Traffic()
        self._channel = channel
        self._steps = steps

    def run(self) -> None:
        """Exchange all steps; rank 0 goes on to the verdict, as the others would among few."""
        layout = layout_for(self._channel.num_workers)
        gathering = choose_gathering(self._channel, layout)
        diagnosis = Diagnosis(self._channel.num_workers)
        for step in range(self._steps):
            message = make_message(layout, self._channel.rank, step)
            before, start = self._channel.traffic, time.thread_time()
            outcome = gathering.exchange(message, 1)
            if outcome.gathered is not None and self._channel.rank == 0:
                diagnosis.observe(summarize(outcome.gathered))
            self.seconds.append(time.thread_time() - start)
            after = self._channel.traffic
            self.traffic = Traffic(after.sent - before.sent, after.received - before.received)


def simulate(num_workers: int, steps: int, network: Network) -> Row:
    """Run a job and return its row."""
    channels = MemoryChannel.connect(num_workers, timeout_seconds=600.0)
    workers = [Worker(channel, steps) for channel in channels]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    root, others = workers[0], workers[1:]
    paired = num_workers <= MAX_PAIRED
    busiest = max(others, key=lambda worker: worker.traffic.total)
    messages = num_messages(num_workers)
    other_seconds = min(min(worker.seconds) for worker in others)
    return Row(
        workers=num_workers,
        worker_bytes=busiest.traffic.total,
        root_bytes=root.traffic.total,
        worker_seconds=0.0 if paired else other_seconds,
        root_seconds=min(root.seconds),
        messages=messages,
        network_seconds=network.seconds(messages, root.traffic),
    )


def num_messages(num_workers: int) -> int:
    """Return how many messages follow each other: a ring; or a barrier, two sums and a gather."""
    if num_workers <= MAX_PAIRED:
        return num_workers - 1
    return (1 + 2 * 2) * math.ceil(math.log2(num_workers)) + 1


def extrapolate(rows: Sequence[Row], num_workers: int, network: Network) -> Row:
    """Return the row of more workers than can be simulated.

    Bytes and seconds are fitted, by least squares over the rows beyond 64 workers, with a constant,
    a term in log2 W, and for rank 0 a term in W.
    """
    rows = [row for row in rows if row.workers > MAX_PAIRED]
    worker, root = [_one, math.log2], [_one, math.log2, float]
    root_bytes = _fitted(rows, "root_bytes", root, num_workers)
    messages = num_messages(num_workers)
    return Row(
        workers=num_workers,
        worker_bytes=_fitted(rows, "worker_bytes", worker, num_workers),
        root_bytes=root_bytes,
        worker_seconds=_fitted(rows, "worker_seconds", worker, num_workers),
        root_seconds=_fitted(rows, "root_seconds", root, num_workers),
        messages=messages,
        network_seconds=network.seconds(messages, Traffic(0, round(root_bytes))),
        measured=False,
    )


def _one(workers: float) -> float:
    return 1.0


def _fitted(
    rows: Sequence[Row], column: str, terms: Sequence[Callable[[float], float]], workers: int
) -> float:
    matrix = np.array([[term(row.workers) for term in terms] for row in rows])
    weights = 1 / np.array([getattr(row, column) for row in rows])  # relative errors count
    solution = np.linalg.lstsq(matrix * weights[:, None], np.ones(len(rows)), rcond=None)[0]
    return float(solution @ [term(workers) for term in terms])


def render(rows: Sequence[Row], network: Network) -> str:
    """Return the table for the docs."""
    lines = [
        "| workers | kB a step, a worker | kB a step, rank 0 | messages in turn "
        "| compute, a worker (ms) | compute, rank 0 (ms) | network (ms) | to the verdict (ms) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.workers:,}{'' if row.measured else ' (model)'} "
        f"| {row.worker_bytes / 1e3:,.1f} | {row.root_bytes / 1e3:,.1f} | {row.messages} "
        f"| {1e3 * row.worker_seconds:.2f} | {1e3 * row.root_seconds:.2f} "
        f"| {1e3 * row.network_seconds:.2f} | {1e3 * row.seconds:.2f} |"
        for row in rows
    ]
    lines += [
        "",
        f"Sent plus received, without headers; {NUM_GROUPS} groups of parameters, every step "
        f"observed. Up to {MAX_PAIRED} workers everybody gets every message and compares all "
        "pairs; beyond, sketches are summed, and rank 0 gets a short message from everybody. "
        f"Network: modelled with {network.latency * 1e6:.0f} µs a message and "
        f"{network.bandwidth / 1e9:.2f} GB/s.",
    ]
    return "\n".join(lines) + "\n"


def measure(steps: int, network: Network) -> list[Row]:
    """Return all rows, the extrapolated one last."""
    rows = [simulate(num_workers, steps, network) for num_workers in WORKERS]
    return [*rows, extrapolate(rows, EXTRAPOLATED, network)]


def main() -> None:
    """Simulate, print, and save when asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--latency-us", type=float, default=100.0)
    parser.add_argument("--json", type=Path, help="where to save the rows")
    options = parser.parse_args()
    network = Network(options.latency_us * 1e-6)
    rows = measure(options.steps, network)
    print(render(rows, network))
    if options.json is not None:
        saved: list[dict[str, Any]] = [asdict(row) for row in rows]
        options.json.write_text(json.dumps(saved, indent=2) + "\n")


if __name__ == "__main__":
    main()
