"""A loop as in nanoGPT: tied weights, rows drawn at random, a schedule, clipping, decayed matrices.

The rows of a step do not depend on the layout, as they do in nanoGPT, where each rank has a seed.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4, help="rows of a micro-batch")
parser.add_argument("--accumulate", type=int, default=4, help="micro-batches of all ranks")
parser.add_argument("--bf16", action="store_true")
chosen = parser.parse_args()
VOCABULARY, CONTEXT, WIDTH, HEADS = 64, 32, 48, 4
torch.set_num_threads(1)
world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
if world > 1:
    dist.init_process_group("gloo")


class Block(nn.Module):
    """Attention of heads that one projection makes, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH, bias=False)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ln_2 = nn.LayerNorm(WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states ``[B, L, D]``."""
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (
            each.view(shape).transpose(1, 2) for each in self.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        lifted: Tensor = self.mlp(self.ln_2(x))
        return x + lifted


class GPT(nn.Module):
    """Returns logits and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits ``[B, L, V]`` and the loss."""
        x = self.wte(idx) + self.wpe.weight
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(1337)
data = torch.randint(1, 4, (4000,)).cumsum(0) * 7 % VOCABULARY
model = GPT()
decayed = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
    lr=1e-3,
    betas=(0.9, 0.95),
)
ddp = DistributedDataParallel(model) if world > 1 else model
micro_batches = chosen.accumulate // world
for step in range(20):
    rate = 1e-3 * (step + 1) / 4 if step < 4 else 1e-4 + 4.5e-4 * (1 + math.cos(step / 20))
    for group in optimizer.param_groups:
        group["lr"] = rate
    draw = torch.Generator().manual_seed(step)
    places = (chosen.accumulate * chosen.batch,)
    starts = torch.randint(len(data) - CONTEXT - 1, places, generator=draw).view(-1, chosen.batch)
    for micro in range(micro_batches):
        if world > 1:
            ddp.require_backward_grad_sync = micro == micro_batches - 1
        own = starts[rank * micro_batches + micro].tolist()
        rows = torch.stack([data[start : start + CONTEXT + 1] for start in own])
        with torch.autocast("cpu", torch.bfloat16, enabled=chosen.bf16):
            _, loss = ddp(rows[:, :-1], rows[:, 1:])
        (loss / micro_batches).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if world > 1:
    dist.destroy_process_group()
