"""Extra memory, exactly: what torch's allocator and Python hand out, watched and unwatched.

Run ``python benchmarks/memory.py``. The profiler records every allocation and every free of torch's
CPU allocator on the training thread, from before the model is made; what counts is the peak of
their running sum in later steps, forward, backward and optimizer included. What Python and numpy
hold is traced in other steps, since the profiler would show in it. The memory of the process as a
whole cannot tell: it moves by tens of megabytes from one run to the next.
"""

import argparse
import gc
import json
import tempfile
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from harness import BLOCKS, Model, Step, num_parameters, run_ranks
from steps import make_ddp_step, make_fsdp2_step
from torch.profiler import ProfilerActivity, profile, record_function

from rankscope.capture.sketch import DEFAULT_WIDTH
from rankscope.core.groups import group_parameters

WARM_UP, STEPS = 3, 2  # buckets are rebuilt after the first step
CASES = (("DDP", BLOCKS), ("DDP", 16), ("FSDP2", BLOCKS))
_MEASURED = "measured steps"
_NOT_SEEN = (
    "Of FSDP2, torch's part is not measured: a reduced buffer may be freed by gloo's own thread, "
    "which the profiler does not see, so that the sums move by whole buffers."
)
_BUCKET_BYTES = 25 * 2**20  # what DDP fills a bucket to, as far as parameters are not larger


def run_cases() -> list[dict[str, Any]]:
    """Return a row of the table for each case, in the tier ``sketch``."""
    return [run_case(kind, blocks) for kind, blocks in CASES]


def run_case(kind: str, blocks: int, tokens: int = 512, ranks: int = 2) -> dict[str, Any]:
    """Measure one way of going data parallel, watched and not."""
    plain, watched = run_ranks(measure_both, ranks, kind, tokens, blocks)
    extra = {f"{name}_extra_bytes": watched[name] - plain[name] for name in plain}
    if kind == "FSDP2":  # see _NOT_SEEN
        extra |= {"torch_peak_extra_bytes": None, "torch_held_extra_bytes": None}
    return {
        "what": f"{kind}, sketch, {num_parameters(blocks) / 1e6:.1f} M parameters",
        "plain_peak_bytes": None if kind == "FSDP2" else plain["torch_peak"],
        **extra,
        "sketch_bytes": sketch_bytes(blocks),
        "bucket_bytes": bucket_bytes(kind, blocks),
    }


def measure_both(kind: str, tokens: int, blocks: int) -> list[dict[str, int]]:
    """Measure unwatched and watched steps in one process, one after the other."""
    _watch_something_small(kind)
    results = []
    for variant in ("plain", "sketch"):
        result = measure_torch(kind, variant, tokens, blocks)
        gc.collect()
        results.append({**result, **measure_python(kind, variant, tokens, blocks)})
        gc.collect()
    return results


def measure_torch(kind: str, variant: str, tokens: int, blocks: int) -> dict[str, int]:
    """Return the bytes that torch has handed out: at the peak of later steps, and after them."""
    with ExitStack() as stack:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step = _make(kind, variant, tokens, stack, blocks)
            for _ in range(WARM_UP):
                step()
            with record_function(_MEASURED):
                for _ in range(STEPS):
                    step()
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(f"{folder}/trace.json")
            return running_sums(json.loads(Path(f"{folder}/trace.json").read_text()))


def running_sums(trace: dict[str, Any]) -> dict[str, int]:
    """Return peak and end of the running sum of what was allocated and freed in measured steps.

    Args:
        trace: A profile with memory, as the profiler saves it.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") in ("i", "X")]
    (measured,) = [event for event in events if event["name"] == _MEASURED]
    start, end = measured["ts"], measured["ts"] + measured["dur"]
    changes = sorted(
        (event for event in events if event["name"] == "[memory]" and event["ts"] <= end),
        key=lambda event: event["ts"],
    )
    sizes: dict[int, int] = {}  # what was there before all this does not count when it is freed
    held = peak = 0
    for event in changes:
        if event["ts"] >= start:
            peak = max(peak, held)
        count, address = event["args"]["Bytes"], event["args"]["Addr"]
        if count > 0:
            held += count - sizes.get(address, 0)  # freed on another thread, if it was there
            sizes[address] = count
        else:
            held -= sizes.pop(address, 0)
    return {"torch_peak": max(peak, held), "torch_held": held}


def measure_python(kind: str, variant: str, tokens: int, blocks: int) -> dict[str, int]:
    """Return the peak of what Python, numpy and Arrow have allocated, in later steps."""
    with ExitStack() as stack:
        tracemalloc.start()
        step = _make(kind, variant, tokens, stack, blocks)
        for _ in range(WARM_UP):
            step()
        tracemalloc.reset_peak()
        for _ in range(STEPS):
            step()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return {"python_peak": peak + pa.default_memory_pool().max_memory()}


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
    return make(variant, tokens, stack, blocks)


def _watch_something_small(kind: str) -> None:
    """Load what watching loads and keeps, whatever the model."""
    with ExitStack() as stack:
        step = _make(kind, "sketch", 4, stack, 0)
        for _ in range(WARM_UP):
            step()


def render(rows: list[dict[str, Any]]) -> str:
    """Return the table and what it says, in Markdown."""
    lines = [
        "| what | torch: peak of a step, watched − unwatched | of it, held between steps "
        "| Python, numpy, Arrow | sketches | a bucket | unwatched peak |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['what']} | {_mb(row['torch_peak_extra_bytes'])} "
        f"| {_mb(row['torch_held_extra_bytes'])} | {_mb(row['python_peak_extra_bytes'])} "
        f"| {_mb(row['sketch_bytes'])} | {_mb(row['bucket_bytes'])} "
        f"| {_mb(row['plain_peak_bytes'])} |"
        for row in rows
    ]
    lines += [
        "",
        "`python benchmarks/bench.py --parts memory`: every allocation and free of torch's CPU "
        f"allocator on the training thread of rank 0, in {STEPS} steps of 512 tokens after "
        f"{WARM_UP} others, forward, backward and optimizer included; both in one process. "
        "Python, numpy and Arrow: the difference of the peaks of `tracemalloc` and Arrow's pool "
        "in as many other steps; it holds objects, the rows that wait to be written, and numpy's "
        "arrays. Sketches: those of all groups, once. A bucket: what is reduced at once, "
        "25 MB of DDP's, the largest module of FSDP2's.",
    ]
    return "\n".join([*lines, "", _NOT_SEEN])


def _mb(count: int | None) -> str:
    return "not measured" if count is None else f"{count / 1e6:.2f} MB"


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = run_cases()
    print(json.dumps(rows, indent=2))
    print(render(rows))


if __name__ == "__main__":
    main()
