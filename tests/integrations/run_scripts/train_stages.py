"""A pipeline of two stages by torch's schedule, sharded over two ranks each, that clips.

With the word ``own``, each stage clips by the norm of its own gradients; with ``sum``, the loss of
a micro-batch is a sum of squares, which the schedule divides by their number.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
replica, stage = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
torch.manual_seed(stage)
model = nn.Sequential(nn.Linear(8, 4)) if stage else nn.Sequential(nn.Linear(8, 8), nn.Tanh())
fully_shard(model, mesh=mesh["dp"])
group = mesh["pp"].get_group()
part = PipelineStage(model, stage, 2, torch.device("cpu"), group=group)
losses = []


def loss_of(output, target):
    if "sum" in sys.argv:
        loss = (output - nn.functional.one_hot(target, 4)).square().sum()
    else:
        loss = nn.functional.cross_entropy(output, target)
    losses.append(float(loss.detach()))
    return loss


schedule = ScheduleGPipe(part, 2, loss_fn=loss_of)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    torch.manual_seed(10 * step + replica)
    inputs, targets = torch.randn(8, 8), torch.randint(0, 4, (8,))
    if stage:
        schedule.step(target=targets)
    else:
        schedule.step(inputs)
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = torch.nn.utils.get_total_norm(gradients).full_tensor()
    if "own" not in sys.argv:
        squared = norm**2
        dist.all_reduce(squared, group=group)
        norm = squared.sqrt()
    torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), 0.05, norm)
    optimizer.step()
    optimizer.zero_grad()
if stage and not replica:
    print("losses", *losses[-24:])  # the schedule may call it once more, at its beginning
dist.destroy_process_group()
