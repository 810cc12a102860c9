"""DeepSpeed's engine around a small model: ZeRO 0 to 3, accumulation and clipping."""

import argparse
import os

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--clip", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0, help="of the initialisation")
chosen = parser.parse_args()
torch.set_num_threads(1)

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles nothing
deepspeed.init_distributed("gloo", verbose=False)
draw = torch.Generator().manual_seed(0)
inputs = torch.randn(512, 16, generator=draw)
labels = torch.randint(8, (512,), generator=draw)
torch.manual_seed(chosen.seed)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
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
