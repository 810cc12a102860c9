"""A small training at several layouts, healthy or with a fault: one side of a pair for parity.

It knows nothing of rankscope. Run it by itself or under ``torchrun``:

    torchrun --nproc-per-node 2 benchmarks/parity_training.py --layout fsdp2
"""

import argparse
import functools
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY, WIDTH, HEADS, LENGTH, EXPERTS = 64, 32, 4, 16, 4
GLOBAL_BATCH = 8
STAGES = 2
PARTS = 4
"""Embedding, two layers, and what follows them."""
SCHEDULES: list[Any] = []
"""The pipeline's, once it is made."""

FAULTS = {
    "loss_times_workers": "the loss is multiplied by the number of workers",
    "loss_not_divided": "accumulation without division by the number of micro-batches",
    "accumulator_reset": "gradients are cleared before the last micro-batch",
    "no_sync_always": "gradients are never reduced",
    "local_clip": "each rank clips by the norm of its own shard",
    "clip_twice": "replicas count twice in the norm",
    "clip_leaves_out": "one parameter is left out of the norm",
    "counter_ahead": "the optimizer was called once before the training, with zero gradients",
    "moments_bf16": "moments are rounded to bfloat16 after each step",
    "muon_on_shards": "the update of a sharded matrix is made orthogonal shard by shard",
    "layer_update": "the update of one layer is twice as large",
    "layer_frozen": "one layer is left out of the optimizer",
    "layer_gradient": "the gradient of one layer is halved",
    "layer_gradient_zero": "the gradient of one layer is zero",
    "weight_decay": "weight decay is applied to norms, too",
    "learning_rate": "another learning rate",
    "other_samples": "ranks draw with seeds of their own",
    "same_samples": "all ranks draw the same samples",
    "shifted_epoch": "the order is one batch ahead",
    "labels_shifted": "one label is lost at each boundary of two parts of the sequence",
    "labels_random": "labels of one rank are random",
    "other_start": "another seed of the initialisation",
    "one_layer_start": "one layer begins with other values",
    "replica_start": "the last rank begins with other values in one layer",
    "token_mean": "the mean of local means, with uneven numbers of label tokens",
    "epsilon": "layer norms with another epsilon",
    "attention_scale": "attention without its scale",
    "half_shard": "half of the rows of one gradient are zero",
    "half_mesh": "each replica of HSDP reduces by itself",
    "sum_over_tokens": "a pipeline's loss is a sum, and nobody divides its gradient",
    "tied_apart": "gradients of tied weights on two stages are not added",
    "smoothing_of_part": "the labels are smoothed over a part of the vocabulary",
    "sharded_twice": "what is a rank's share is cut for the ranks once more",
    "router_gradient": "the gradient of the router is divided by the number of ranks",
    "teacher_each_pass": "a teacher follows in each micro-batch, not in each step",
    "layer_backward": "the backward pass of one layer halves what it passes on",
    "keys_gradient": "the gradient of one projection is halved",
    "sign": "the gradient of one layer has the other sign",
    "experts_not_divided": "gradients of experts are not divided by the number of ranks",
    "stale": "the optimizer gets the gradient of the step before",
}
"""Faults by name."""


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, dropout: float, eps: float, scale: float | None, *, fused: bool) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH, eps=eps)
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_2 = nn.LayerNorm(WIDTH, eps=eps)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.scale = scale
        self.halves = False
        self.fused = fused
        if fused:
            of_all = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False, device="meta")
            self.qkv.weight = nn.Parameter(of_all.detach())
            del self.q_proj, self.k_proj, self.v_proj

    def projections(self, normed: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values."""
        if self.fused:
            return self.qkv(normed).chunk(3, dim=-1)  # type: ignore[no-any-return]
        return self.q_proj(normed), self.k_proj(normed), self.v_proj(normed)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states ``[B, L, D]``."""
        batch, length, _ = hidden.shape
        normed = self.norm_1(hidden)
        q, k, v = (
            each.view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for each in self.projections(normed)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        hidden = hidden + self.dropout(self.o_proj(mixed.transpose(1, 2).flatten(2)))
        lifted = self.up(self.norm_2(hidden))
        if self.halves:
            lifted = 0.5 * lifted + 0.5 * lifted.detach()
        changed: Tensor = self.dropout(self.down(F.gelu(lifted)))
        return hidden + changed


class _Gathered(torch.autograd.Function):
    """The tokens of all ranks of a group; backward adds up what all of them send back."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:
        parts = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tokens.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _own_share(gradient)


class _Returned(torch.autograd.Function):
    """This rank's tokens of the sum over all ranks; backward gathers their gradients."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:
        return _own_share(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts)


def _own_share(tokens: Tensor) -> Tensor:
    total = tokens.clone()
    dist.all_reduce(total)
    return total.chunk(dist.get_world_size())[dist.get_rank()]


class Experts(nn.Module):
    """Experts, and a router that weights all of them; each rank may hold a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.num_local_experts = EXPERTS
        self.ep_group: Any = None  # where a rank's experts are a tensor of their own

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the experts' mean ``[B, L, D]``, by the router's weights."""
        weights, own = self.router(hidden).softmax(-1), self.experts
        group = self.ep_group
        if hasattr(own, "to_local"):
            group, own = own.device_mesh.get_group(), own.to_local()  # type: ignore[attr-defined]
        spread = group is not None
        if spread:
            hidden, weights = (
                _Gathered.apply(each)  # type: ignore[no-untyped-call]
                for each in (hidden, weights)
            )
            first = dist.get_rank(group) * len(own)
            weights = weights[..., first : first + len(own)]
        mixed: Tensor = torch.einsum("blw,ewv,ble->blv", hidden, own, weights)
        return _Returned.apply(mixed) if spread else mixed  # type: ignore[no-untyped-call]


class Model(nn.Module):
    """A small language model."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        eps = 1e-2 if args.fault == "epsilon" else 1e-5
        scale = 1.0 if args.fault == "attention_scale" else None
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            Block(args.dropout, eps, scale, fused=args.fused) for _ in range(2)
        )
        self.layers[1].halves = args.fault == "layer_backward"
        self.norm = nn.LayerNorm(WIDTH, eps=eps)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.experts = Experts() if args.experts else None
        if args.tied:
            self.head.weight = self.embed.weight
        self.teacher = nn.Linear(WIDTH, VOCABULARY, bias=False) if args.teacher else None
        if self.teacher is not None:
            self.teacher.requires_grad_(False)
        self.follows_in_pass = args.fault == "teacher_each_pass"

    @torch.no_grad()
    def follow(self) -> None:
        """Move the teacher towards the head."""
        if self.teacher is not None:
            self.teacher.weight.lerp_(self.head.weight, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[B, L, V]``."""
        if self.follows_in_pass:
            self.follow()
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        if self.experts is not None:
            hidden = hidden + self.experts(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Stage(nn.Module):
    """One of a pipeline's stages: the parts of a model that it computes, by the same names."""

    def __init__(self, model: Model, stage: int, stages: int) -> None:
        super().__init__()
        own = range(PARTS * stage // stages, PARTS * (stage + 1) // stages)
        self.embed = model.embed if 0 in own else None
        self.layers = nn.ModuleDict({str(n): model.layers[n] for n in (0, 1) if n + 1 in own})
        self.norm = model.norm if PARTS - 1 in own else None
        self.head = model.head if PARTS - 1 in own else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states, or the last stage's logits."""
        hidden = hidden if self.embed is None else self.embed(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden


def sample(number: int, *, uneven: bool) -> tuple[Tensor, Tensor]:
    """Return the tokens and labels ``[L]`` of a sample."""
    draw = torch.Generator().manual_seed(1000 + number)
    tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=draw)
    labels = tokens[1:].clone()
    if uneven:
        labels[int(torch.randint(2, LENGTH, (), generator=draw)) :] = -100
    return tokens[:-1], labels


def batch_of(
    args: argparse.Namespace, step: int, micro: int, worker: int, workers: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens and labels ``[b, L]`` of a micro-batch of a worker."""
    step += args.fault == "shifted_epoch"
    ids = list(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
    if args.fault == "same_samples":
        worker = 0
    if args.fault == "sharded_twice":
        ids = [i for n in range(workers) for i in range(step * 8 + n * 64, step * 8 + n * 64 + 8)]
        ids = ids[worker::workers]
    if args.fault == "other_samples":
        draw = torch.Generator().manual_seed(worker * 77 + step)
        ids = torch.randperm(512, generator=draw)[:GLOBAL_BATCH].tolist()
    own = ids[worker::workers]
    share = len(own) // args.accumulate
    own = own[micro * share : (micro + 1) * share]
    tokens, labels = (
        torch.stack(each)
        for each in zip(*(sample(i, uneven=args.uneven) for i in own), strict=True)
    )
    if args.fault == "labels_shifted":
        labels[:, LENGTH // 2 - 1] = -100
    if args.fault == "labels_random" and worker == workers - 1:
        labels = torch.randint(
            VOCABULARY, labels.shape, generator=torch.Generator().manual_seed(step)
        )
    return tokens, labels


class Muon(torch.optim.Optimizer):
    """Makes updates of matrices orthogonal; of whole ones, or of the local shards alone."""

    def __init__(self, params: Any, lr: float, *, on_shards: bool) -> None:
        super().__init__(params, {"lr": lr})
        self.on_shards = on_shards

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad
                if isinstance(grad, DTensor) and self.on_shards:
                    p.to_local().add_(_orthogonal(grad.to_local()), alpha=-group["lr"])
                elif isinstance(grad, DTensor):
                    whole = _orthogonal(grad.full_tensor())
                    whole = distribute_tensor(whole, p.device_mesh, p.placements)
                    p.to_local().add_(whole.to_local(), alpha=-group["lr"])
                else:
                    p.add_(_orthogonal(grad), alpha=-group["lr"])


def _orthogonal(grad: Tensor) -> Tensor:
    if grad.dim() < 2 or not grad.numel():
        return grad
    x = grad.float() / (grad.float().norm() + 1e-7)
    for _ in range(5):  # Newton and Schulz, with Muon's coefficients
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    orthogonal: Tensor = x.to(grad.dtype)
    return orthogonal


def wrap(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """Return the model in its layout."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if args.layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if args.layout in ("fsdp2", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        shape = (2, world // 2) if args.layout == "hsdp" else (world,)
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        more: dict[str, Any] = {"mesh": mesh["shard"] if args.fault == "half_mesh" else mesh}
        if args.mixed:
            more["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, **more)
        fully_shard(model, **more)
    if args.layout in ("ep", "ep_local", "pp_fsdp2"):
        spread(model, args, world)
    if args.layout in ("tp", "fsdp2_tp"):
        cut_layers(model, args, world)
    if args.compile:
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    return model


def cut_layers(model: nn.Module, args: argparse.Namespace, world: int) -> None:
    """Apply tensor parallelism to each layer, and FSDP2 around it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    shape = (world,) if args.layout == "tp" else (world // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
    plan: dict[str, Any] = {
        name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj", "up")
    }
    plan |= {name: RowwiseParallel() for name in ("o_proj", "down")}
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh["tp"], plan)
    if args.layout == "fsdp2_tp":
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])


def spread(model: nn.Module, args: argparse.Namespace, world: int) -> None:
    """Give each rank a part of the experts, or of its stage of a pipeline."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    if args.layout == "ep":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
        experts: Any = model.experts
        own = distribute_tensor(experts.experts.detach(), mesh, [Shard(0)])
        experts.experts = nn.Parameter(own)
        return
    if args.layout == "ep_local":
        experts = model.experts
        own = experts.experts.detach().chunk(world)[dist.get_rank()].clone()
        experts.experts = nn.Parameter(own)
        experts.experts.allreduce = False
        experts.ep_group, experts.num_local_experts = dist.group.WORLD, len(own)
        return
    mesh = init_device_mesh("cpu", (world // STAGES, STAGES), mesh_dim_names=("dp", "pp"))
    fully_shard(model, mesh=mesh["dp"])


class MomentumOfPlainTensors(torch.optim.Optimizer):
    """SGD with momentum whose state has a plain tensor for a distributed parameter: its shard."""

    def __init__(self, params: list[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                gradient = local(p.grad)
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(gradient))
                momentum.mul_(0.9).add_(gradient)
                local(p).sub_(group["lr"] * momentum)


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return the optimizer."""
    lr = args.lr * (1.5 if args.fault == "learning_rate" else 1.0)
    named = [(n, p) for n, p in model.named_parameters()]
    if args.fault == "layer_frozen":
        named = [(n, p) for n, p in named if "layers.1.up.weight" not in n]
    decayed = [p for n, p in named if "norm" not in n or args.fault == "weight_decay"]
    rest = [p for n, p in named if not ("norm" not in n or args.fault == "weight_decay")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    if args.optimizer == "plain":
        return MomentumOfPlainTensors([p for _, p in named], lr)
    if args.optimizer == "muon":
        return Muon([p for _, p in named], lr, on_shards=args.fault == "muon_on_shards")
    if args.layout == "ddp" and args.zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            [p for _, p in named], optimizer_class=torch.optim.AdamW, lr=lr, weight_decay=0.1
        )
    if args.zero:
        return torch.optim.AdamW([p for _, p in named], lr=lr, weight_decay=0.1)
    return torch.optim.AdamW(groups, lr=lr)


def local(tensor: Tensor) -> Tensor:
    """Return a tensor, or its local part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def clip(model: nn.Module, args: argparse.Namespace) -> None:
    """Clip the gradients, rightly or wrongly."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if args.fault == "local_clip":
        norm = torch.stack([local(g).norm() for g in gradients]).norm()
    elif args.fault == "clip_twice":
        squares = torch.stack([local(g).square().sum() for g in gradients]).sum()
        dist.all_reduce(squares)
        norm = squares.sqrt()
    elif args.fault == "clip_leaves_out":
        few = [p.grad for n, p in model.named_parameters() if "head" not in n]
        norm = torch.nn.utils.get_total_norm([each for each in few if each is not None])
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        return
    factor = min(1.0, args.clip / (float(local(norm)) + 1e-6))
    for gradient in gradients:
        gradient.mul_(factor)


def spoil(named: list[tuple[str, nn.Parameter]], fault: str, kept: dict[str, Tensor]) -> None:
    """Change gradients as a fault does."""
    for name, p in named:
        if p.grad is None:
            continue
        chosen = "layers.1.up.weight" in name
        grad = local(p.grad)
        if fault == "router_gradient" and "router" in name:
            grad.div_(dist.get_world_size())
        if fault == "keys_gradient" and "layers.1.k_proj" in name:
            grad.mul_(0.5)
        if fault == "layer_gradient" and chosen:
            grad.mul_(0.5)
        elif fault == "layer_gradient_zero" and chosen:
            grad.zero_()
        elif fault == "sign" and chosen:
            grad.neg_()
        elif fault == "half_shard" and chosen:
            grad[: len(grad) // 2].zero_()
        elif fault == "stale":
            now = grad.clone()
            grad.copy_(kept.get(name, now * 0))
            kept[name] = now


def initialise(model: nn.Module, args: argparse.Namespace, worker: int, workers: int) -> None:
    """Set up what differs at the start."""
    if args.fault in ("one_layer_start", "replica_start"):
        if args.fault == "replica_start" and worker != workers - 1:
            return
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "layers.1.up.weight" in name:
                    parameter.mul_(1.01)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="single")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=2, help="of a pipeline's schedule")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--fault", default="", choices=["", *FAULTS])
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--mixed", action="store_true", help="FSDP2 computes in bfloat16")
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--zero", action="store_true")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--teacher", action="store_true")
    parser.add_argument("--smoothing", type=float, default=0.0)
    parser.add_argument("--fused", action="store_true", help="one projection for q, k and v")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--evaluate", action="store_true", help="before each step")
    args = parser.parse_args()

    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or args.layout not in ("single",):
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    workers = dist.get_world_size() if dist.is_initialized() else 1
    worker = rank
    if args.layout == "tp":
        worker, workers = 0, 1
    elif args.layout == "fsdp2_tp":
        worker, workers = rank // 2, workers // 2
    elif args.layout.startswith("pp"):
        worker, workers = rank // STAGES, workers // STAGES

    torch.manual_seed(args.seed + (args.fault == "other_start"))
    model: nn.Module = Model(args)
    if args.layout.startswith("pp"):
        stages = range(rank % STAGES, stages_of(args), STAGES)
        own = [Stage(model, stage, stages_of(args)) for stage in stages]  # type: ignore[arg-type]
        model = own[0] if len(own) == 1 else nn.ModuleList(own)
    initialise(model, args, worker, workers)
    if args.bf16:
        model = model.to(torch.bfloat16)
    wrapped = wrap(model, args)
    if args.fault == "replica_start" and args.layout == "ddp":  # DDP has broadcast the start
        initialise(model, args, worker, workers)
    optimizer = make_optimizer(model, args)
    train(args, wrapped, model, optimizer, worker, workers)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(
    args: argparse.Namespace,
    wrapped: nn.Module,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    worker: int,
    workers: int,
) -> None:
    """Run the steps."""
    named = list(model.named_parameters())
    kept: dict[str, Tensor] = {}
    if args.fault == "counter_ahead":
        step_without_gradient(optimizer, named)
    for step in range(args.steps):
        accumulate(args, wrapped, model, optimizer, step, worker, workers)
        spoil(named, args.fault, kept)
        if args.clip:
            clip(model, args)
        before = {n: local(p).detach().clone() for n, p in named if "layers.1.up.weight" in n}
        if args.fault == "layer_update":
            _with_twice_the_update(optimizer, named, before)
        else:
            optimizer.step()
        if args.fault == "moments_bf16":
            round_moments(optimizer)
        optimizer.zero_grad()
        if args.teacher and args.fault != "teacher_each_pass":
            model.follow()  # type: ignore[operator]


def accumulate(
    args: argparse.Namespace,
    wrapped: nn.Module,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    worker: int,
    workers: int,
) -> None:
    """Add up the gradients of a step's micro-batches."""
    if args.layout.startswith("pp"):
        run_pipeline(args, model, step, worker, workers)
        return
    for micro in range(args.accumulate):
        tokens, labels = batch_of(args, step, micro, worker, workers)
        last = micro == args.accumulate - 1
        if args.evaluate:
            with torch.no_grad():
                wrapped(tokens)
        if args.fault == "accumulator_reset" and last:
            optimizer.zero_grad()
        reduce = last and args.fault != "no_sync_always"
        backward(args, wrapped, tokens, labels, workers, reduce=reduce)
    if args.layout in ("ep", "ep_local"):
        reduce_by_hand(model, args)


def reduce_by_hand(model: nn.Module, args: argparse.Namespace) -> None:
    """Average the gradients; each rank's own experts have had the tokens of all ranks."""
    for p in model.parameters():
        if p.grad is not None:
            own = local(p.grad)
            spread = own is not p.grad or not getattr(p, "allreduce", True)
            if not spread:
                dist.all_reduce(own)
            if not (spread and args.fault == "experts_not_divided"):
                own.div_(dist.get_world_size())


def run_pipeline(
    args: argparse.Namespace, model: nn.Module, step: int, worker: int, workers: int
) -> None:
    """Add the gradients of a step by one call of torch's schedule."""
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleInterleaved1F1B,
    )

    stage, replica = dist.get_rank() % STAGES, dist.get_rank() // STAGES
    if not SCHEDULES:
        ranks = range(dist.get_world_size())
        groups = [dist.new_group([r for r in ranks if r // STAGES == n])
                  for n in range(len(ranks) // STAGES)]  # fmt: skip
        own = list(model) if isinstance(model, nn.ModuleList) else [model]
        parts: list[Any] = [
            PipelineStage(
                each, stage + STAGES * turn, stages_of(args), torch.device("cpu"),
                group=groups[replica],
            )
            for turn, each in enumerate(own)
        ]  # fmt: skip
        sums = args.fault == "sum_over_tokens"
        loss = functools.partial(_loss_of_stage, reduction="sum" if sums else "mean")
        more: dict[str, Any] = {"loss_fn": loss, "scale_grads": not sums}
        SCHEDULES.append(
            Schedule1F1B(parts[0], args.micro_batches, **more)
            if len(parts) == 1
            else ScheduleInterleaved1F1B(parts, args.micro_batches, **more)
        )
    tokens, labels = batch_of(args, step, 0, worker, workers)
    SCHEDULES[0].step(*[tokens] * (stage == 0), **{"target": labels} if stage else {})
    if args.tied and args.fault != "tied_apart":
        dist.all_reduce((model.head if stage else model.embed).weight.grad)  # type: ignore[union-attr]


def stages_of(args: argparse.Namespace) -> int:
    """Return the number of a pipeline's stages: several on each rank, if they are interleaved."""
    return STAGES * (2 if args.layout == "pp_interleaved" else 1)


def _loss_of_stage(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def step_without_gradient(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]]
) -> None:
    """Call the optimizer with zero gradients and a learning rate of 0."""
    for _, p in named:
        p.grad = torch.zeros_like(p)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def round_moments(optimizer: torch.optim.Optimizer) -> None:
    """Round Adam's moments to bfloat16."""
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].copy_(state[key].to(torch.bfloat16).to(state[key].dtype))


def _with_twice_the_update(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, nn.Parameter]],
    before: dict[str, Tensor],
) -> None:
    """Step, and move one layer twice as far, inside of the optimizer's call."""

    def double(*_: object) -> None:
        with torch.no_grad():
            for name, p in named:
                if name in before:
                    local(p).add_(local(p) - before[name])

    hook = optimizer.register_step_post_hook(double)
    try:
        optimizer.step()
    finally:
        hook.remove()


def backward(
    args: argparse.Namespace,
    wrapped: nn.Module,
    tokens: Tensor,
    labels: Tensor,
    workers: int,
    *,
    reduce: bool,
) -> None:
    """Add the gradient of a micro-batch."""
    ddp = isinstance(wrapped, nn.parallel.DistributedDataParallel)
    synchronise: Any = getattr(wrapped, "set_requires_gradient_sync", None)
    if synchronise is not None:
        synchronise(reduce)
    context: Callable[[], Any] = torch.enable_grad if reduce or not ddp else wrapped.no_sync  # type: ignore[assignment]
    with context():
        with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
            logits = wrapped(tokens)
        logits = logits.float().flatten(0, 1)
        if args.uneven and args.fault != "token_mean":
            total = (labels != -100).sum()
            if workers > 1:
                dist.all_reduce(total)
            total = total * args.accumulate  # micro-batches of a step are as large on average
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") * workers / total
            loss.backward()
            return
        loss = F.cross_entropy(logits, labels.flatten(), label_smoothing=args.smoothing)
        if args.fault == "smoothing_of_part":
            part = logits.log_softmax(-1)[:, : VOCABULARY // 2]
            loss = F.cross_entropy(logits, labels.flatten()) * 0.9 - 0.1 * part.mean()
        if args.fault == "loss_times_workers":
            loss = loss * workers
        if args.fault != "loss_not_divided":
            loss = loss / args.accumulate
        loss.backward()


if __name__ == "__main__":
    main()
