"""A loop with DeepSpeed and two micro-batches a step: FOLDER STAGE, a stage of ZeRO."""

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles nothing
MICRO, CLASSES, WIDTH = 2, 8, 32
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, CLASSES))
truth = torch.randn(WIDTH, CLASSES)
deepspeed.init_distributed("gloo", verbose=False)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    config={
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": int(sys.argv[2])},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    },
)
torch.manual_seed(100 + dist.get_rank())
for _ in range(24):
    total = torch.zeros(())
    for _ in range(MICRO):
        inputs = torch.randn(8, WIDTH)
        loss = F.cross_entropy(engine(inputs), (inputs @ truth).argmax(-1))
        total += loss.detach() / MICRO
        engine.backward(loss)
        engine.step()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"loss {total.item() / dist.get_world_size():.6f}", flush=True)
dist.destroy_process_group()
