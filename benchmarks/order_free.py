"""One training on 1, 2, 4, 8 and 16 workers: with order-free gradients it ends in the same bits.

Run ``python benchmarks/order_free.py``. A small Llama learns the bytes of the built-in records with
AdamW, without dropout, on one intra-op thread; every step has 16 micro-batches of unequal sizes,
each weighted by its tokens, which the workers share. Beside it the same training with DDP's own
all-reduce. What a step costs is in ``benchmarks/reproducible.py``.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.lab.study.builtin import generate

MICRO_BATCHES = 16
_PRELOAD = ["transformers.models.llama.modeling_llama", "torch._dynamo", "rankscope.session.start"]


def make_model(width: int) -> nn.Module:
    """Return a Llama of two layers over bytes, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, attention_dropout=0.0,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model


def read_text() -> Tensor:
    """Return the bytes of the study's built-in records, always the same."""
    records = islice(generate(seed=0), 1000)
    text = "\n".join(f"{row['instruction']} {row['output']}" for row in records).encode()
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy()).long()


def make_micro_batches(text: Tensor, step: int) -> list[Tensor]:
    """Return a step's micro-batches, two sequences each, of 9 to 32 tokens."""
    random = torch.Generator().manual_seed(step)
    lengths = torch.randint(9, 33, (MICRO_BATCHES,), generator=random).tolist()
    starts = torch.randint(len(text) - 64, (MICRO_BATCHES, 2), generator=random).tolist()
    return [
        torch.stack([text[first : first + length] for first in pair])
        for length, pair in zip(lengths, starts, strict=True)
    ]


def train(reduction: str, steps: int, width: int) -> dict[str, Any]:
    """Train on one rank of several; return the last loss, and the parameters with their digest."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = DistributedDataParallel(make_model(width))
    if reduction == "order_free":
        rankscope.order_free(model, average="sum")
    factor = 1 if reduction == "order_free" else ranks  # the all-reduce divides by it
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text, count = read_text(), MICRO_BATCHES // ranks
    total = torch.zeros(())
    for step in range(steps):
        batches = make_micro_batches(text, step)
        tokens = sum(batch.numel() for batch in batches)
        total = torch.zeros(())
        for micro, batch in enumerate(batches[rank * count : (rank + 1) * count]):
            with contextlib.nullcontext() if micro == count - 1 else model.no_sync():
                loss = model(input_ids=batch, labels=batch).loss * (batch.numel() / tokens)
                (factor * loss).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(total)
    end = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    data = end.numpy().tobytes()
    digest = hashlib.blake2b(data, digest_size=6).hexdigest()
    digests: list[Any] = [None] * ranks
    dist.all_gather_object(digests, digest)
    assert set(digests) == {digest}, "ranks of one training differ"
    return {"digest": digest, "loss": total.item(), "parameters": data.hex()}


def train_both(steps: int, width: int) -> dict[str, dict[str, Any]]:
    """Train with either reduction."""
    return {name: train(name, steps, width) for name in ("plain", "order_free")}


def run(ranks: int, steps: int, width: int) -> dict[str, dict[str, Any]]:
    """Train on so many ranks; they are forked from a process that has imported everything."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(  # type: ignore[no-untyped-call]
            harness._work_on_rank,
            (train_both, ranks, folder, (steps, width)),
            nprocs=ranks,
            start_method="forkserver",
        )
        result: dict[str, dict[str, Any]] = json.loads((Path(folder) / "result.json").read_text())
        return result


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two ends' parameters."""
    ends = [np.frombuffer(bytes.fromhex(end["parameters"]), np.float32) for end in (one, other)]
    return float(np.abs(ends[0] - ends[1]).max())


def main() -> None:
    """Train and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(_PRELOAD)
    ends = {
        ranks: run(ranks, options.steps, options.width)
        for ranks in track(options.ranks, "trainings", console=Console(stderr=True))
    }
    first = ends[options.ranks[0]]
    size = len(first["plain"]["parameters"]) // 8
    print(f"{size:,} parameters, {options.steps} steps of {MICRO_BATCHES} micro-batches\n")
    print("| workers | all-reduce | differs by | its loss | order_free | differs by | its loss |")
    print("|---|---|---|---|---|---|---|")
    for ranks, both in ends.items():
        cells = [
            f"`{both[name]['digest']}` | {distance(both[name], first[name]):.1e} | "
            f"{both[name]['loss']:.7f}"
            for name in ("plain", "order_free")
        ]
        print(f"| {ranks} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
