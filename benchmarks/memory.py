"""Extra memory, exactly: what the process has been given by malloc, watched and unwatched.

Run ``python benchmarks/memory.py``; it needs glibc and a C compiler. A few lines of C
(``heap.c``) stand before ``malloc`` and ``free`` of every library, and count the bytes that all
threads hold: torch's, gloo's, numpy's, Arrow's and Python's, which is told to use malloc for the
smallest object. What counts is the peak inside a step, forward, backward and optimizer included.
The size of the process as a whole cannot tell: it moves by tens of megabytes from one run to the
next.
"""

import argparse
import ctypes
import gc
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from harness import BLOCKS, Model, Step, num_parameters, run_ranks
from steps import make_ddp_step, make_fsdp2_step

from rankscope.bus.groups import group_parameters
from rankscope.gradients.sketch import DEFAULT_WIDTH

WARM_UP, STEPS = 6, 10  # buckets are rebuilt after the first step
TURNS = ("plain", "sketch", "sketch", "plain")  # what grows by itself counts for both alike
TOKENS = 512
CASES = (("DDP", BLOCKS), ("DDP", 16), ("FSDP2", BLOCKS))
_SOURCE = Path(__file__).with_name("heap.c")
_BUCKET_BYTES = 25 * 2**20  # what DDP fills a bucket to, as far as parameters are not larger


def run_cases(
    cases: int = len(CASES), ranks: int = 2, steps: int = STEPS, tokens: int = TOKENS
) -> list[dict[str, Any]]:
    """Return a row of the table for each case, in the tier ``sketch``; none without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "heap.so")
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", library, str(_SOURCE)], check=True
        )
        counted = {
            "LD_PRELOAD": library, "PYTHONMALLOC": "malloc", "ARROW_DEFAULT_MEMORY_POOL": "system"
        }  # fmt: skip
        with mock.patch.dict(os.environ, counted):
            return [run_case(*case, ranks, steps=steps, tokens=tokens) for case in CASES[:cases]]


def run_case(
    kind: str, blocks: int, ranks: int, *, steps: int = STEPS, tokens: int = TOKENS
) -> dict[str, Any]:
    """Measure one way of going data parallel, watched and not."""
    work = (measure_in_turns, ranks, kind, blocks, steps, tokens)
    seen: dict[str, dict[str, list[int]]] = run_ranks(*work)
    plain, watched = seen["plain"], seen["sketch"]
    return {
        "what": f"{kind}, sketch, {num_parameters(blocks) / 1e6:.1f} M parameters",
        "peak_extra_bytes": median(watched["peak"]) - median(plain["peak"]),
        "held_extra_bytes": median(watched["held"]) - median(plain["held"]),
        "sketch_bytes": sketch_bytes(blocks),
        "bucket_bytes": bucket_bytes(kind, blocks),
        "plain_peak_bytes": median(plain["peak"]),
        "plain_peak_range": [min(plain["peak"]), max(plain["peak"])],
    }


def measure_in_turns(
    kind: str, blocks: int, steps: int, tokens: int
) -> dict[str, dict[str, list[int]]]:
    """Return the bytes that this process holds at the peak of each step, and after it."""
    heap = ctypes.CDLL(None)
    heap.heap_peak.restype = heap.heap_held.restype = ctypes.c_long
    _watch_something_small(kind)
    seen: dict[str, dict[str, list[int]]] = {variant: {"peak": [], "held": []} for variant in TURNS}
    for variant in TURNS:
        gc.collect()
        with ExitStack() as stack:
            step = _make(kind, variant, tokens, stack, blocks)
            for _ in range(WARM_UP):
                step()
            gc.collect()
            for _ in range(steps):
                heap.heap_peak()
                step()
                seen[variant]["peak"].append(heap.heap_peak())
                seen[variant]["held"].append(heap.heap_held())
    return seen


def sketch_bytes(blocks: int) -> int:
    """Return the size of the sketches of all groups, in float32."""
    groups = group_parameters({name: None for name, _ in Model(blocks=blocks).named_parameters()})
    return 4 * DEFAULT_WIDTH * len(groups)


def bucket_bytes(kind: str, blocks: int) -> int:
    """Return the size of what is reduced at once: a bucket of DDP, the largest module of FSDP2."""
    if kind == "DDP":
        return min(_BUCKET_BYTES, 4 * num_parameters(blocks))
    model = Model(blocks=blocks)
    modules = [*model.blocks, torch.nn.ModuleList([model.embedding, model.head])]
    sizes: list[int] = [sum(p.numel() for p in module.parameters()) for module in modules]
    return 4 * max(sizes)


def _make(kind: str, variant: str, tokens: int, stack: ExitStack, blocks: int) -> Step:
    make = make_ddp_step if kind == "DDP" else make_fsdp2_step
    return make(variant, tokens, stack, Model(blocks=blocks))


def _watch_something_small(kind: str) -> None:
    """Load what watching loads and keeps, whatever the model."""
    with ExitStack() as stack:
        step = _make(kind, "sketch", 4, stack, 0)
        for _ in range(WARM_UP):
            step()


def render(rows: list[dict[str, Any]], steps: int = STEPS, tokens: int = TOKENS) -> str:
    """Return the table and what it says, in Markdown."""
    lines = [
        "| watched − unwatched | peak of a step | held between steps | sketches | a bucket "
        "| unwatched peak |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['what']} | {_mb(row['peak_extra_bytes'])} | {_mb(row['held_extra_bytes'])} "
        f"| {_mb(row['sketch_bytes'])} | {_mb(row['bucket_bytes'])} "
        f"| {_mb(row['plain_peak_bytes'])} "
        f"({' – '.join(f'{bytes_ / 1e6:.1f}' for bytes_ in row['plain_peak_range'])}) |"
        for row in rows
    ]
    lines += [
        "",
        "`python benchmarks/bench.py --parts memory`: all that malloc has given to rank 0, by all "
        f"threads and libraries; medians over {2 * steps} steps of {tokens} tokens each, after "
        f"{WARM_UP} others, unwatched before and after watched. In brackets the least and the most "
        "of the unwatched steps. A bucket is what is reduced at once.",
    ]
    return "\n".join(lines)


def _mb(count: float) -> str:
    return f"{count / 1e6:.2f} MB"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first ones")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    rows = run_cases(options.cases, options.ranks, options.steps, options.tokens)
    print(json.dumps(rows, indent=2))
    print(render(rows, options.steps, options.tokens))


if __name__ == "__main__":
    main()
