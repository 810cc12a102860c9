"""``make bench``: ratios, each measured side by side in one run, as JSON and as Markdown.

Every part can be run alone, ``python benchmarks/bench.py --parts kernel,scale``; the page is
written from all results that were ever saved beside it, the latest of each part.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import agent_cost
import compiled
import detection
import gpu_page
import in_turns
import kernel
import launches
import memory
import probe_cost
import scale
import steps
import torch
from harness import num_parameters, run_ranks
from rich.console import Console

import evidence

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]
NOT_MEASURED = "not measured"
NAIVE_RANKS = (2, 4, 8)
_STEP_TIMES = ("ddp", "short", "options", "fsdp2")
WITH_EVIDENCE, WITHOUT_EVIDENCE = "sketch", "sketch without exact evidence"


def bench_ddp(options: argparse.Namespace) -> list[Row]:
    """Time DDP watched in the default way against DDP alone."""
    return steps.run_steps("DDP", ["sketch"], 2048, options.pairs)


def bench_short(options: argparse.Namespace) -> list[Row]:
    """Time shorter steps under DDP, where the same work weighs more."""
    return steps.run_steps("DDP", ["sketch", "scalars"], 512, options.more_pairs)


def bench_options(options: argparse.Namespace) -> list[Row]:
    """Time what is not the default under DDP."""
    variants = ["sketch, without the audit"]
    return steps.run_steps("DDP", variants, 2048, options.more_pairs)


def bench_fsdp2(options: argparse.Namespace) -> list[Row]:
    """Time FSDP2 watched in the default way against FSDP2 alone."""
    return steps.run_steps("FSDP2", ["sketch"], 2048, options.more_pairs)


def bench_turns(options: argparse.Namespace) -> list[Row]:
    """Measure what a training feels, in blocks of ten steps in turns."""
    return [{"markdown": in_turns.render(in_turns.run_all(options.blocks))}]


def bench_compiled(options: argparse.Namespace) -> list[Row]:
    """Count graphs of compiled models, and measure what such a training feels."""
    return [{"markdown": compiled.render(compiled.run_all(options.blocks))}]


def bench_probe(options: argparse.Namespace) -> list[Row]:
    """Time the monitor's work on the training's thread."""
    rows = probe_cost.run_all(list(probe_cost.MODELS), parts=False)
    return [{"markdown": probe_cost.render(rows)}]


def bench_launches(options: argparse.Namespace) -> list[Row]:
    """Count launches of the probe, with more and more parameter tensors."""
    return [{"markdown": launches.render(launches.measure())}]


def bench_agent(options: argparse.Namespace) -> list[Row]:
    """Measure the root agent's processor time a step."""
    return [{"markdown": agent_cost.render(agent_cost.run_all())}]


def bench_naive(options: argparse.Namespace) -> list[Row]:
    """Compare with gathering whole gradients: time added, and bytes."""
    rows: list[Row] = []
    for ranks in NAIVE_RANKS:
        pairs = max(10, 2 * options.more_pairs // ranks**2)
        naive, sketch = steps.run_steps("DDP", ["naive", "sketch"], 512, pairs, ranks)
        own = run_ranks(steps.measure_own_cost, ranks, "sketch", 512, pairs)
        rows.append(
            {
                "ranks": ranks,
                "pairs": pairs,
                "naive": naive,
                "sketch": sketch,
                "own_milliseconds": own["overhead_milliseconds"],
                "bytes_ratio": 8 * (ranks - 1) * num_parameters() / own["bytes_per_step"],
            }
        )
    return [*rows, {"ratio_1b": 4e9 / steps.bytes_of_a_message(num_groups=40)}]


def bench_memory(options: argparse.Namespace) -> list[Row]:
    """Count what torch and Python allocate, watched and not."""
    return memory.run_cases()


def bench_scale(options: argparse.Namespace) -> list[Row]:
    """Simulate many workers."""
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, scale.__file__, "--steps", "4"]
    done = subprocess.run(command, env=one_thread, check=True, stdout=subprocess.PIPE, text=True)
    return [{"markdown": done.stdout}]


def bench_kernel(options: argparse.Namespace) -> list[Row]:
    """Compare the kernels with what the memory gives."""
    return kernel.run_kernels()


def bench_detection(options: argparse.Namespace) -> list[Row]:
    """Simulate healthy and faulty jobs, and train some; it has a page of its own."""
    detection.main([])
    return [{"page": str(detection.PAGE.relative_to(ROOT))}]


def bench_evidence(options: argparse.Namespace) -> list[Row]:
    """Time steps with and without exact evidence, and what it is made of."""
    both = [WITH_EVIDENCE, WITHOUT_EVIDENCE]
    pairs = options.more_pairs
    own = [run_ranks(steps.measure_own_cost, 2, variant, 2048, pairs, True) for variant in both]
    return [
        {
            "steps": steps.run_steps("DDP", both, 2048, pairs),
            "own": own,
            "markdown": evidence.render(evidence.run_digests()),
        }
    ]


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "ddp": bench_ddp,
    "short": bench_short,
    "options": bench_options,
    "fsdp2": bench_fsdp2,
    "evidence": bench_evidence,
    "turns": bench_turns,
    "compiled": bench_compiled,
    "probe": bench_probe,
    "launches": bench_launches,
    "agent": bench_agent,
    "naive": bench_naive,
    "kernel": bench_kernel,
    "memory": bench_memory,
    "scale": bench_scale,
    "detection": bench_detection,
}


def main() -> None:
    """Measure, print, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300, help="for the first row")
    parser.add_argument("--more-pairs", type=int, default=300, help="for all other step times")
    parser.add_argument("--blocks", type=int, default=24, help="of ten steps, in turns")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "performance.md")
    options = parser.parse_args()
    file = options.output.with_suffix(".json")
    results = json.loads(file.read_text()) if file.exists() else {}
    for part in options.parts.split(","):
        results[part] = PARTS[part](options)
        file.write_text(json.dumps(results, indent=2) + "\n")
        options.output.write_text(render(results), encoding="utf-8")
    Console().print(render(results), markup=False)


UNMEASURED: dict[str, tuple[str, tuple[str, ...]]] = {
    "probe": (
        "| model | step | added per step and rank | reads of the gradient at memory speed |",
        (
            "2 layers",
            "24 layers, 300 parameter tensors",
            "8.7 M parameters, 6 layers",
        ),
    ),
    "agent": (
        "| agent | CPU time per step |",
        ("root, W = 8", "root, W = 64", "of another host, W = 8"),
    ),
    "turns": (
        "| step | agent on its own core | without pinning |",
        ("16 ms", "70 ms", "439 ms"),
    ),
    "compiled": (
        "| way | graphs, compilations, breaks: unwatched | watched | step, ms "
        "| watched / unwatched | added wall, ms | added CPU, a rank, ms |",
        tuple(compiled.WAYS),
    ),
    "launches": ("| parameter tensors | launches and copies per step |", ("10", "100", "1,000")),
    "hosts": (
        "| two hosts, 2 ranks each | the record |",
        ("link whole", "link cut for 20 s", "link cut for good"),
    ),
    "killed": ("| what | handed-over steps that were lost |", ("20 × `kill -9` of everything",)),
    "start": ("| what | seconds |", ("`watch` returns after", "the agent reads after")),
    "resident": (
        "| resident memory | step 1,000 | step 10,000 | step 100,000 |",
        ("training process", "agent, W = 8"),
    ),
}
"""Heads and rows of tables that other programs measure; a part's row holds its ``markdown``."""


def render(results: dict[str, list[Row]]) -> str:
    """Return the page ``docs/performance.md``."""
    given = partial(_given, results)
    parts = [
        "# Performance",
        "Measured by `make bench`. A ratio is the median of pairs that ran in turns, with the 95 % "
        "interval of that median.",
        f"torch {torch.__version__}, {platform.machine()}, one thread per rank, 2 ranks over gloo, "
        f"{num_parameters() / 1e6:.1f} M parameters, every step observed, unless stated. "
        "[Accelerators](#on-an-accelerator) are at the end.",
        "## Added CPU time of the training process",
        "CPU time of the monitor on the training's thread, with default settings "
        "(`python benchmarks/probe_cost.py`).",
        given("probe"),
        "## The agent's CPU time",
        "Statistics, detectors and record of a step (`python benchmarks/agent_cost.py`).",
        given("agent"),
        "## Step time, watched / unwatched",
        "Blocks of ten steps in turns, default settings (`python benchmarks/in_turns.py`).",
        given("turns"),
        "Other settings:",
        _table([row for part in _STEP_TIMES for row in results.get(part, [])]),
        "## Compiled models",
        "`torch.compile` around DDP (`python benchmarks/compiled.py`).",
        given("compiled"),
        "## Launches",
        "Kernels, torch operations that would be one, and copies between host and device, "
        "counted on the CPU (`python benchmarks/launches.py`).",
        given("launches"),
        "## Bytes",
        *([row["markdown"].strip() for row in results.get("scale", [])] or [NOT_MEASURED]),
        "## Two hosts",
        "`torchrun` across two network namespaces. Only the agents' link is cut.",
        given("hosts"),
        "## After a kill",
        given("killed"),
        "## Start",
        "Steps wait in the agent's socket while it starts.",
        given("start"),
        "## Memory",
        given("resident"),
        "A step takes in addition:",
        memory.render(results["memory"]) if "memory" in results else NOT_MEASURED,
        "## Exact evidence",
        _evidence(results.get("evidence", [])),
        "## Against gathering whole gradients",
        _naive(results.get("naive", [])),
        "## The kernel",
        kernel.render(results.get("kernel", [])),
        "The row of operations alone bounds what plain torch can reach.",
    ]
    return gpu_page.put_into("\n\n".join(parts), results)


def _given(results: dict[str, list[Row]], part: str) -> str:
    """Return the table of a part; rows that say so where it was not measured."""
    if part in results:
        return "\n\n".join(row["markdown"] for row in results[part])
    head, names = UNMEASURED[part]
    columns = head.count("|") - 1
    rows = [f"| {name} |{f' {NOT_MEASURED} |' * (columns - 1)}" for name in names]
    return "\n".join([head, "|" + "---|" * columns, *rows])


def _table(rows: list[Row]) -> str:
    if not rows:
        return NOT_MEASURED
    lines = ["| what | median ratio | 95 % interval | pairs |", "|---|---|---|---|"]
    lines += [
        f"| {row['what']} | {row['median']:.3f} | {row['low']:.3f} – {row['high']:.3f} "
        f"| {row['pairs']} |"
        for row in rows
    ]
    return "\n".join(lines)


def _evidence(rows: list[Row]) -> str:
    if not rows:
        return NOT_MEASURED
    (row,) = rows
    whole, without = row["own"]
    added = whole["overhead_milliseconds"] - without["overhead_milliseconds"]
    share = added / whole["step_milliseconds"]
    return "\n\n".join(
        [
            "The default (digests, random generators, precision, settings) and "
            "`watch(evidence=False)`, both over an unwatched step.",
            _table(row["steps"]),
            f"By the monitor's clock, on the training thread: "
            f"{whole['overhead_milliseconds']:.2f} ms a step with it and "
            f"{without['overhead_milliseconds']:.2f} ms without, in steps of "
            f"{whole['step_milliseconds']:.0f} ms: **{100 * share:.2f} %** of the step.",
            row["markdown"],
        ]
    )


def _naive(rows: list[Row]) -> str:
    if not rows:
        return NOT_MEASURED
    *measured, counted = rows
    lines = [
        "A step of 512 tokens that gathers the whole gradients of all ranks, against one that is "
        "watched. Added time by pairs of one run; for the monitor also by its own clock, because "
        "a few milliseconds are below the noise of the pairs.",
        "",
        "| ranks | pairs | gathering: ratio | gathering adds | watching: ratio | watching adds "
        "| its own clock | times less by its clock | times fewer bytes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in measured:
        naive, sketch, own = row["naive"], row["sketch"], row["own_milliseconds"]
        lines.append(
            f"| {row['ranks']} | {row['pairs']} | {_ratio(naive)} "
            f"| {naive['added_milliseconds']:.0f} ms | {_ratio(sketch)} "
            f"| {sketch['added_milliseconds']:.0f} ms | {own:.1f} ms "
            f"| {naive['added_milliseconds'] / own:.0f} | {row['bytes_ratio']:,.0f} |"
        )
    lines += [
        "",
        f"With 1 B parameters in 40 groups (counted): {counted['ratio_1b']:,.0f} times fewer bytes "
        "than one whole fp32 gradient per worker.",
    ]
    return "\n".join(lines)


def _ratio(row: Row) -> str:
    return f"{row['median']:.3f} ({row['low']:.3f} – {row['high']:.3f})"


if __name__ == "__main__":
    main()
