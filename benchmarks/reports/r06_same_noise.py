"""R06, lingbot-vla-v2#41: one seed on all ranks, so that they draw the same noise and times."""

import torch
from reports_common import begin, end, options
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACTIONS, SIGHT = 16, 32

chosen = options()
rank, world = begin(seed=3)
first = nn.Linear(ACTIONS + SIGHT + 1, 64)
flow = nn.Sequential(first, nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, ACTIONS))
draw = torch.Generator().manual_seed(4)
sight = torch.randn(4096, SIGHT, generator=draw)
actions = torch.tanh(sight @ torch.randn(SIGHT, ACTIONS, generator=draw))
for layer in list(flow.children())[::2]:
    fully_shard(layer)
fully_shard(flow)
optimizer = torch.optim.AdamW(flow.parameters(), lr=2e-3)
both = TensorDataset(sight, actions)
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(both, seed=1)
loader = DataLoader(both, batch_size=16, sampler=sampler, drop_last=True)
torch.manual_seed(3 + rank if chosen.right else 3)
for _, (seen, action) in zip(range(chosen.steps), loader, strict=False):
    noise = torch.randn_like(action)
    time = torch.distributions.Beta(1.5, 1.0).sample((len(action), 1))
    mixed = time * noise + (1 - time) * action
    speed = flow(torch.cat([mixed, seen, time], -1))
    loss = (speed - (noise - action)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
end(flow, loss)
