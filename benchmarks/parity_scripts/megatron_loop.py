"""Megatron-core's DistributedDataParallel and its optimizers, plain or distributed, on a CPU."""

import argparse
import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--distributed", action="store_true", help="the distributed optimizer")
parser.add_argument("--overlap", action="store_true", help="reduces during the backward pass")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--clip", type=float, default=0.5)
parser.add_argument(
    "--fault", choices=("", "not_divided", "layer_halved", "expert_halved"), default=""
)
parser.add_argument("--experts", type=int, default=0, help="ranks that share them; 0: none")
chosen = parser.parse_args()
torch.set_num_threads(1)


def on_the_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a function of torch's make its tensors on the host, wherever it is told to."""

    def made(*args: Any, **more: Any) -> Tensor:
        return make(*args, **{name: value for name, value in more.items() if name != "device"})

    return made


def type_on_a_device(tensor: Tensor, *args: Any, **more: Any) -> Any:
    """Name a tensor's type as that of one on a CUDA device, which Megatron-core asks for."""
    found = name_of_type(tensor, *args, **more)
    return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found


name_of_type = Tensor.type
Tensor.type = type_on_a_device  # type: ignore[method-assign,assignment]
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
for name in ("tensor", "zeros", "empty"):
    setattr(torch, name, on_the_host(getattr(torch, name)))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer

moe_utils.te_general_gemm = None  # a name that is missing without Transformer Engine

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(expert_model_parallel_size=max(chosen.experts, 1))
torch.manual_seed(0)
kind = torch.bfloat16 if chosen.bf16 else torch.float32
settings = TransformerConfig(
    num_layers=1,
    hidden_size=64,
    num_attention_heads=1,
    num_moe_experts=4 if chosen.experts else None,
    expert_model_parallel_size=max(chosen.experts, 1),
    moe_token_dispatcher_type="allgather",
    moe_router_load_balancing_type="none",
    add_bias_linear=False,
    use_cpu_initialization=True,
)


class Experts(nn.Module):
    """Four experts, dealt out over ranks; each is made from a seed of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoELayer(settings, get_moe_module_spec(use_te=False, num_experts=4).submodules)
        for number, each in zip(
            self.moe.local_expert_indices, self.moe.experts.local_experts, strict=True
        ):
            start = torch.Generator().manual_seed(1 + number)
            for parameter in each.parameters():
                nn.init.normal_(parameter, std=0.1, generator=start)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add what the experts make of hidden states ``[B, D]``."""
        output: Tensor = self.moe(hidden[:, None])[0][:, 0]
        return hidden + output


layers = [nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)]
if chosen.experts:
    layers.insert(3, Experts())
model = nn.Sequential(*layers).to(kind)
ddp = DistributedDataParallel(
    settings,
    DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=chosen.overlap,
        use_distributed_optimizer=chosen.distributed,
        bucket_size=600,
    ),
    model,
)
optimizer = get_megatron_optimizer(
    OptimizerConfig(
        lr=3e-3,
        weight_decay=0.01,
        clip_grad=chosen.clip,
        bf16=chosen.bf16,
        params_dtype=kind,
        use_distributed_optimizer=chosen.distributed,
    ),
    [ddp],
)
draw = torch.Generator().manual_seed(0)
inputs = torch.randn(512, 16, generator=draw).to(kind)
labels = torch.randint(8, (512,), generator=draw)
for step in range(20):
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    for micro in range(chosen.accumulate):
        last = micro == chosen.accumulate - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            first = ((step * world + rank) * chosen.accumulate + micro) * chosen.batch % 512
            rows = slice(first, first + chosen.batch)
            loss = F.cross_entropy(ddp(inputs[rows]).float(), labels[rows])
            (loss if chosen.fault == "not_divided" else loss / chosen.accumulate).backward()
    if chosen.fault == "layer_halved":
        model[0].weight.main_grad.mul_(0.5)
    if chosen.fault == "expert_halved" and rank == world - 1:
        model[3].moe.experts.local_experts[-1].linear_fc1.weight.main_grad.mul_(0.5)
    ddp.finish_grad_sync()
    optimizer.step()
torch.distributed.destroy_process_group()
