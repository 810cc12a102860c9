"""The same training on different numbers of workers, with order-free gradients or without."""

import contextlib
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from rankscope.lab.reductions.order_free import order_free
from support.checkpointed import CheckpointedLM

MICRO_BATCHES = 4
STEPS = 3


@dataclass(frozen=True)
class Case:
    name: str
    ddp: dict[str, Any]
    average: str = "sum"  # as ``order_free`` takes it; "" trains with DDP's own reduction
    model: str = "plain"  # or "convolution", which checkpoints, "branch" (in one micro-batch)
    dtype: torch.dtype = torch.float32
    zero_in_place: bool = False
    reverse: bool = False  # each worker goes through its micro-batches backwards
    scaler: bool = False  # with an infinity in step 1
    discard: str = ""  # how a micro-batch is thrown away: by "zero_grad", or since it "raises"


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 24)
        self.hidden = nn.Linear(24, 24)
        self.branch = nn.Linear(24, 24) if kind == "branch" else None
        self.convolution = None
        if kind == "convolution":
            layer = nn.Conv2d(3, 5, 2, padding=1)
            self.convolution = layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.head = nn.Linear(24, 50, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor, use_branch: bool = False) -> Any:
        hidden = self.embedding(input_ids)
        hidden = hidden + self.hidden(hidden).tanh()
        if self.branch is not None and use_branch:
            hidden = hidden + self.branch(hidden)
        if self.convolution is not None:
            image = hidden.view(-1, 3, 2, 4).contiguous(memory_format=torch.channels_last)
            hidden = hidden + self.convolution(image).mean()
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())
        return {"loss": loss}


def make_net(case: Case) -> nn.Module:
    if "reentrant" in case.model:
        net = CheckpointedLM(case.model)
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return net
    return Net(case.model).to(case.dtype)


def make_micro_batch(step: int, micro: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    length = 3 + (step + 5 * micro) % 7
    ids = torch.randint(50, (2, length), generator=generator)
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


class Trained:
    def __init__(self, rank: int, case: Case) -> None:
        self.case = case
        num_workers = dist.get_world_size()
        self.model = make_net(case)
        self.ddp = DistributedDataParallel(self.model, **case.ddp)
        if case.average:
            order_free(self.ddp, average=case.average)  # type: ignore[arg-type]
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=case.scaler)
        self.gradients: list[Tensor] = []
        count = MICRO_BATCHES // num_workers
        self.share = list(range(rank * count, (rank + 1) * count))
        if case.reverse:
            self.share.reverse()
        # DDP divides a sum by W
        self.factor = 1.0 if case.average == "sum" else float(num_workers)

    def step(self, step: int) -> None:
        tokens = sum(make_micro_batch(step, m)["labels"].numel() for m in range(MICRO_BATCHES))
        self._discard(step)
        for micro in self.share:
            batch = make_micro_batch(step, micro)
            weight = self.factor * batch["labels"].numel() / tokens
            if self.case.average == "workers":  # a plain mean over micro-batches
                weight = 1.0 / len(self.share)
            with contextlib.nullcontext() if micro == self.share[-1] else self.ddp.no_sync():
                self._run(batch, weight, micro, poison=self.case.scaler and step == 1)
        named = self.model.named_parameters()
        self.gradients = [p.grad.clone() for _, p in named if p.grad is not None]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.case.zero_in_place)

    def _run(self, batch: dict[str, Any], weight: float, micro: int, poison: bool = False) -> None:
        if self.case.model == "branch":
            batch = {**batch, "use_branch": micro == 0}
        loss = self.ddp(**batch)["loss"] * weight
        if poison and micro == 1:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()

    def _discard(self, step: int) -> None:
        if not self.case.discard:
            return
        with self.ddp.no_sync():
            loss = self.ddp(**make_micro_batch(step, 77))["loss"]
            if self.case.discard == "raises":
                self.model.get_parameter("embedding.weight").register_hook(_stumble)
                with contextlib.suppress(ZeroDivisionError):
                    loss.backward()
                self.model.get_parameter("embedding.weight")._backward_hooks.clear()  # type: ignore[union-attr]
            else:
                loss.backward()
        self.optimizer.zero_grad(set_to_none=not self.case.zero_in_place)


def _stumble(gradient: Tensor) -> Tensor:
    raise ZeroDivisionError


def digest(tensors: Any) -> str:
    total = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        total.update(bytes(tensor.detach().contiguous().view(torch.uint8).numpy()))
    return total.hexdigest()


def train(rank: int, cases: list[Case]) -> dict[str, tuple[str, str]]:
    """Return by case the digests of the last gradients and of the parameters."""
    results = {}
    for case in cases:
        trained = Trained(rank, case)
        for step in range(STEPS):
            trained.step(step)
        results[case.name] = digest(trained.gradients), digest(trained.model.parameters())
    return results
