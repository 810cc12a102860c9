"""Runs the pages' Python on real ranks, in a small world where their names mean something."""

import ast
import contextlib
import os
import shutil
import socket
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import rankscope
from documentation.blocks import Block

VOCABULARY = 24
QUIET: dict[str, Any] = {"overhead_budget": None, "hang_seconds": None}


class Output(dict[str, Tensor]):
    """Like the output of a transformers model: by name, and as attributes."""

    @property
    def loss(self) -> Tensor:
        return self["loss"]

    @property
    def logits(self) -> Tensor:
        return self["logits"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return Output(loss=loss, logits=logits)


def dataset() -> list[dict[str, Tensor]]:
    tokens = torch.randint(VOCABULARY, (16, 7), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]


def fresh(page: str) -> dict[str, Any]:
    """Return new names for a block: a model, its optimizer, a loader, and what goes with them."""
    torch.manual_seed(0)
    data = dataset()
    model: nn.Module = Model()
    if page != "docs/reproducible.md":  # whose blocks wrap the model themselves
        model = DistributedDataParallel(model)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, seed=0))
    batches = list(loader)
    tokens = sum(batch["labels"].numel() for batch in batches[:2]) * dist.get_world_size()
    return {
        "rankscope": rankscope,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "loader": loader,
        "dataset": data,
        "batch": batches[0],
        "rank": dist.get_rank(),
        "steps": [(batches[:2], tokens)],
        "per_sample_loss": per_sample_loss,
    }


def per_sample_loss(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none"
    )
    return losses.view(labels.shape).mean(-1)


def run_blocks(rank: int, pages: dict[str, list[Block]], folder: str) -> dict[str, str]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    stay_here()
    torch.set_num_threads(1)
    sample = Path(folder) / "sample"
    record(sample)
    problems = {}
    for page, found in pages.items():
        place = Path(folder) / page.replace("/", "-")
        if rank == 0:
            place.mkdir()
            if page == "docs/runs.md":
                shutil.copytree(sample, place / "runs" / "sft")
        dist.barrier()
        with contextlib.chdir(place):
            problems |= run_page(page, found)
    return problems


def stay_here() -> None:
    """Let no name but this machine's be looked up: pages name servers that do not exist."""
    look_up = socket.getaddrinfo
    here = {None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::", socket.gethostname()}

    def only_here(host: Any, *rest: Any, **options: Any) -> Any:
        if (host.decode() if isinstance(host, bytes) else host) not in here:
            raise OSError(f"{host} is not this machine")
        return look_up(host, *rest, **options)

    socket.getaddrinfo = only_here


def record(path: Path) -> None:
    names = fresh("")
    options = {"trace": True, "canary": False, **QUIET}
    scope = rankscope.watch(names["model"], names["optimizer"], run_dir=path, **options)
    train(names, 4)
    scope.close()
    dist.barrier()


def run_page(page: str, found: list[Block]) -> dict[str, str]:
    kept: dict[str, Any] = {}
    problems = {}
    for block in found:
        names = {**kept, **fresh(page)}
        before = {key: id(value) for key, value in names.items()}
        if takes_scope(block.code):
            watched = names["model"], names["optimizer"]
            names["scope"] = rankscope.watch(*watched, run_dir="runs/prepared", **QUIET)
        try:
            run_block(block, names)
        except Exception:
            problems[str(block)] = traceback.format_exc()
        finally:
            close_scopes(names)
        kept |= {key: value for key, value in names.items() if before.get(key) != id(value)}
        kept.pop("scope", None)
        dist.barrier()
    return problems


def run_block(block: Block, names: dict[str, Any]) -> None:
    """Run one block; a scope that it leaves open then sees two steps."""
    exec(compile(block.code, f"{block.page}, line {block.line}", "exec"), names)
    if is_open(names.get("scope")):
        train(names, 2)


def takes_scope(code: str) -> bool:
    uses = [n.ctx for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name) and n.id == "scope"]
    return bool(uses) and not any(isinstance(use, ast.Store) for use in uses)


def is_open(scope: Any) -> bool:
    return isinstance(scope, rankscope.Scope) and not scope._closed


def train(names: dict[str, Any], steps: int) -> None:
    for _, batch in zip(range(steps), names["loader"], strict=False):
        names["model"](**batch)["loss"].backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()


def close_scopes(names: dict[str, Any]) -> None:
    for value in list(names.values()):
        if is_open(value):
            value.close()
