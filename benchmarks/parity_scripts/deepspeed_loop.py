"""DeepSpeed's engine around a small model: ZeRO 0 to 3, accumulation and clipping."""

import argparse
import os
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--clip", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0, help="of the initialisation")
parser.add_argument("--experts", type=int, default=0, help="ranks that share them; 0: none")
chosen = parser.parse_args()
torch.set_num_threads(1)

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles nothing
deepspeed.init_distributed("gloo", verbose=False)


class Experts(nn.Module):
    """Four experts, dealt out over ranks; each is made from a seed of its own."""

    def __init__(self) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))
        ranks = chosen.experts
        self.moe = MoE(
            64,
            expert,
            num_experts=4,
            ep_size=ranks,
            k=1,
            min_capacity=0,
            drop_tokens=False,
            use_rts=False,
        )
        own = self.moe.deepspeed_moe.experts.deepspeed_experts
        first = torch.distributed.get_rank() % ranks * len(own)
        for number, each in enumerate(own):
            start = torch.Generator().manual_seed(1 + first + number)
            for parameter in each.parameters():
                nn.init.normal_(parameter, std=0.1, generator=start)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add what the experts make of hidden states ``[B, D]``."""
        output: Tensor = self.moe(hidden)[0]
        return hidden + output


draw = torch.Generator().manual_seed(0)
inputs = torch.randn(512, 16, generator=draw)
labels = torch.randint(8, (512,), generator=draw)
torch.manual_seed(chosen.seed)
layers = [nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)]
if chosen.experts:
    layers.insert(3, Experts())
model = nn.Sequential(*layers)
groups: Any = model.parameters()
if chosen.experts:
    trained = {"params": list(groups), "name": "all"}
    groups = split_params_into_different_moe_groups_for_optimizer(trained)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(groups, lr=3e-3),
    config={
        "train_micro_batch_size_per_gpu": chosen.batch,
        "gradient_accumulation_steps": chosen.accumulate,
        "gradient_clipping": chosen.clip,
        "zero_optimization": {"stage": chosen.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    },
)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for step in range(20 * chosen.accumulate):
    rows = slice(first := (step * world + rank) * chosen.batch % 512, first + chosen.batch)
    engine.backward(F.cross_entropy(engine(inputs[rows]), labels[rows]))
    engine.step()
