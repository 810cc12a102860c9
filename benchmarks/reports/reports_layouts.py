"""What r69 to r108 share: one training on one process or on several, its options, its end."""

import argparse
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def options(steps: int = 80, micro_batches: int = 1) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--right", action="store_true", help="train with the fault repaired")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--micro-batches", type=int, default=micro_batches, help="of an update")
    parser.add_argument("--folder", type=Path, help="for checkpoints of two launches")
    parser.add_argument("--save-at", type=int, default=steps // 2, help="update in which to stop")
    torch.set_num_threads(1)
    return parser.parse_args()


def begin(seed: int = 0) -> tuple[int, int]:
    """Join the other ranks, if there are any; give the rank and their number."""
    torch.manual_seed(seed)
    if "RANK" not in os.environ:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def data_parallel(model: nn.Module) -> nn.Module:
    """Wrap the model where there are several ranks."""
    return DistributedDataParallel(model) if dist.is_initialized() else model


def not_reduced(wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Leave the reduction out in all micro-batches but the last one."""
    if last or not isinstance(wrapped, DistributedDataParallel):
        return nullcontext()
    return wrapped.no_sync()


def sum_over_ranks(value: Tensor) -> Tensor:
    """Sum in place, without gradient."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def end(model: nn.Module, loss: Tensor) -> None:
    """Print the last loss and the sum of all parameters with all digits, on rank 0."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    total = sum(p.detach().double().sum().item() for p in whole)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"last loss {loss.item():.6f}, sum of parameters {total:.17g}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
