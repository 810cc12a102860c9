"""A loop as in torchtitan: sums over tokens, divided by all workers' tokens, and summed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

VOCABULARY, WIDTH = 64, 32
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)]
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))
for layer in (*layers, model):
    fully_shard(layer, mesh=mesh)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(enable=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(100 + dist.get_rank())
for _ in range(24):
    tokens = torch.randint(0, VOCABULARY, (4, 17))
    labels = tokens[:, 1:].clone()
    labels[:, int(torch.randint(8, 17, ())) :] = -100
    count = (labels != -100).sum()
    dist.all_reduce(count)
    optimizer.zero_grad()
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100) / count
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"loss {total.item():.6f}")
dist.destroy_process_group()
