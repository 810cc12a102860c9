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
from support.ddp import flat_gradient, gather_rows, local_gradient, make_ddp
from support.fixed_order import in_order, rounded
from support.fsdp2_modes import mode_named
from support.fsdp2_training import start
from support.models import make_batch
from support.modes import Mode
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 3
BUCKETS = [0.001, 0.01, 25]  # MB; the gradient has 0.02
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train_ddp(rank: int, bucket: float, dtype: str) -> list[dict[str, Any]]:
    mode = Mode("", {"bucket_cap_mb": bucket})
    model, ddp, optimizer = make_ddp(mode, dtype=DTYPES[dtype])
    rankscope.fixed_order(ddp)
    steps = []
    for step in range(STEPS):
        local_WP = gather_rows(local_gradient(rank, mode, step, model).float())
        ddp(**make_batch(rank, step))["loss"].backward()
        steps.append({"local": local_WP, "reduced": flat_gradient(model).float().numpy()})
        optimizer.step()
        optimizer.zero_grad()
    return steps


def train_ddp_in_all_ways(rank: int) -> dict[str, list[list[dict[str, Any]]]]:
    return {
        dtype: [train_ddp(rank, bucket, dtype) for bucket in [*BUCKETS, BUCKETS[0]]]
        for dtype in DTYPES
    }


@pytest.fixture(scope="module")
def trained():
    return run_ranks(train_ddp_in_all_ways, 3)


@pytest.mark.parametrize("dtype", DTYPES)
class TestDDP:
    def test_the_mean_is_the_sum_in_rank_order_divided_and_rounded_once(self, trained, dtype):
        for training in trained[0][dtype]:
            for step in training:
                expected = rounded(in_order(step["local"]), dtype)
                assert np.array_equal(step["reduced"], expected)
                assert expected.any()

    def test_bits_depend_on_neither_bucket_size_nor_rank_nor_run(self, trained, dtype):
        ends = {training[-1]["reduced"].tobytes() for rank in trained for training in rank[dtype]}
        assert len(ends) == 1


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
