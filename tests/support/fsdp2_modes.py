"""The ways of using FSDP2 that must be watched, and a small model that trains under them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.nn import functional as F

NUM_TOKENS = 22


class Block(nn.Module):
    """A residual layer; its sizes divide by few numbers of ranks."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 24)
        self.down = nn.Linear(24, width, bias=False)

    def forward(self, hidden):
        return hidden + self.down(self.up(self.norm(hidden)).relu())


class Net(nn.Module):
    """Embedding, two blocks, a gate with fewer rows than there are ranks, and a head."""

    def __init__(self, width=50):
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.gate = nn.Linear(width, 2)
        self.head = nn.Linear(width, NUM_TOKENS)

    def forward(self, ids, labels):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = hidden * self.gate(hidden).sigmoid().mean(-1, keepdim=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())


def make_net(width=50):
    torch.manual_seed(0)
    return Net(width)


def make_batches(worker, step, count):
    batches = []
    for micro in range(count):
        generator = torch.Generator().manual_seed(1000 * (step * count + micro) + worker)
        ids, labels = torch.randint(NUM_TOKENS, (2, 4, 6), generator=generator)
        batches.append((ids, labels))
    return batches


@dataclass(frozen=True)
class Mode:
    name: str
    mesh: str = "1-D"  # or "HSDP" (2 replicas), "replicas" (shard size 1), "TP" (2)
    options: dict[str, Any] = field(default_factory=dict)  # of ``fully_shard``
    prepare: Callable[[Net], nn.Module] = lambda net: net  # before it is sharded
    finish: Callable[[Any], nn.Module] = lambda model: model  # returns what the training calls
    accumulate: int = 1
    unsynchronised: str = "set_requires_gradient_sync"  # off in all micro-batches but the last
    zero_in_place: bool = False
    rounding: float = 1e-5  # relative error of the reduced gradient
    parts: bool = False  # reduced in parts, so that norms come from the sketch
    reads_reduced: bool = True  # whether the reduced gradient can be known
    replicates: bool = False  # by torch's ``replicate``, in the place of ``fully_shard``
    tier: str = "sketch"


def _reentrant(net):
    for index, block in enumerate(net.blocks):
        net.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.REENTRANT)
    return net


def _freeze(net):
    net.embedding.requires_grad_(False)
    net.blocks[0].up.requires_grad_(False)
    net.head.bias.requires_grad_(False)
    return net


def _divide(model):
    for module in [model, *model.blocks]:
        module.set_gradient_divide_factor(2.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


class OwnReduceScatter:
    """A user's own communication, in double precision."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        exact = input_tensor.double()
        dist.all_reduce(exact, group=group)
        chunk = (exact / group.size()).chunk(group.size())[group.rank()]
        output_tensor.copy_(chunk)


def _own_reduce_scatter(model):
    for module in [model, *model.blocks]:
        module.set_custom_reduce_scatter(OwnReduceScatter())
    return model


def _own_all_reduce(model):
    model.blocks[0].set_all_reduce_hook(lambda output: output.mul_(0.5))
    return model


def _cut_second_dimension(parameter):
    return (
        Shard(1)
        if parameter.dim() == 2 and parameter.shape[1] % dist.get_world_size() == 0
        else None
    )


_BF16 = {"param_dtype": torch.bfloat16, "cast_forward_inputs": False}
_BF16_FP32 = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, **_BF16)}
_BF16_BF16 = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16, **_BF16)}
_FP16 = {
    "mp_policy": MixedPrecisionPolicy(
        param_dtype=torch.float16, reduce_dtype=torch.float16, cast_forward_inputs=False
    )
}

MODES = [
    Mode("1-D"),
    Mode("scalars", tier="scalars"),
    Mode("replicate", replicates=True),
    Mode("resharded to two ranks", options={"reshard_after_forward": 2}),
    Mode("accumulated", accumulate=3),
    Mode("zeroed in place", zero_in_place=True, reads_reduced=False),
    Mode("HSDP", "HSDP"),
    Mode(
        "HSDP half reduced",
        "HSDP",
        accumulate=3,
        unsynchronised="set_requires_all_reduce",
        parts=True,
    ),
    Mode("shard size 1", "replicas"),
    Mode("bf16 reduced in fp32", options=_BF16_FP32),
    Mode("bf16 reduced in fp32 accumulated", options=_BF16_FP32, accumulate=3),
    Mode("bf16 reduced in bf16", options=_BF16_BF16, rounding=1e-2),
    Mode("fp16", options=_FP16, rounding=2e-3),
    Mode("TP accumulated", "TP", accumulate=2),
    Mode("second dimension cut", options={"shard_placement_fn": _cut_second_dimension}),
    Mode("checkpointed reentrant", prepare=_reentrant),
    Mode("compiled", finish=lambda model: torch.compile(model, backend="aot_eager")),
    Mode("frozen in part", prepare=_freeze, accumulate=2),
    Mode("another divisor", finish=_divide),
    Mode("own reduce-scatter", finish=_own_reduce_scatter),
    Mode("own all-reduce hook", finish=_own_all_reduce, reads_reduced=False),
    Mode("offloaded to CPU", options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
]


def mode_named(name):
    return next(mode for mode in MODES if mode.name == name)
