"""Bytes of a step on 8 to 10,240 workers, counted, and what it costs agents and root to handle it.

The messages are real: packed as a probe packs them, for a model of 40 groups, with sketches, audit
and 8 samples a worker; a healthy step, in which all workers hold the same reduced gradient and the
same digests. Hosts have 8 workers. Run ``OPENBLAS_NUM_THREADS=1 python benchmarks/scale.py``: an
agent has one thread.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rankscope.agent.assembly import Assembly, summarize
from rankscope.agent.frames import FrameKind, pack
from rankscope.agent.host_summary import (
    HostSummary,
    JoinedSummaries,
    as_columns,
    host_summary,
    summary_layout,
    with_directions,
)
from rankscope.agent.step_message import StepMessage, pack_values
from rankscope.bus.evidence import DType, Source, Table
from rankscope.bus.gradient_part import sizes_of
from rankscope.bus.messages import Layout
from rankscope.bus.step import MAX_PAIRED_WORKERS, GatheredStep
from rankscope.evidence import columns_of
from rankscope.stats.audit import AUDIT_WIDTH
from rankscope.stats.direction import narrowing_for

WORKERS = (8, 64, 1024, 10_240)
PER_HOST = 8
NUM_GROUPS = 40
BATCH = 8
NUM_DIGESTS = 8
LANE_BYTES = 32
"""Header of a packet between agents; one each step confirms what has arrived."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a step costs.

    Attributes:
        workers: W.
        worker_bytes: From a worker to the agent of its host.
        host_bytes: From another host to the root; 0 on one host.
        root_bytes: In and out of the root, between hosts.
        host_seconds: Processor time of an agent to make its part.
        root_seconds: Processor time of the root from bytes to the step's report.
        cosine_error: RMS error of a worker's cosine, from sketches.
    """

    workers: int
    worker_bytes: int
    host_bytes: int
    root_bytes: int
    host_seconds: float
    root_seconds: float
    cosine_error: float


def layout_for(num_workers: int) -> Layout:
    """Return what ``watch`` would send for a model of 40 groups of one section each."""
    return Layout(
        num_workers=num_workers,
        groups=tuple(f"layers.{group}" for group in range(NUM_GROUPS)),
        section_counts=(1,) * NUM_GROUPS,
        sketch_width=4093,
        group_width=251,
        audit_width=AUDIT_WIDTH,
        reduced_copies=num_workers,
    )


def make_messages(layout: Layout, ranks: Sequence[int], step: int) -> dict[int, StepMessage]:
    """Return messages with a value in every slot."""
    shared = np.random.default_rng(step)
    reduced_GK = shared.normal(size=(NUM_GROUPS, layout.audit_width))
    reduced_squares_G = np.square(reduced_GK).sum(axis=1)
    digests_D = shared.integers(2**62, size=NUM_DIGESTS)
    local = columns_of(Table.WORKERS, Source.LOCAL)
    messages = {}
    for rank in ranks:
        rng = np.random.default_rng((rank, step))
        values = {s.name: float(rng.uniform(1, 2)) for s in local if s.dtype is DType.FLOAT}
        values |= {s.name: float(rng.integers(2**31)) for s in local if s.dtype is DType.INT}
        local_GK = reduced_GK + 3 * rng.normal(size=reduced_GK.shape)
        sketches = {
            "total": rng.normal(size=layout.sketch_width) + 0.3,
            "local": local_GK,
            "reduced": reduced_GK,
        }
        sizes = {"squares": NUM_GROUPS, "reduced_squares": NUM_GROUPS, "micro": 1}
        sizes |= dict.fromkeys(("largest", "nonfinite", "carried"), 1)
        numbers = [*np.square(local_GK).sum(axis=1), *reduced_squares_G, rng.uniform(), 2, 0, 0]
        widths = {name: part.size for name, part in sketches.items()}
        messages[rank] = StepMessage(
            step=step,
            time=time.time(),
            items=7,
            slots=np.frombuffer(pack_values(values), np.int64),
            losses_U=rng.uniform(1, 2, BATCH),
            weights_U=rng.integers(100, 512, BATCH).astype(np.float64),
            units_M=np.array([BATCH]),
            multipliers_M=np.ones(1),
            samples_B=rng.integers(2**62, size=BATCH),
            digests_D=digests_D,
            unchanged_D=np.zeros(NUM_DIGESTS, np.uint8),
            numbers=np.array(numbers),
            sizes=np.array(sizes_of(sizes, widths, norm_estimated=False)),
            sketches=np.concatenate([s.ravel() for s in sketches.values()]).astype(np.float32),
        )
    return messages


def measure(num_workers: int, steps: int) -> Row:
    """Return the row of so many workers."""
    layout = layout_for(num_workers)
    num_hosts = num_workers // PER_HOST
    host_seconds, root_seconds = [], []
    for step in range(steps):
        # the values of 16 hosts stand for those of all
        hosts = [
            make_messages(layout, range(PER_HOST * host, PER_HOST * (host + 1)), step)
            for host in range(min(num_hosts, 16))
        ]
        start = time.process_time()
        contents = [summary_of(hosts[host % 16], host, layout) for host in range(num_hosts)]
        host_seconds.append((time.process_time() - start) / num_hosts)
        start = time.process_time()
        assert summarize(step_of(layout, contents)).observed
        root_seconds.append(time.process_time() - start)
    worker_bytes = len(pack(FrameKind.STEP, hosts[0][0].pack(), rank=0, step=0))
    away = num_workers // PER_HOST - 1
    single = [pack(FrameKind.STEP, each, rank=0, step=0) for each in contents[0]]
    host_bytes = sum(len(each) + LANE_BYTES for each in single) if away else 0
    width = 4093 if num_workers <= MAX_PAIRED_WORKERS else narrowing_for(num_workers).sketch_width
    return Row(
        workers=num_workers,
        worker_bytes=worker_bytes,
        host_bytes=host_bytes,
        root_bytes=away * (host_bytes + LANE_BYTES),
        host_seconds=min(host_seconds),
        root_seconds=min(root_seconds),
        cosine_error=width**-0.5,
    )


def summary_of(messages: dict[int, StepMessage], host: int, layout: Layout) -> list[bytes]:
    """Return what a host sends of a step, its ranks being the next eight."""
    if layout.num_workers <= MAX_PAIRED_WORKERS:
        return [message.pack() for message in messages.values()]
    ranks = range(PER_HOST * host, PER_HOST * (host + 1))
    return [host_summary(dict(zip(ranks, messages.values(), strict=True)), layout)]


def step_of(layout: Layout, contents: Sequence[Sequence[bytes]]) -> GatheredStep:
    """Do what the root does with what all hosts have sent."""
    if layout.num_workers <= MAX_PAIRED_WORKERS:
        messages = [StepMessage.unpack(each) for host in contents for each in host]
        return Assembly(layout, 0).step_of(as_columns(messages), 1)
    summaries = [HostSummary.unpack(content) for (content,) in contents]
    assembly = Assembly(summary_layout(layout), summaries[0].step)
    for one in summaries:
        assembly.add(one.ranks_w, one)
    [sent] = assembly.take(1)
    hosts = JoinedSummaries(sent)
    return with_directions(assembly.step_of(hosts.messages, 1), hosts, layout)


def render(rows: Sequence[Row]) -> str:
    """Return the table for the docs."""
    lines = [
        "| workers | kB a step: a worker | a host | root, in and out | agent (ms) | root (ms) "
        "| a cosine's RMS error |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.workers:,} | {row.worker_bytes / 1e3:,.1f} | {row.host_bytes / 1e3:,.1f} "
        f"| {row.root_bytes / 1e3:,.1f} | {1e3 * row.host_seconds:.2f} "
        f"| {1e3 * row.root_seconds:.2f} | {row.cosine_error:.3f} |"
        for row in rows
    ]
    lines += [
        "",
        f"Hosts of {PER_HOST} workers; {NUM_GROUPS} groups, the audit on, {BATCH} samples each. "
        "A worker's bytes stay on its host; those of the root are what travels between hosts. "
        f"Beyond {MAX_PAIRED_WORKERS} workers each host narrows sketches and sums its part of the "
        "audit. Times are processor time, the least of several steps, with one thread for linear "
        "algebra, as an agent has; those of the root run from the bytes of all hosts to the step's "
        "report, without detectors and record.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Count, print, and save when asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to save the rows")
    options = parser.parse_args()
    rows = [measure(num_workers, options.steps) for num_workers in WORKERS]
    print(render(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
