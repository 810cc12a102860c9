# ruff: noqa: D102
"""One training that a seed draws from some twenty choices; healthy, or with one fault."""

import argparse
import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

sys.path.insert(0, str(Path(__file__).parent / "healthy"))

from common import VOCABULARY, History, Language, backward, begin, end, pictures, sentences

STEPS = 48
follow: Callable[[float], Any] = swa_utils.get_ema_multi_avg_fn
CHOICES: dict[str, tuple[Any, ...]] = {
    "model": ("language", "tied", "picture", "dense", "recurrent"),
    "wrapper": ("ddp", "ddp", "ddp views", "ddp static", "ddp half", "zero", "fsdp", "by hand"),
    "optimizer": (
        "sgd",
        "momentum",
        "adamw",
        "adamw",
        "fused",
        "rmsprop",
        "adagrad",
        "two",
        "muon",
    ),
    "precision": ("float", "float", "autocast", "scaler", "bfloat16"),
    "micro_batches": (1, 1, 2, 3),
    "sync_each": (False, True),
    "clip": ("none", "norm", "tight", "value"),
    "schedule": ("none", "warmup", "cosine", "cycle"),
    "loss": ("mean", "smoothed", "tokens", "sum", "two parts", "inside"),
    "data": ("sampler", "sampler", "in order", "stream", "independent"),
    "uneven": (False, True),
    "noise": (False, True),
    "dropout": (0.0, 0.1),
    "averaged": (False, True),
    "evaluates": ("never", "wrapped", "inside"),
    "checkpointed": (False, True),
    "frozen": ("nothing", "first", "first, thawed later"),
    "zeroes": ("after", "before", "between", "keeps tensors"),
    "loaders": (0, 0, 0, 1),
    "logs": (False, True),
}


@dataclass(frozen=True)
class Job:
    """What was drawn; names as in ``CHOICES``."""

    model: str
    wrapper: str
    optimizer: str
    precision: str
    micro_batches: int
    sync_each: bool
    clip: str
    schedule: str
    loss: str
    data: str
    uneven: bool
    noise: bool
    dropout: float
    averaged: bool
    evaluates: str
    checkpointed: bool
    frozen: str
    zeroes: str
    loaders: int
    logs: bool

    @property
    def words(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


def draw(seed: int) -> Job:
    """Draw a job; choices that do not go together give way."""
    source = random.Random(seed)
    drawn = {name: source.choice(values) for name, values in CHOICES.items()}
    return Job(**_fit_wrapper(_fit_model(drawn)))


def _fit_model(drawn: dict[str, Any]) -> dict[str, Any]:
    if drawn["model"] in ("language", "tied", "recurrent"):
        drawn["noise"] = False
    else:
        drawn["uneven"] = False
        if drawn["loss"] in ("tokens", "sum"):
            drawn["loss"] = "mean"
    if drawn["model"] == "picture":
        drawn["checkpointed"] = False  # running statistics would count each batch twice
    if drawn["model"] == "tied":
        drawn["frozen"] = "nothing"
    if drawn["data"] == "stream":
        drawn["loaders"] = 0  # a new process for each epoch would not know which one it is
    if drawn["precision"] == "bfloat16":
        drawn["averaged"] = False  # the average would round away what it follows
    return drawn


def _fit_wrapper(drawn: dict[str, Any]) -> dict[str, Any]:
    wrapper = drawn["wrapper"]
    if wrapper == "fsdp":
        drawn["averaged"] = False
        if drawn["optimizer"] in ("muon", "fused"):
            drawn["optimizer"] = "adamw"
        if drawn["precision"] == "scaler":
            drawn["precision"] = "float"
    if wrapper == "zero":
        drawn["optimizer"] = "adamw"
    if wrapper == "ddp static":
        drawn |= {"sync_each": True, "frozen": "nothing", "micro_batches": 1}
    if wrapper == "ddp half" and drawn["precision"] == "bfloat16":
        drawn["wrapper"] = "ddp"
    if wrapper != "by hand" and "later" in drawn["frozen"]:
        drawn["frozen"] = "first"  # a wrapper looks at requires_grad when it wraps
    return drawn


def faults_of(job: Job, ranks: int) -> list[str]:
    """Return the faults that this job can have."""
    batches = STEPS * job.micro_batches
    possible = {
        "loss": True,
        "rate": True,
        "sampler": True,
        "set_epoch": job.data == "sampler" and batches >= 2 * 480 // (4 * ranks) + 8,
        "labels": True,
        "inputs": job.model in ("picture", "dense"),
        "smoothing": job.loss != "inside",
        "not divided": job.micro_batches > 1 and job.loss not in ("tokens", "sum"),
        "one not reduced": job.wrapper == "by hand",
        "summed": job.wrapper == "by hand",
        "reduced twice": job.wrapper == "by hand",
        "clipped scaled": job.precision == "scaler" and job.clip in ("norm", "tight"),
        "one zeroed": job.wrapper != "fsdp",
        "evaluation mode": job.dropout > 0 or job.model == "picture",
        "dropout off": job.dropout > 0,
        "weight": job.wrapper != "fsdp",
        "moments": job.optimizer not in ("sgd", "two") and job.wrapper != "fsdp",
        "not zeroed": job.zeroes == "after",
    }
    return [fault for fault, can in possible.items() if can]


class Rows(Dataset[Any]):
    """Token rows or pictures with classes."""

    def __init__(self, job: Job, seed: int) -> None:
        self.noise = job.noise
        if job.model in ("language", "tied", "recurrent"):
            self.rows: Any = sentences(480, 20, seed)
            draw = torch.Generator().manual_seed(seed)
            self.lengths = torch.randint(8, 21, (480,), generator=draw) if job.uneven else None
        else:
            self.rows, self.classes = pictures(480, seed=2)
            self.lengths = None

    def __len__(self) -> int:
        return 480

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        row = self.rows[at]
        if row.dim() == 1:
            labels = row.clone()
            if self.lengths is not None:
                labels[self.lengths[at] :] = -100
            return row, labels
        if self.noise:
            row = row + 0.1 * torch.randn_like(row)
        return row, self.classes[at]


class Stream(IterableDataset[Any]):
    """A rank's part of the rows, in the order of an epoch that all ranks draw alike."""

    def __init__(self, rows: Rows, rank: int, ranks: int) -> None:
        self.rows, self.rank, self.ranks, self.epoch = rows, rank, ranks, 0

    def __iter__(self) -> Iterator[Any]:
        draw = torch.Generator().manual_seed(100 + self.epoch)
        order = torch.randperm(len(self.rows), generator=draw).tolist()
        self.epoch += 1
        yield from (self.rows[at] for at in order[self.rank :: self.ranks])


class Picture(nn.Module):
    """Two convolutions with batch normalisation, and a head."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 12, 3, padding=1)
        self.norm, self.deep = nn.BatchNorm2d(12), nn.Conv2d(12, 12, 3, padding=1)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(12 * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.embed(images)))
        hidden = F.max_pool2d(F.relu(self.deep(hidden)), 2)
        return self.head(self.dropout(hidden.flatten(1)))  # type: ignore[no-any-return]


class Dense(nn.Module):
    """Three layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.middle = nn.Linear(192, 48), nn.Linear(48, 48)
        self.norm, self.dropout, self.head = (
            nn.LayerNorm(48),
            nn.Dropout(dropout),
            nn.Linear(48, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.gelu(self.embed(images.flatten(1)))
        return self.head(self.norm(self.dropout(F.gelu(self.middle(hidden)))))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A gated recurrent layer over tokens."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.layer, self.dropout = nn.GRU(24, 32, batch_first=True), nn.Dropout(dropout)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.dropout(self.layer(self.embed(tokens))[0]))  # type: ignore[no-any-return]


class Whole(nn.Module):
    """The model, which may be checkpointed, and may give its loss in place of its outputs."""

    def __init__(self, job: Job, core: nn.Module) -> None:
        super().__init__()
        self.core, self.job = core, job

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        if self.job.checkpointed and self.training:
            outputs = checkpoint(self.core, inputs, use_reentrant=False)
        else:
            outputs = self.core(inputs)
        return mean_loss(outputs, labels) if self.job.loss == "inside" else outputs


def flat(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if outputs.dim() == 3:
        return outputs[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return outputs.float(), labels


def mean_loss(outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(*flat(outputs, labels), label_smoothing=smoothing)


def make_model(job: Job) -> nn.Module:
    cores: dict[str, Callable[[], nn.Module]] = {
        "language": lambda: Language(dropout=job.dropout),
        "tied": lambda: Language(dropout=job.dropout, tied=True),
        "picture": lambda: Picture(job.dropout),
        "dense": lambda: Dense(job.dropout),
        "recurrent": lambda: Recurrent(job.dropout),
    }
    core = cores[job.model]()
    if job.frozen != "nothing":
        core.embed.requires_grad_(False)
    model = Whole(job, core)
    return model.to(torch.bfloat16) if job.precision == "bfloat16" else model


class Training:
    """The loop over the drawn job; ``fault`` names a function of ``faults``, or is empty."""

    def __init__(self, job: Job, fault: str) -> None:
        self.job, self.fault, self.history, self.step = job, fault, History(), 0
        self.rank, self.ranks = begin()
        self.model: Any = make_model(job)
        self.odd = self.rank == 1  # the rank of a fault that one rank has
        self.wrapped: Any = self._wrap()
        self.rows, self.held_out = Rows(job, 1), Rows(job, 9)
        torch.manual_seed(1000 + self.rank)
        self.optimizers = self._optimizers()
        self.schedules = [self._schedule(optimizer) for optimizer in self.optimizers]
        self.scaler = torch.amp.GradScaler("cpu", 256.0, enabled=job.precision == "scaler")
        self.average = (
            swa_utils.AveragedModel(self.model, multi_avg_fn=follow(0.9)) if job.averaged else None
        )

    def _wrap(self) -> Any:
        kind = self.job.wrapper
        if kind == "by hand":
            return self.model
        if kind == "fsdp":
            for child in self.model.core.children():
                if isinstance(child, nn.ModuleList):
                    for block in child:
                        fully_shard(block)
            return fully_shard(self.model)
        wrapped = DistributedDataParallel(
            self.model,
            gradient_as_bucket_view=kind == "ddp views",
            static_graph=kind == "ddp static",
            find_unused_parameters=False,
        )
        if kind == "ddp half":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return wrapped

    def _optimizers(self) -> list[Any]:
        parameters = [
            p for p in self.model.parameters() if p.requires_grad or "later" in self.job.frozen
        ]
        kind = self.job.optimizer
        if self.job.wrapper == "zero":
            return [ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=2e-3)]
        if kind in ("two", "muon"):
            wide = [p for p in parameters if p.dim() == 2]
            rest = [p for p in parameters if p.dim() != 2]
            first: Any = torch.optim.Muon if kind == "muon" else torch.optim.SGD
            made: list[Any] = [first(wide, lr=1e-2)]
            return [*made, torch.optim.AdamW(rest, lr=2e-3)] if rest else made
        plain: dict[str, Callable[[], Any]] = {
            "sgd": lambda: torch.optim.SGD(parameters, lr=5e-2),
            "momentum": lambda: torch.optim.SGD(parameters, lr=2e-2, momentum=0.9, nesterov=True),
            "adamw": lambda: torch.optim.AdamW(parameters, lr=2e-3),
            "fused": lambda: torch.optim.AdamW(parameters, lr=2e-3, fused=True),
            "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=1e-3),
            "adagrad": lambda: torch.optim.Adagrad(parameters, lr=1e-2),
        }
        return [plain[kind]()]

    def _schedule(self, optimizer: Any) -> Any:
        rate = optimizer.param_groups[0]["lr"]
        many = torch.optim.lr_scheduler
        kind = self.job.schedule
        if kind == "warmup":
            return many.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        if kind == "cosine":
            return many.CosineAnnealingLR(optimizer, STEPS)
        if kind == "cycle":
            cycles = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
            return many.OneCycleLR(
                optimizer, 2 * rate, total_steps=STEPS + 1, cycle_momentum=cycles
            )
        return None

    def _loader(self) -> tuple[Any, Callable[[int], None]]:
        kind, job = self.job.data, self.job
        rank, ranks = self.rank, self.ranks
        if self.fault == "sampler":
            rank, ranks = 0, 1
        given: dict[str, Any] = {"batch_size": 4, "num_workers": job.loaders, "drop_last": True}
        if kind == "stream":
            return DataLoader(Stream(self.rows, rank, ranks), **given), lambda epoch: None
        if kind == "independent":
            draw = torch.Generator().manual_seed(50 + rank)
            picked = torch.utils.data.RandomSampler(self.rows, replacement=True, generator=draw)
            return DataLoader(self.rows, sampler=picked, **given), lambda epoch: None
        sampler: Any = DistributedSampler(self.rows, ranks, rank, shuffle=kind == "sampler")
        return DataLoader(self.rows, sampler=sampler, **given), sampler.set_epoch

    def batches(self) -> Iterator[Any]:
        loader, set_epoch = self._loader()
        for epoch in range(10**6):
            if self.fault != "set_epoch":
                set_epoch(epoch)
            yield from loader

    def loss(self, inputs: Tensor, labels: Tensor, share: Tensor) -> Tensor:
        """Return a micro-batch's loss, so that summed and averaged it is the mean over all."""
        job, many = self.job, self.job.micro_batches
        if self.fault == "labels" and self.odd:
            labels = labels.roll(1, 0)
        if self.fault == "inputs" and self.odd and inputs.is_floating_point():
            inputs = inputs * 3
        half = torch.float16 if job.precision == "scaler" else torch.bfloat16
        with torch.autocast("cpu", half, enabled=job.precision in ("autocast", "scaler")):
            if job.precision == "bfloat16" and inputs.is_floating_point():
                inputs = inputs.bfloat16()
            outputs = self.wrapped(inputs, labels)
        smoothing = 0.1 if job.loss == "smoothed" else 0.0
        if self.fault == "smoothing" and self.odd:
            smoothing = 0.2
        if job.loss == "inside":
            loss = outputs / many
        elif job.loss in ("tokens", "sum"):
            total = F.cross_entropy(
                *flat(outputs, labels), reduction="sum", label_smoothing=smoothing
            )
            loss = total * self.ranks / share
        else:
            loss = mean_loss(outputs, labels, smoothing) / many
            if job.loss == "two parts":
                loss = loss + 1e-3 * outputs.float().square().mean() / many
        if self.fault == "not divided":
            loss = loss * many
        factor = 4.0 if self.fault == "loss" and self.odd else 1.0
        whole: Tensor = loss * factor
        return whole

    def tokens(self, window: list[Any]) -> Tensor:
        """Return how many labels the step has on all ranks."""
        count = torch.tensor(float(sum((labels[:, 1:] >= 0).sum() for _, labels in window)))
        dist.all_reduce(count)
        return count

    def reduce(self) -> None:
        for at, parameter in enumerate(self.model.parameters()):
            if parameter.grad is None or (self.fault == "one not reduced" and at == 2):
                continue
            dist.all_reduce(parameter.grad)
            if self.fault != "summed":
                parameter.grad /= self.ranks
            if self.fault == "reduced twice":
                parameter.grad /= self.ranks

    def clip(self) -> None:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.job.clip in ("norm", "tight"):
            bound = 1.0 if self.job.clip == "norm" else 0.05
            nn.utils.clip_grad_norm_(parameters, bound)
        elif self.job.clip == "value":
            nn.utils.clip_grad_value_(parameters, 0.05)

    def zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.job.zeroes != "keeps tensors")

    def evaluate(self) -> None:
        model = self.wrapped if self.job.evaluates == "wrapped" else self.model
        model.eval()
        with torch.no_grad():
            for at in range(2):
                rows = [self.held_out[4 * at + more] for more in range(4)]
                inputs, labels = (torch.stack(part) for part in zip(*rows, strict=True))
                if self.job.precision == "bfloat16" and inputs.is_floating_point():
                    inputs = inputs.bfloat16()
                model(inputs, labels)
        model.train()

    def local(self, at: int) -> Any:
        """Return what holds back the reduction of a micro-batch that is not the last."""
        last = at == self.job.micro_batches - 1
        if self.job.sync_each or last:
            return contextlib.nullcontext()
        if isinstance(self.wrapped, DistributedDataParallel):
            return self.wrapped.no_sync()
        return contextlib.nullcontext()

    def update(self, batches: Iterator[Any]) -> None:
        job = self.job
        window = [next(batches) for _ in range(job.micro_batches)]
        share = self.tokens(window) if job.loss in ("tokens", "sum") else torch.ones(())
        if job.zeroes == "before":
            self.zero()
        total = 0.0
        for at, (inputs, labels) in enumerate(window):
            if job.wrapper == "fsdp":
                self.wrapped.set_requires_gradient_sync(
                    job.sync_each or at == job.micro_batches - 1
                )
            with self.local(at):
                loss = self.loss(inputs, labels, share)
                if job.zeroes == "between" and at == 0:
                    self.zero()
                backward(self.scaler.scale(loss))
            total += loss.item()
        self.after_backward(total)

    def after_backward(self, total: float) -> None:
        job = self.job
        if job.wrapper == "by hand":
            self.reduce()
        if job.clip != "none":
            if self.fault != "clipped scaled":
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
            self.clip()
        if self.fault == "one zeroed" and self.odd:
            next(p for p in self.model.core.head.parameters()).grad.zero_()
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            self.scaler.step(optimizer)
            if schedule is not None:
                schedule.step()
        self.scaler.update()
        if job.zeroes in ("after", "keeps tensors") and self.fault != "not zeroed":
            self.zero()
        self.history.note(total)

    def rarely(self) -> None:
        """Do what is not done in every step."""
        job = self.job
        if self.step == 20 and "later" in job.frozen:
            self.model.core.embed.requires_grad_(True)
        if self.fault and self.step == 4:
            self._begin_fault()
        if job.evaluates != "never" and self.step % 16 == 15:
            self.evaluate()
        if job.logs and self.step % 5 == 0:
            mean = torch.tensor(self.history.losses[-1:] or [0.0])
            dist.all_reduce(mean)
        if self.average is not None:
            self.average.update_parameters(self.model)

    def _begin_fault(self) -> None:
        begin_it = {
            "rate": self._change_rate,
            "evaluation mode": self.model.eval,
            "dropout off": self._drop_nothing,
            "weight": self._change_weight,
            "moments": self._forget_moments,
        }.get(self.fault)
        if begin_it is not None and self.odd:
            begin_it()

    def _change_rate(self) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] *= 1.5

    def _drop_nothing(self) -> None:
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    @torch.no_grad()
    def _change_weight(self) -> None:
        next(iter(self.model.core.head.parameters())).flatten()[0].add_(0.1)

    def _forget_moments(self) -> None:
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def run(self) -> None:
        batches = self.batches()
        for self.step in range(STEPS):
            self.rarely()
            self.update(batches)
        end(self.history, self.model)


def main() -> None:
    """Draw the job of a seed and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--fault", default="")
    chosen = parser.parse_args()
    Training(draw(chosen.seed), chosen.fault).run()


if __name__ == "__main__":
    main()
