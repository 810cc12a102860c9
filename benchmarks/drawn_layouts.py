# ruff: noqa: D102
"""One training in a layout that a seed draws: shards, tensor parallelism, pipelines, experts."""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drawn_common import (
    STEPS,
    Attention,
    Choices,
    Job,
    Language,
    Launch,
    Odd,
    Rows,
    draw_from,
    launch,
    token_loss,
)
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
)
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parent / "healthy"))

from common import History, backward, begin, end

EVERY: Choices = {
    "optimizer": ("adamw", "adamw", "sgd", "momentum", "two"),
    "clip": (None, None, 1.0, 0.1),
    "schedule": ("none", "warmup", "cosine"),
    "zeroes": ("after", "before", "keeps tensors"),
    "uneven": (False, True),
    "dropout": (0.0, 0.1),
    "evaluates": (False, True),
    "depth": (2, 2, 3),
}
OF_SHARDS: Choices = {
    "precision": ("float", "float", "bf16", "bf16 reduced"),
    "reshards": (True, True, False, 2),
    "offloaded": (False, False, False, True),
    "prefetches": (False, True),
    "checkpointed": (False, False, True),
    "compiled": (False, False, False, True),
    "micro_batches": (1, 1, 2),
    "sync_each": (False, True),
    "adapters": (False, False, True),
}
CHOICES: dict[str, Choices] = {
    "shards": {
        **OF_SHARDS,
        "worlds": ((2,), (4,), (2, 2), (4, 2), (2, 4), (4,)),
        "replicas": (1, 1, 2),
    },
    "tensor": {
        **OF_SHARDS,
        "beside": ("fsdp", "fsdp", "fsdp", "ddp", "nothing"),
        "sequence": (False, True),
        "loss_parallel": (False, True),
    },
    "pipeline": {
        "plan": ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"),
        "beside": ("ddp", "fsdp", "fsdp", "nothing"),
        "tied": (False, False, True),
        "checkpointed": (False, True),
    },
    "context": {
        "wrapper": ("ddp", "fsdp", "by hand"),
        "worlds": ((2,), (4,)),
        "exchange": ("gather", "heads"),
        "micro_batches": (1, 1, 2),
        "checkpointed": (False, False, True),
    },
    "experts": {
        "wrapper": ("ddp", "fsdp", "by hand"),
        "worlds": ((2,), (4,), (4,)),
        "balances": (False, True),
    },
    "hooks": {
        "worlds": ((2,), (3,), (4,)),
        "hook": ("after", "of tensor", "late", "flat"),
        "micro_batches": (1, 1, 2),
        "adapters": (False, True),
        "checkpointed": (False, False, True),
        "compiled": (False, False, True),
    },
}


def draw(seed: int) -> Job:
    """Draw a job; choices that do not go together give way."""
    source = random.Random(f"layouts {seed}")
    kinds = ("shards", "shards", "tensor", "tensor", "pipeline", "pipeline")
    kind = source.choice((*kinds, "context", "experts", "hooks"))
    given = draw_from(EVERY | CHOICES[kind], source)
    worlds = given.pop("worlds", (4,))
    if kind == "shards":
        if given["replicas"] > 1:
            worlds = tuple(4 for _ in worlds)
        if given["reshards"] not in (True, False) and (given["replicas"] > 1 or min(worlds) < 4):
            given["reshards"] = True
    if kind == "tensor":
        _fit_tensor(given)
        worlds = (2,) if given["beside"] == "nothing" else (4,)
    if kind == "pipeline":
        worlds = (2,) if given["beside"] == "nothing" else (4,)
        given["clip"] = None  # each stage would clip by its own norm
        given["depth"] = 2
        if given["beside"] == "ddp" and "Zero" in given["plan"]:
            given["plan"] = "1F1B"  # DDP does not know of a backward pass in two parts
    if kind == "experts":
        given["clip"] = None if given["wrapper"] == "fsdp" else given["clip"]
    if given.get("offloaded") or given.get("adapters"):
        given["compiled"] = False
    return Job(kind, worlds, given)


def _fit_tensor(given: dict[str, Any]) -> None:
    if not isinstance(given["reshards"], bool):
        given["reshards"] = True
    given["adapters"] = False
    if given["beside"] != "fsdp":
        given |= {"precision": "float", "offloaded": False, "prefetches": False}
    if given["beside"] == "ddp":
        given["compiled"] = False
    if not given["sequence"]:
        given["clip"] = None  # torch's function wants all parameters on one mesh
    if given["sequence"]:
        given["checkpointed"] = given["compiled"] = False


def faults_of(job: Job) -> list[str]:
    """Return the faults that this job can have; none where it is not watched."""
    if job.given.get("beside") == "nothing":
        return []
    by_hand = job.given.get("wrapper") == "by hand"
    by_hand |= job.kind == "hooks" and job.hook != "of tensor"
    possible = {
        "loss": True,
        "labels": True,
        "sampler": _data_ranks(job) > 1,
        "rate": True,
        "weight": True,
        "dropout off": job.dropout > 0,
        "one not reduced": by_hand,
        "experts not reduced": job.kind == "experts"
        and job.wrapper != "fsdp"
        and job.worlds == (4,),
        "seed in a group": job.kind == "tensor" and job.dropout > 0 and not job.sequence,
        "split": job.kind == "context",
    }
    return [fault for fault, can in possible.items() if can]


def _data_ranks(job: Job) -> int:
    world = job.worlds[-1]
    if job.kind in ("tensor", "pipeline", "context"):
        return world // 2
    return world


class Adapted(nn.Module):
    """A frozen linear layer and a small product beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lower = nn.Linear(layer.in_features, 4, bias=False)
        self.upper = nn.Linear(4, layer.out_features, bias=False)
        nn.init.zeros_(self.upper.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) + self.upper(self.lower(hidden))  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self.block, hidden, use_reentrant=False)  # type: ignore[no-any-return]


class SplitAttention(nn.Module):
    """Causal attention whose rows are cut over the ranks of a group."""

    def __init__(self, whole: Attention, group: dist.ProcessGroup, exchange: str) -> None:
        super().__init__()
        self.whole, self.group, self.exchange = whole, group, exchange

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        whole, parts = self.whole, dist.get_world_size(self.group)
        query, key, value = (
            part(hidden).view(batch, length, -1, whole.of_head)
            for part in (whole.query, whole.key, whole.value)
        )
        if self.exchange == "heads":
            query, key, value = (self._to_heads(each, parts) for each in (query, key, value))
            mixed = _attend(query, key, value, 0)
            return whole.out(self._to_rows(mixed, parts).flatten(2))  # type: ignore[no-any-return]
        key, value = (
            all_gather_tensor_autograd(each.contiguous(), 1, self.group) for each in (key, value)
        )
        mixed = _attend(query, key, value, dist.get_rank(self.group) * length)
        return whole.out(mixed.flatten(2))  # type: ignore[no-any-return]

    def _to_heads(self, each: Tensor, parts: int) -> Tensor:
        batch, length, heads, of_head = each.shape
        sent = each.view(batch, length, parts, heads // parts, of_head)
        sent = sent.permute(2, 0, 1, 3, 4).contiguous()
        got = all_to_all_single_autograd(sent, None, None, self.group)
        return got.transpose(0, 1).flatten(1, 2)

    def _to_rows(self, mixed: Tensor, parts: int) -> Tensor:
        batch, length, heads, of_head = mixed.shape
        sent = mixed.view(batch, parts, length // parts, heads, of_head).transpose(0, 1)
        got = all_to_all_single_autograd(sent.contiguous(), None, None, self.group)
        return got.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _attend(query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
    rows = torch.arange(query.shape[1])[:, None] + first
    mask = rows >= torch.arange(key.shape[1])
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)


class Experts(nn.Module):
    """Four experts that choose their tokens; a rank of the group has some of them."""

    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.parts = group, dist.get_world_size(group)
        self.gate = nn.Linear(width, 4, bias=False)
        up, down = torch.randn(4, width, 48) / width**0.5, torch.randn(4, 48, width) / 48**0.5
        at = dist.get_rank(group)
        self.own: Any = nn.Module()
        self.own.up = nn.Parameter(up.chunk(self.parts)[at].clone())
        self.own.down = nn.Parameter(down.chunk(self.parts)[at].clone())
        self.own.forward = lambda rows: F.gelu(rows @ self.own.up) @ self.own.down
        self.balance = torch.zeros(())

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, -2)
        share = self.gate(flat).softmax(-1)
        weight, chosen = share.T.topk(len(flat) // 4)
        self.balance = share.mean(0).square().sum()
        sent = flat[chosen].contiguous()  # experts, rows, width
        got = all_to_all_single_autograd(sent, None, None, self.group)
        shape = (self.parts, 4 // self.parts, *sent.shape[1:])
        got = got.view(shape).transpose(0, 1).flatten(1, 2)
        made = self.own(got).view(shape[1], shape[0], *shape[2:]).transpose(0, 1).flatten(0, 1)
        back = all_to_all_single_autograd(made.contiguous(), None, None, self.group)
        back = (back * weight[..., None]).flatten(0, 1)
        return torch.zeros_like(flat).index_add(0, chosen.flatten(), back).view_as(hidden)


class Part(nn.Module):
    """Some blocks of a model; the first part has the embedding, the last one the head."""

    def __init__(self, model: Language, number: int, parts: int) -> None:
        super().__init__()
        self.is_last = number == parts - 1
        if number == 0:
            self.embed: Any = model.embed
        of_each = len(model.blocks) // parts
        self.blocks = model.blocks[number * of_each : (number + 1) * of_each]
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, hidden: Tensor) -> Tensor:
        if hasattr(self, "embed"):
            hidden = self.embed(hidden.clamp(min=0))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)) if self.is_last else hidden


class Training:
    """The loop of all layouts but pipelines."""

    def __init__(self, this: Launch) -> None:
        self.this, self.job, self.history = this, this.job, History()
        self.rank, self.world = begin(3)
        self.odd = Odd(this.fault, self.rank)
        self.data_rank, self.data_ranks = self.rank, self.world
        self.model: Any = Language(dropout=self.job.dropout, depth=self.job.depth)
        self.apart: list[Any] = []  # parameters that fewer ranks have
        self.works: list[Any] = []
        self.reduces = True
        self.micro_batches = self.job.given.get("micro_batches", 1)
        self.wrapped: Any = self.model
        self.mesh: Any = None
        getattr(self, f"_lay_{self.job.kind}")()
        self.optimizers = make_optimizers(self.job, [self.model])
        self.schedules = make_schedules(self.job, self.optimizers)
        seed = 1000 + self.data_rank
        torch.manual_seed(seed + 7 * (this.fault == "seed in a group" and self.odd.is_odd))

    def _prepare_blocks(self) -> None:
        """Adapt, recompute or compile blocks, as drawn, before they are cut."""
        job, blocks = self.job, self.model.blocks
        if job.given.get("adapters"):
            self.model.requires_grad_(False)
            for block in blocks:
                block.up, block.attention.query = Adapted(block.up), Adapted(block.attention.query)
        if job.given.get("compiled"):
            for block in blocks:
                block.compile(backend="aot_eager")
        if job.given.get("checkpointed"):
            self.model.blocks = nn.ModuleList(Recomputed(block) for block in blocks)

    def _shard(self, mesh: DeviceMesh) -> None:
        job = self.job
        given: dict[str, Any] = {"mesh": mesh}
        if job.given.get("precision", "float") != "float":
            reduced = torch.bfloat16 if "reduced" in job.precision else torch.float32
            given["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduced)
        if job.given.get("offloaded"):
            given["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        reshards = job.given.get("reshards", True)
        for block in self.model.blocks:
            fully_shard(block, reshard_after_forward=reshards, **given)
        fully_shard(self.model, **given)
        if job.given.get("prefetches"):
            blocks = list(self.model.blocks)
            for block, later in pairwise(blocks):
                block.set_modules_to_forward_prefetch([later])
                later.set_modules_to_backward_prefetch([block])

    def _lay_shards(self) -> None:
        self._prepare_blocks()
        copies = self.job.replicas
        if copies > 1:
            shape = (copies, self.world // copies)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",))
        self._shard(mesh)

    def _lay_tensor(self) -> None:
        job, parts = self.job, 2
        names, shape = ("dp", "tp"), (self.world // parts, parts)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.data_rank, self.data_ranks = self.mesh["dp"].get_local_rank(), self.world // parts
        cut_in_tensors(self.model, self.mesh["tp"], job)
        self._prepare_blocks()
        if job.beside == "fsdp":
            self._shard(self.mesh["dp"])
        elif job.beside == "ddp":
            _pre_dp_module_transform(self.model)
            self._wrap(self.mesh["dp"].get_group())

    def _lay_context(self) -> None:
        parts = 2
        shape = (self.world // parts, parts)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        self.data_rank, self.data_ranks = self.mesh["dp"].get_local_rank(), self.world // parts
        group = self.mesh["cp"].get_group()
        for block in self.model.blocks:
            block.attention = SplitAttention(block.attention, group, self.job.exchange)
        self._prepare_blocks()
        self._wrap_or_shard()

    def _lay_experts(self) -> None:
        shape = (self.world // 2, 2)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "ep"))
        group = self.mesh["ep"].get_group()
        for block in self.model.blocks:
            block.up, block.down = nn.Identity(), Experts(32, group)
            self.apart.extend(block.down.own.parameters())
        if self.job.wrapper == "fsdp":
            for block in self.model.blocks:
                fully_shard(block.down.own, mesh=self.mesh["copies"])
                block.down.own.set_gradient_divide_factor(float(self.world))
                block.down.own.set_force_sum_reduction_for_comms(True)
        self._wrap_or_shard()

    def _lay_hooks(self) -> None:
        self._prepare_blocks()
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                continue
            if self.job.hook == "of tensor":
                parameter.register_hook(self._reduced)
            elif self.job.hook in ("after", "late"):
                parameter.register_post_accumulate_grad_hook(self._reduce)

    def _reduced(self, gradient: Tensor) -> Tensor:
        if not self.reduces:
            return gradient
        gradient = gradient / self.world
        dist.all_reduce(gradient)
        return gradient

    @torch.no_grad()
    def _reduce(self, parameter: Any) -> None:
        if not self.reduces:
            return
        if self._is_left_out(parameter):
            return
        parameter.grad.div_(self.world)
        work = dist.all_reduce(parameter.grad, async_op=self.job.hook == "late")
        self.works += [work] if self.job.hook == "late" else []

    def _is_left_out(self, parameter: Any) -> bool:
        return self.this.fault == "one not reduced" and parameter is self.model.norm.weight

    def _wrap_or_shard(self) -> None:
        if self.job.wrapper == "fsdp":
            mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("world",))
            self._shard(mesh)
        elif self.job.wrapper == "ddp":
            self._wrap(None)

    def _wrap(self, group: dist.ProcessGroup | None) -> None:
        apart = {id(parameter) for parameter in self.apart}
        names = [name for name, p in self.model.named_parameters() if id(p) in apart]
        wrap: Any = DistributedDataParallel
        wrap._set_params_and_buffers_to_ignore_for_model(self.model, names)
        self.wrapped = wrap(self.model, process_group=group)

    def reduce_by_hand(self) -> None:
        """Reduce what no wrapper and no hook does."""
        for work in self.works:
            work.wait()
        self.works.clear()
        job = self.job
        if job.kind == "experts" and job.wrapper != "fsdp":
            for parameter in self.apart:
                parameter.grad /= self.world
                if self.this.fault != "experts not reduced":
                    dist.all_reduce(parameter.grad, group=self.mesh["copies"].get_group())
        apart = {id(parameter) for parameter in self.apart}
        gradients = [
            p.grad
            for p in self.model.parameters()
            if p.grad is not None and id(p) not in apart and not self._is_left_out(p)
        ]
        if job.given.get("wrapper") == "by hand":
            for gradient in gradients:
                dist.all_reduce(gradient.div_(self.world))
        if job.given.get("hook") == "flat":
            flat = torch.cat([gradient.flatten() for gradient in gradients]) / self.world
            dist.all_reduce(flat)
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, part in zip(gradients, torch.split(flat, sizes), strict=True):
                gradient.copy_(part.view_as(gradient))

    def batches(self, rows: Rows) -> Iterator[Tensor]:
        return endless(rows, self.this.fault, self.data_rank, self.data_ranks)

    def loss(self, tokens: Tensor) -> Tensor:
        labels = self.odd.labels(tokens)
        if self.job.kind == "context":
            inputs, labels = self._part_of(tokens, labels)
            found = F.cross_entropy(
                self.wrapped(inputs).flatten(0, 1), labels.flatten(), reduction="sum"
            )
            count = (labels >= 0).sum().float()
            dist.all_reduce(count)
            return found * self.world / count * self.odd.factor
        logits = self.wrapped(tokens)
        loss = token_loss(logits, labels) * self.odd.factor
        if self.job.given.get("balances"):
            for block in self.model.blocks:
                loss = loss + 0.1 * block.down.balance
        return loss

    def _part_of(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cut rows over the group, with the labels that follow them."""
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        group = self.mesh["cp"]
        at, parts = group.get_local_rank(), group.size()
        if self.this.fault == "split":
            at = 0 if self.odd.is_odd else at
        return tokens.chunk(parts, 1)[at], labels.chunk(parts, 1)[at]

    def _hold_back(self, last: bool) -> Any:
        job = self.job
        self.reduces = last
        if last or job.given.get("sync_each"):
            self.reduces = True
        if job.kind == "hooks" or not hasattr(self.wrapped, "no_sync"):
            if hasattr(self.wrapped, "set_requires_gradient_sync"):
                self.wrapped.set_requires_gradient_sync(self.reduces)
            self.reduces = last
            return contextlib.nullcontext()
        return contextlib.nullcontext() if last else self.wrapped.no_sync()

    def update(self, batches: Iterator[Tensor]) -> None:
        job, total = self.job, 0.0
        if job.zeroes == "before":
            zero(self.optimizers)
        parallel = loss_parallel() if job.given.get("loss_parallel") else contextlib.nullcontext()
        for at in range(self.micro_batches):
            with self._hold_back(at == self.micro_batches - 1), parallel:
                loss = self.loss(next(batches)) / self.micro_batches
                backward(loss)
            whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
            total += whole.item()
        self.reduce_by_hand()
        if job.clip is not None:
            self.clip(job.clip)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            if schedule is not None:
                schedule.step()
        if job.zeroes != "before":
            zero(self.optimizers, keeps=job.zeroes == "keeps tensors")
        self.history.note(total)

    def clip(self, limit: float) -> None:
        parameters = list(self.model.parameters())
        if self.job.kind != "experts":
            nn.utils.clip_grad_norm_(parameters, limit)
            return
        apart = {id(parameter) for parameter in self.apart}
        squares = torch.zeros(2)
        for parameter in parameters:
            squares[int(id(parameter) in apart)] += parameter.grad.square().sum()
        dist.all_reduce(squares[1:], group=self.mesh["ep"].get_group())
        nn.utils.clip_grads_with_norm_(parameters, limit, squares.sum().sqrt())

    @torch.no_grad()
    def evaluate(self) -> None:
        self.wrapped.eval()
        rows = Rows(8, uneven=False, named=False, seed=9)
        tokens = torch.stack([rows[at] for at in range(8)])
        if self.job.kind == "context":
            tokens, _ = self._part_of(tokens, tokens)
        self.wrapped(tokens)
        self.wrapped.train()

    def save_or_load(self, *, load: bool) -> None:
        folder = str(self.this.folder)
        model, optimizer = get_state_dict(self.model, self.optimizers)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if not load:
            state_dict_saver.save(state, checkpoint_id=folder)
            return
        state_dict_loader.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def run(self) -> None:
        job, (first, last) = self.job, self.this.steps
        batches = self.batches(Rows(640, uneven=job.uneven, named=False))
        for _ in range(first * self.micro_batches):
            next(batches)
        if self.this.number:
            self.save_or_load(load=True)
            for _ in range(first):
                for schedule in filter(None, self.schedules):
                    schedule.step()
        for step in range(first, last):
            self.odd.at_step(step, self.model, self.optimizers[0])
            self.update(batches)
            if job.evaluates and step % 16 == 15:
                self.evaluate()
        if not self.this.is_last:
            self.save_or_load(load=False)
        end(self.history, self.model)


class PipelineTraining:
    """The loop of a pipeline of two ranks, with data parallelism beside it or none."""

    MICRO = 4

    def __init__(self, this: Launch) -> None:
        self.this, self.job, self.history = this, this.job, History()
        job = self.job
        self.rank, self.world = begin(3)
        self.odd = Odd(this.fault, self.rank)
        self.mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("pp", "dp"))
        stage = self.mesh["pp"].get_local_rank()
        make = get_schedule_class(job.plan)
        many = job.plan not in ("GPipe", "1F1B")
        parts = 4 if many else 2
        model = Language(dropout=job.dropout, depth=parts)
        if job.tied:
            model.head.weight.data.copy_(model.embed.weight.data)
        places = [stage]
        if many:
            places = [stage, 3 - stage] if job.plan.startswith("ZBV") else [stage, stage + 2]
        self.parts = [Part(model, place, parts) for place in places]
        if job.checkpointed and not many:
            for part in self.parts:
                part.blocks = nn.ModuleList(Recomputed(block) for block in part.blocks)
        group = self.mesh["pp"].get_group()
        stages = [
            PipelineStage(self._lay(part), place, parts, torch.device("cpu"), group=group)
            for part, place in zip(self.parts, places, strict=True)
        ]
        self.has_first, self.has_last = 0 in places, parts - 1 in places
        self.losses: list[float] = []
        given: Any = stages if many else stages[0]
        self.plan = make(given, n_microbatches=self.MICRO, loss_fn=self._loss)
        self.optimizers = make_optimizers(job, self.parts)
        self.schedules = make_schedules(job, self.optimizers)
        torch.manual_seed(1000 + self.mesh["dp"].get_local_rank())

    def _lay(self, part: Part) -> Any:
        if self.job.beside == "fsdp":
            for block in part.blocks:
                fully_shard(block, mesh=self.mesh["dp"], reshard_after_forward=False)
            return fully_shard(part, mesh=self.mesh["dp"], reshard_after_forward=False)
        if self.job.beside == "ddp":
            return DistributedDataParallel(part, process_group=self.mesh["dp"].get_group())
        return part

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = token_loss(logits, labels) * self.odd.factor
        self.losses.append(loss.item())
        return loss

    def _tie(self) -> None:
        """Add up the gradients of the embedding and the head."""
        weights = [part.embed.weight for part in self.parts if hasattr(part, "embed")]
        weights += [part.head.weight for part in self.parts if part.is_last]
        if len(weights) == 2:
            both = weights[0].grad + weights[1].grad
            for weight in weights:
                weight.grad.copy_(both)
            return
        for weight in weights:
            gradient = weight.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=self.mesh["pp"].get_group())

    def run(self) -> None:
        job, mesh = self.job, self.mesh["dp"]
        rows = Rows(640, uneven=job.uneven, named=False)
        batches = endless(rows, self.this.fault, mesh.get_local_rank(), mesh.size(), batch=8)
        for step in range(STEPS):
            for part in self.parts:
                self.odd.at_step(step, part, self.optimizers[0])
            if job.zeroes == "before":
                zero(self.optimizers)
            tokens = next(batches)
            given = [tokens] if self.has_first else []
            target = {"target": self.odd.labels(tokens)} if self.has_last else {}
            self.plan.step(*given, **target)
            if job.tied:
                self._tie()
            for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                optimizer.step()
                if schedule is not None:
                    schedule.step()
            if job.zeroes != "before":
                zero(self.optimizers, keeps=job.zeroes == "keeps tensors")
            self.history.note(
                sum(self.losses[-self.MICRO :]) / self.MICRO
            )  # shapes are tried first
            self.losses.clear()
        end(self.history, *self.parts)


def cut_in_tensors(model: Language, mesh: DeviceMesh, job: Job) -> None:
    """Cut a model over a mesh in columns and rows, its activations too if ``sequence``."""
    cut: Any = Shard(1) if job.sequence else Replicate()
    head = ColwiseParallel(
        input_layouts=cut,
        output_layouts=Shard(-1) if job.loss_parallel else Replicate(),
        use_local_output=not job.loss_parallel,
    )
    whole: dict[str, Any] = {"head": head}
    of_block: dict[str, Any] = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=cut),
        "up": ColwiseParallel(input_layouts=cut),
        "down": RowwiseParallel(output_layouts=cut),
    }
    if job.sequence:
        whole["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=cut)
        whole["norm"] = SequenceParallel()
        of_block |= {"first": SequenceParallel(), "second": SequenceParallel()}
        of_block["attention"] = PrepareModuleInput(
            input_layouts=(cut,), desired_input_layouts=(Replicate(),)
        )
    parallelize_module(model, mesh, whole)
    for block in model.blocks:
        parallelize_module(block, mesh, of_block)


def make_optimizers(job: Job, models: list[Any]) -> list[Any]:
    named = [pair for model in models for pair in model.named_parameters()]
    named = [(name, p) for name, p in named if p.requires_grad]
    parameters = [p for _, p in named]
    kinds: dict[str, Callable[[Any], Any]] = {
        "sgd": lambda given: torch.optim.SGD(given, lr=5e-2),
        "momentum": lambda given: torch.optim.SGD(given, lr=2e-2, momentum=0.9),
        "adamw": lambda given: torch.optim.AdamW(given, lr=2e-3),
    }
    if job.optimizer != "two":
        return [kinds[job.optimizer](parameters)]
    inner = [p for name, p in named if "blocks" in name]
    outer = [p for name, p in named if "blocks" not in name]
    pairs = (("adamw", inner), ("sgd", outer))
    return [kinds[kind](given) for kind, given in pairs if given]


def make_schedules(job: Job, optimizers: list[Any]) -> list[Any]:
    many = torch.optim.lr_scheduler
    if job.schedule == "none":
        return [None for _ in optimizers]
    if job.schedule == "cosine":
        return [many.CosineAnnealingLR(optimizer, STEPS) for optimizer in optimizers]
    return [many.LambdaLR(each, lambda step: min(1.0, (step + 1) / 10)) for each in optimizers]


def zero(optimizers: list[Any], *, keeps: bool = False) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=not keeps)


def endless(rows: Rows, fault: str, rank: int, ranks: int, batch: int = 4) -> Iterator[Tensor]:
    """Give batches of a rank's part, epoch after epoch."""
    if fault == "sampler":
        rank, ranks = 0, 1
    sampler: Any = DistributedSampler(rows, ranks, rank, drop_last=True)
    for epoch in range(10**6):
        sampler.set_epoch(epoch)
        yield from DataLoader(rows, batch, sampler=sampler, drop_last=True)


def main() -> None:
    """Draw the job of a seed and train."""
    this = launch(draw)
    (PipelineTraining if this.job.kind == "pipeline" else Training)(this).run()


if __name__ == "__main__":
    main()
