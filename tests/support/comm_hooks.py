"""Communication hooks that a user may have registered with DDP."""

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook


def register_comm_hook(ddp, name):
    if name == "all-reduce":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    elif name == "rounding":
        ddp.register_comm_hook(None, round_and_reduce)
    elif name == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        assert not name


def round_and_reduce(state, bucket):
    """Round to bfloat16 before the reduction: torch refuses its own such hook on a CPU."""
    rounded = bucket.buffer().bfloat16().float() / dist.get_world_size()
    future = dist.all_reduce(rounded, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
