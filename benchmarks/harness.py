"""What the benchmarks share: a model, real ranks, and pairs that are timed in turns."""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

Step = Callable[[], None]
WARM_UP = 5
BLOCKS = 4


class Model(nn.Module):
    """A stack of feed-forward blocks with an embedding and a head, about 10 M parameters."""

    def __init__(self, width: int = 512, blocks: int = BLOCKS, vocabulary: int = 2048) -> None:
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


def make_batch(tokens: int) -> dict[str, Tensor]:
    """Return a batch of so many tokens, other ones on every rank."""
    ids = torch.randint(2048, (4, tokens // 4))
    return {"input_ids": ids, "labels": ids.roll(-1)}


def num_parameters(blocks: int = BLOCKS) -> int:
    """Return the model's number of parameters."""
    return sum(parameter.numel() for parameter in Model(blocks=blocks).parameters())


def run_ranks(work: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Run ``work(*args)`` on real ranks over gloo, one thread each; return rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(  # type: ignore[no-untyped-call]
            _work_on_rank, (work, ranks, folder, args), nprocs=ranks
        )
        return json.loads((Path(folder) / "result.json").read_text())


def _work_on_rank(
    rank: int, work: Callable[..., Any], ranks: int, folder: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    torch.manual_seed(rank)
    result = work(*args)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def time_in_turns(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return each step's seconds, round by round; the order is drawn anew in every round."""
    order = Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARM_UP + rounds):
        for name in order.sample(list(steps), len(steps)):
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[WARM_UP:] for name, values in seconds.items()}


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median and its distribution-free 95 % interval, by order statistics."""
    ordered = np.sort(values)
    half = 0.98 * np.sqrt(len(ordered))
    low, high = int(len(ordered) / 2 - half), int(np.ceil(len(ordered) / 2 + half))
    clipped = [ordered[max(0, low)], ordered[min(len(ordered) - 1, high)]]
    return float(np.median(ordered)), float(clipped[0]), float(clipped[1])


def make_row(what: str, seconds: list[float], plain: list[float]) -> dict[str, Any]:
    """Return a row of a table: how long something takes against the plain way, pair by pair."""
    median, low, high = median_interval([a / b for a, b in zip(seconds, plain, strict=True)])
    added = [a - b for a, b in zip(seconds, plain, strict=True)]
    return {
        "what": what,
        "median": median,
        "low": low,
        "high": high,
        "pairs": len(seconds),
        "plain_milliseconds": 1e3 * float(np.median(plain)),
        "added_milliseconds": 1e3 * float(np.median(added)),
    }
