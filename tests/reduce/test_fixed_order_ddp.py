from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.errors import UnsupportedError
from rankscope.lab.reductions.reduction import OrderedMean
from support.ddp import (
    SMALL_BUCKETS,
    flat_gradient,
    gather_rows,
    local_gradient,
    make_ddp,
    watch_gradients,
)
from support.fixed_order import in_order, rounded
from support.fsdp2_modes import mode_named
from support.fsdp2_training import start
from support.models import make_batch, make_model
from support.modes import MODES, Mode, train_step
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 4
# In the first step of a static graph DDP numbers its buckets in another way.
MANY_STATIC = Mode("static graph, small buckets", {"static_graph": True, "bucket_cap_mb": 0.001})
KEPT = {"plain", "bucket views zeroed in place", "no_sync", "used on one rank", MANY_STATIC.name}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IN_BUCKETS = {
    f"{dtype}, buckets of {size} MB": (Mode("", {"bucket_cap_mb": size}), dtype)
    for dtype in DTYPES
    for size in (0.001, 0.01, 25)  # the gradient has 0.02
}
SIZES = [1, 2, 5, 12, 300_007, 3]  # fewer than W, none left over, some, several blocks, small again
BUFFERS = [(t, n) for t in (torch.float32, torch.bfloat16, torch.float64) for n in SIZES]
IN_FP32 = {mode.name: (mode, "fp32") for mode in [*MODES, MANY_STATIC] if mode.name in KEPT}
CASES = IN_FP32 | IN_BUCKETS


def train_case(rank: int, mode: Mode, dtype: str) -> list[dict[str, Any]]:
    model, ddp, optimizer = make_ddp(mode, dtype=DTYPES[dtype])
    rankscope.fixed_order(ddp)
    reduced = watch_gradients(optimizer, model)
    steps = []
    for step in range(STEPS):
        local = local_gradient(rank, mode, step, model)
        train_step(rank, mode, step, ddp, optimizer)
        steps.append({"local": gather_rows(local.float()), "reduced": reduced[step]})
    return steps


def poison(rank: int) -> list[dict[str, Any]]:
    """Put an infinity, then a NaN, into one element of rank 1's gradient."""
    model, ddp, optimizer = make_ddp(SMALL_BUCKETS)
    rankscope.fixed_order(ddp)
    results = []
    for step, value in enumerate([float("inf"), float("nan")]):
        batch = make_batch(rank, step)
        ddp(**batch)["loss"].backward()
        clean = flat_gradient(model).numpy()
        optimizer.zero_grad()
        handle = model.head.bias.register_hook(
            lambda gradient, value=value: (
                gradient.index_fill(0, torch.tensor([3]), value) if rank == 1 else gradient
            )
        )
        ddp(**batch)["loss"].backward()
        handle.remove()
        results.append({"clean": clean, "reduced": flat_gradient(model).numpy()})
        optimizer.zero_grad()
        model.load_state_dict(make_model(dropout=0.0).state_dict())
    return results


def refuse(model: nn.Module, words: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        rankscope.fixed_order(model)
    message = str(error.value)
    assert words in message
    assert message.startswith("fixed_order needs ")
    assert message.endswith(": leave the reduction as it is, or change that")


def refuse_all(rank: int) -> None:
    hooked = DistributedDataParallel(nn.Linear(3, 3))
    hooked.register_comm_hook(None, lambda state, bucket: None)
    refuse(hooked, "got one that has a hook")
    native = DistributedDataParallel(nn.Linear(3, 3))
    native._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    refuse(native, "one that has a hook")
    waiting = nn.Linear(3, 3)
    late = {"delay_all_reduce_named_params": [("bias", waiting.bias)]}
    delayed = DistributedDataParallel(waiting, param_to_hook_all_reduce=waiting.weight, **late)
    refuse(delayed, "got delay_all_reduce_named_params")
    refuse(nn.Linear(3, 3), "got Linear")
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(3, 3, sparse=True)))
    refuse(sparse, "got an embedding with sparse=True")
    numbers = DistributedDataParallel(nn.Linear(3, 3, dtype=torch.complex64))
    refuse(numbers, "got complex parameters")
    refuse(start(mode_named("own reduce-scatter")).model, "got OwnReduceScatter")
    alone = start(mode_named("shard size 1")).model
    refuse(alone, "at most 2 replicas of each shard, got 3")
    error = RuntimeError("Backend x does not support alltoall_base")
    with mock.patch.object(dist, "all_to_all_single", side_effect=error):
        refuse(DistributedDataParallel(nn.Linear(3, 3)), "gloo says")
        refuse(start(mode_named("1-D")).model, "a backend with all-to-all")


def values_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * rank + size)
    return torch.randn(size, generator=generator).mul(10.0 ** (rank - 1)).to(dtype)


def average(rank: int, by_broadcast: bool) -> list[bytes]:
    """The second half is a broadcast per piece on CPUs, and an all-gather elsewhere."""
    mean = OrderedMean(dist.group.WORLD, torch.device("cpu"))
    mean._on_cpu = by_broadcast
    results = []
    for dtype, size in BUFFERS:
        exchange = mean.start(values_of(rank, size, dtype))
        mean.finish(exchange)
        results.append(as_bits(exchange.result.wait()))
    return results


def as_bits(values: Tensor) -> bytes:
    return bytes(values.view(torch.uint8).numpy())  # numpy has no bf16


def do_all(rank: int) -> dict[str, Any]:
    trained = {name: train_case(rank, *case) for name, case in CASES.items()}
    averaged = {by_broadcast: average(rank, by_broadcast) for by_broadcast in (True, False)}
    return {**trained, **averaged, "poisoned": poison(rank)}


@pytest.fixture(scope="module")
def on_three():
    return run_ranks(do_all, 3)


@pytest.mark.parametrize("name", CASES)
def test_the_mean_is_the_sum_in_rank_order_divided_and_rounded_once(on_three, name):
    for rank in on_three:
        for step in rank[name]:
            expected = rounded(in_order(step["local"]), CASES[name][1])
            assert expected.any()
            assert step["reduced"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("by_broadcast", [True, False])
def test_buffers_of_any_size_and_type_hold_the_mean_in_rank_order(on_three, by_broadcast):
    for number, (dtype, size) in enumerate(BUFFERS):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        first, *others = (values_of(rank, size, dtype).to(wide) for rank in range(3))
        expected = as_bits((sum(others, first) / 3).to(dtype))
        assert [rank[by_broadcast][number] for rank in on_three] == [expected] * 3, (dtype, size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_size_of_buckets(on_three, dtype):
    names = [name for name in IN_BUCKETS if name.startswith(dtype)]
    assert len({on_three[0][name][-1]["reduced"].tobytes() for name in names}) == 1


def test_a_value_that_is_not_finite_stays_where_it_is(on_three):
    for result in on_three[0]["poisoned"]:
        poisoned = ~np.isfinite(result["reduced"])
        assert poisoned.sum() == 1
        assert np.array_equal(result["reduced"][~poisoned], result["clean"][~poisoned])


def test_what_cannot_be_reduced_in_order_is_refused_in_one_sentence():
    run_ranks(refuse_all, 3)


def train(rank: int, *, fixed: bool) -> bytes:
    model, ddp, optimizer = make_ddp(SMALL_BUCKETS)
    if fixed:
        rankscope.fixed_order(ddp)
    for step in range(2 * STEPS):
        train_step(rank, SMALL_BUCKETS, step, ddp, optimizer)
    assert len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")) > 2
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()


class InterruptedPassError(Exception):
    """What a training raises in the middle of a backward pass."""


def interrupt(rank: int) -> dict[str, Any]:
    """Fix the order late; raise between two buckets on all ranks, catch it, and train on."""
    model, ddp, optimizer = make_ddp(SMALL_BUCKETS)

    def raise_in_backward(gradient: Tensor) -> Tensor:
        raise InterruptedPassError

    for step in range(2):
        train_step(rank, SMALL_BUCKETS, step, ddp, optimizer)
    rankscope.fixed_order(ddp)
    handle = model.embedding.weight.register_hook(raise_in_backward)
    with pytest.raises(InterruptedPassError):
        train_step(rank, SMALL_BUCKETS, 2, ddp, optimizer)
    handle.remove()
    optimizer.zero_grad()
    ddp.reducer._reset_state()  # without this, DDP itself refuses to go on
    local = local_gradient(rank, SMALL_BUCKETS, 3, model)
    reduced = watch_gradients(optimizer, model)
    train_step(rank, SMALL_BUCKETS, 3, ddp, optimizer)
    return {"local": gather_rows(local), "reduced": reduced[0]}


def do_both(rank: int) -> tuple[bytes, bytes, dict[str, Any]]:
    return train(rank, fixed=False), train(rank, fixed=True), interrupt(rank)


def test_two_workers_get_the_very_bits_of_plain_ddp_and_go_on_after_a_pass_that_raised():
    for plain, fixed, later in run_ranks(do_both, 2):
        assert plain == fixed
        assert np.array_equal(later["reduced"], in_order(later["local"]))
