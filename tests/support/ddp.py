"""What tests of reductions share: a small model under DDP, and gathering on real ranks."""

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support.models import make_model
from support.modes import MODES, micro_batches

SMALL_BUCKETS = next(mode for mode in MODES if mode.name == "small buckets")


def make_ddp(mode, *, dtype=torch.float32):
    model = make_model(dropout=0.0, branch=bool(mode.branch)).to(dtype)
    ddp = DistributedDataParallel(model, **mode.ddp)
    return model, ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def gather_rows(row):
    """Gather one row ``[K]`` per rank into ``[W, K]``."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row.contiguous())
    return torch.stack(rows).numpy()


def local_gradient(rank, mode, step, model):
    """Return the very bits of this rank's gradient ``[P]``, from a copy that nothing wraps."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    batches = micro_batches(rank, step, mode)
    for batch in batches:
        (alone(**batch)["loss"] / len(batches)).backward()
    return flat_gradient(alone)


def flat_gradient(model):
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.flatten() for part in parts])


def watch_gradients(optimizer, model):
    """Return a list that gets each step's reduced gradient, as the optimizer finds it."""
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(flat_gradient(model).float().numpy()))
    return seen
