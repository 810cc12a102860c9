"""``make bench``: ratios, each measured side by side in one run, as JSON and as Markdown.

Two ranks over gloo train one model twice, watched and unwatched, in turns that are drawn at
random; the table gives the median of the pairwise ratios and its 95 % interval. The kernel's
throughput is compared with ``torch.dot`` on the same tensor, likewise in turns.
"""

import argparse
import json
import platform
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.capture import Sketcher

ROOT = Path(__file__).resolve().parent.parent


class Model(nn.Module):
    """A stack of feed-forward blocks with an embedding and a head, about 10 M parameters."""

    def __init__(self, width: int = 512, blocks: int = 4, vocabulary: int = 2048) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                          nn.Linear(4 * width, width))
            for _ in range(blocks)
        )  # fmt: skip
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean loss over all tokens."""
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def bench_step(rank: int, store: str, pairs: int, tokens: int, out: str) -> None:
    """Time ``pairs`` pairs of steps, watched and unwatched, on one of two ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    ids = torch.randint(2048, (4, tokens // 4))
    batch = {"input_ids": ids, "labels": ids.roll(-1)}
    steps = {}
    with tempfile.TemporaryDirectory() as folder:
        scopes = []
        for name in ("watched", "unwatched"):
            model = DistributedDataParallel(Model())
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            if name == "watched":
                scopes.append(rankscope.watch(model, optimizer, run_dir=Path(folder) / "run"))
            steps[name] = _stepper(model, optimizer, batch)
        ratios, plain = _time_pairs(steps, pairs, show=rank == 0)
        for scope in scopes:
            scope.close()
    if rank == 0:
        Path(out).write_text(json.dumps({"ratios": ratios, "plain_seconds": plain}))
    dist.barrier()
    dist.destroy_process_group()


def _stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]
) -> Callable[[], None]:
    def step() -> None:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _time_pairs(
    steps: dict[str, Callable[[], None]], pairs: int, *, show: bool
) -> tuple[list[float], list[float]]:
    ratios, plain = [], []
    order = random.Random(0)
    for number in track(range(pairs + 5), "step time", disable=not show):
        seconds = {}
        names = list(steps)
        order.shuffle(names)
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            seconds[name] = time.perf_counter() - start
        if number >= 5:
            ratios.append(seconds["watched"] / seconds["unwatched"])
            plain.append(seconds["unwatched"])
    return ratios, plain


def bench_kernel(dtype: torch.dtype, repeats: int = 40, elements: int = 16_000_000) -> list[float]:
    """Return bytes per second of the sketch over those of fp32 ``torch.dot``, pair by pair."""
    torch.set_num_threads(1)
    gradient = torch.randn(elements).to(dtype)
    reference = torch.randn(elements)
    sketcher = Sketcher(torch.device("cpu"))
    measure = sketcher.new_measure()
    ratios = []
    for number in range(repeats + 3):
        start = time.perf_counter()
        sketcher.measure("parameter", gradient, measure)
        middle = time.perf_counter()
        torch.dot(reference, reference)
        end = time.perf_counter()
        ours = gradient.numel() * gradient.element_size() / (middle - start)
        theirs = reference.numel() * reference.element_size() / (end - middle)
        if number >= 3:
            ratios.append(ours / theirs)
    return ratios


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median and its distribution-free 95 % interval, by order statistics."""
    ordered = np.sort(values)
    half = 0.98 * np.sqrt(len(ordered))
    low, high = int(len(ordered) / 2 - half), int(np.ceil(len(ordered) / 2 + half))
    clipped = [ordered[max(0, low)], ordered[min(len(ordered) - 1, high)]]
    return float(np.median(ordered)), float(clipped[0]), float(clipped[1])


def run_steps(pairs: int, tokens: int) -> dict[str, Any]:
    """Run the step-time benchmark in two processes and return its row."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ratios.json"
        spawn(  # type: ignore[no-untyped-call]
            bench_step, (f"{folder}/store", pairs, tokens, str(out)), nprocs=2
        )
        result = json.loads(out.read_text())
    median, low, high = median_interval(result["ratios"])
    parameters = sum(p.numel() for p in Model().parameters())
    return {
        "what": f"step time, watched / unwatched, {tokens:,} tokens per rank, "
        f"{parameters / 1e6:.1f} M parameters, CPU, gloo, 2 ranks, every step observed",
        "median": median,
        "low": low,
        "high": high,
        "pairs": pairs,
        "plain_milliseconds": 1e3 * float(np.median(result["plain_seconds"])),
    }


def main() -> None:
    """Measure, print, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "performance.md")
    options = parser.parse_args()
    rows = [run_steps(options.pairs, tokens) for tokens in (2048, 512)]
    for dtype in (torch.float32, torch.bfloat16):
        median, low, high = median_interval(bench_kernel(dtype))
        name = str(dtype).removeprefix("torch.")
        what = f"sketch kernel, bytes per second / fp32 torch.dot's, {name}, one CPU thread"
        rows.append({"what": what, "median": median, "low": low, "high": high, "pairs": 40})
    text = render(rows)
    options.output.write_text(text, encoding="utf-8")
    options.output.with_suffix(".json").write_text(json.dumps(rows, indent=2) + "\n")
    Console().print(text, markup=False)


def render(rows: list[dict[str, Any]]) -> str:
    """Return the page ``docs/performance.md``."""
    lines = [
        "# Performance",
        "",
        "Measured by `make bench`: every ratio compares two things in one run, in turns, so that "
        "the machine's own drift cancels. Medians of the pairwise ratios, with the 95 % interval "
        "of the median.",
        "",
        f"torch {torch.__version__}, {platform.machine()}, one thread per rank.",
        "",
        "| what | median ratio | 95 % interval | pairs |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['what']} | {row['median']:.3f} | {row['low']:.3f} – {row['high']:.3f} "
        f"| {row['pairs']} |"
        for row in rows
    ]
    lines += [
        "| the same on an accelerator | not measured | – | – |",
        "",
        "What a step costs besides: one message per worker and step on the side channel, of 4 "
        "bytes per entry of the sketch (4,093 by default) plus 8 bytes per signal and sample: "
        "about 17 KB.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
