"""What watching costs a training that ``torch.compile`` speeds up: graphs, and time of a step.

A stack of feed-forward blocks trains under DDP: as it is, compiled before ``watch``, and after it.
Of each way, a watched model and one that is not are trained side by side, in blocks of ten steps in
turns (``in_turns.py``). Graphs are counted in processes of their own, which train one model each.

Run ``python benchmarks/compiled.py``, or ``make bench``.
"""

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Model, make_batch, run_ranks
from in_turns import WARM_UPS, added, time_blocks
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

import rankscope

Row = dict[str, Any]
WAYS = {"not compiled": "", "compiled before watch": "before", "compiled after watch": "after"}
WIDTH, TOKENS = 256, 512
COUNTED_STEPS = 12


class Training:
    """A model under DDP that is trained as one way says, watched or not."""

    def __init__(self, compiled: str, backend: str, width: int, run_dir: Path | None) -> None:
        model = DistributedDataParallel(Model(width))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.called: Any = torch.compile(model, backend=backend) if compiled else model
        self.scope: Any = None
        if run_dir is not None:
            seen: Any = self.called if compiled == "before" else model
            self.scope = rankscope.watch(seen, self.optimizer, run_dir=run_dir)

    def step(self, tokens: int) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        self.called(**make_batch(tokens))["loss"].backward()
        self.optimizer.step()


def measure(way: str, ranks: int, blocks: int, warm_up: int, backend: str, width: int) -> Row:
    """Return a row of the table: what watching changes of one way."""
    trained = (WAYS[way], backend, width)
    plain, watched = (run_ranks(_count, ranks, trained, is_watched) for is_watched in (False, True))
    timed = run_ranks(_time, ranks, trained, blocks, warm_up)
    return {"way": way, "plain": plain, "watched": watched, **timed}


def _count(trained: tuple[str, str, int], is_watched: bool) -> list[int]:
    """Return the numbers of graphs, compilations and graph breaks of a short training."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(*trained, Path(folder) / "run" if is_watched else None)
        for number in range(COUNTED_STEPS):
            training.step(TOKENS if number % 4 < 3 else TOKENS // 2)  # the end of an epoch
        if training.scope is not None:
            training.scope.close()
    counters = torch._dynamo.utils.counters
    compilations = torch._dynamo.utils.get_compilation_metrics()
    breaks = sum(counters["graph_break"].values())
    return [counters["stats"]["unique_graphs"], len(compilations), breaks]


def _time(trained: tuple[str, str, int], blocks: int, warm_up: int) -> Row:
    os.environ["RANKSCOPE_AGENT"] = "process"
    with tempfile.TemporaryDirectory() as folder:
        both = [Training(*trained, run_dir) for run_dir in (None, Path(folder) / "run")]
        steps = [partial(training.step, TOKENS) for training in both]
        wall, processor, _ = time_blocks(steps, (warm_up, blocks), None)
        both[1].scope.close()
    return added(wall, processor)


def render(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| way | graphs, compilations, breaks: unwatched | watched | step, ms "
        "| watched / unwatched | added wall, ms | added CPU, a rank, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['way']} | {_counts(row['plain'])} | {_counts(row['watched'])} "
        f"| {row['step_ms']:.1f} | {row['ratio']:.3f} | {row['added_wall_ms']:+.2f} "
        f"| {row['added_cpu_ms']:.2f} |"
        for row in rows
    ]
    note = f"Counts are of {COUNTED_STEPS} steps, of which every fourth has a smaller batch."
    return "\n".join([*lines, "", note])


def _counts(counts: list[int]) -> str:
    return ", ".join(map(str, counts))


def run_all(
    blocks: int,
    *,
    ranks: int = 2,
    warm_up: int = WARM_UPS["always observed"],
    backend: str = "inductor",
    width: int = WIDTH,
) -> list[Row]:
    """Return a row for each way."""
    return [measure(way, ranks, blocks, warm_up, backend, width) for way in WAYS]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=WARM_UPS["always observed"])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--width", type=int, default=WIDTH)
    Console(width=200).print(render(run_all(**vars(parser.parse_args()))), markup=False)


if __name__ == "__main__":
    main()
