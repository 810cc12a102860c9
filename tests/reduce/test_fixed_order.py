"""What ``fixed_order`` makes of gradients, against sums in rank order that numpy has taken."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.errors import UnsupportedError
from support.ddp import PLAIN, flat_gradient, make_ddp
from support.fsdp2_modes import mode_named
from support.fsdp2_training import start
from support.models import make_batch
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def run_out_of_data(rank: int, fixed: bool, by_initial: bool) -> list[bytes | float]:
    """Give rank 0 two batches more than rank 1, and rank 2 one more."""
    model, ddp, optimizer = make_ddp(PLAIN)
    if fixed:
        rankscope.fixed_order(ddp)
    reduced = []
    with ddp.join(divide_by_initial_world_size=by_initial):
        for step in range((4, 2, 3)[rank]):
            ddp(**make_batch(rank, step))["loss"].backward()
            reduced.append(flat_gradient(model).numpy())
            optimizer.step()
            optimizer.zero_grad()
    return reduced


@pytest.mark.parametrize("by_initial", [True, False])
def test_workers_that_run_out_of_data_count_as_ddp_counts_them(by_initial):
    plain = run_ranks(run_out_of_data, 3, False, by_initial)[0]
    fixed = run_ranks(run_out_of_data, 3, True, by_initial)[0]
    assert len(plain) == len(fixed) == 4
    for expected, mean in zip(plain, fixed, strict=True):
        np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-7)


def refused(model: nn.Module) -> str:
    with pytest.raises(UnsupportedError) as error:
        rankscope.fixed_order(model)
    return str(error.value)


def refuse(rank: int) -> dict[str, str]:
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(3, 3, sparse=True)))
    hooked = DistributedDataParallel(nn.Linear(3, 3))
    hooked.register_comm_hook(None, lambda state, bucket: None)
    native = DistributedDataParallel(nn.Linear(3, 3))
    native._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    waiting = nn.Linear(3, 3)
    delayed = DistributedDataParallel(
        waiting,
        delay_all_reduce_named_params=[("bias", waiting.bias)],
        param_to_hook_all_reduce=waiting.weight,
    )
    messages = {
        "got delay_all_reduce_named_params": refused(delayed),
        "one that has a hook": refused(native),
        "got Linear": refused(nn.Linear(3, 3)),
        "got an embedding with sparse=True": refused(sparse),
        "got complex parameters": refused(
            DistributedDataParallel(nn.Linear(3, 3, dtype=torch.complex64))
        ),
        "got one that has a hook": refused(hooked),
        "got OwnReduceScatter": refused(start(mode_named("own reduce-scatter")).model),
        "at most 2 replicas of each shard, got 3": refused(start(mode_named("shard size 1")).model),
    }

    def no_all_to_all(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Backend x does not support alltoall_base")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", no_all_to_all)
        messages["gloo says"] = refused(DistributedDataParallel(nn.Linear(3, 3)))
        messages["a backend with all-to-all"] = refused(start(mode_named("1-D")).model)
    return messages


def test_what_cannot_be_reduced_in_order_is_refused_in_one_sentence():
    for messages in run_ranks(refuse, 3):
        for part, message in messages.items():
            assert part in message
            assert message.startswith("fixed_order needs ")
            assert message.endswith(": leave the reduction as it is, or change that")
