"""What ``fixed_order`` makes of DDP's gradients in every mode, and of passes that go wrong."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rankscope
from support.ddp import (
    SMALL_BUCKETS,
    flat_gradient,
    gather_rows,
    local_gradient,
    make_ddp,
    watch_gradients,
)
from support.fixed_order import in_order
from support.models import make_batch, make_model
from support.modes import MODES, Mode, train_step
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 4
# In the first step of a static graph DDP numbers its buckets in another way.
MANY_STATIC = Mode("static graph, small buckets", {"static_graph": True, "bucket_cap_mb": 0.001})
KEPT = {"plain", "bucket views zeroed in place", "no_sync", "used on one rank"}
ALL_MODES = [*(mode for mode in MODES if mode.name in KEPT), MANY_STATIC]


def train_in_mode(rank: int, mode: Mode) -> list[dict[str, Any]]:
    model, ddp, optimizer = make_ddp(mode)
    rankscope.fixed_order(ddp)
    reduced = watch_gradients(optimizer, model)
    steps = []
    for step in range(STEPS):
        local = local_gradient(rank, mode, step, model)
        train_step(rank, mode, step, ddp, optimizer)
        steps.append({"local": gather_rows(local), "reduced": reduced[step]})
    return steps


def train_in_all_modes(rank: int) -> dict[str, list[dict[str, Any]]]:
    return {mode.name: train_in_mode(rank, mode) for mode in ALL_MODES}


@pytest.fixture(scope="module")
def trained():
    return run_ranks(train_in_all_modes, 3)


@pytest.mark.parametrize("mode", ALL_MODES, ids=lambda mode: mode.name)
class TestInEveryMode:
    def test_the_reduced_gradient_is_the_sum_in_rank_order(self, trained, mode):
        for step in trained[0][mode.name]:
            assert np.array_equal(step["reduced"], in_order(step["local"]))
            assert step["reduced"].any()

    def test_every_rank_holds_the_same_bits(self, trained, mode):
        for rank in trained[1:]:
            for step, first in zip(rank[mode.name], trained[0][mode.name], strict=True):
                assert step["reduced"].tobytes() == first["reduced"].tobytes()


def train(rank: int, *, fixed: bool) -> bytes:
    model, ddp, optimizer = make_ddp(SMALL_BUCKETS)
    if fixed:
        rankscope.fixed_order(ddp)
    for step in range(2 * STEPS):
        train_step(rank, SMALL_BUCKETS, step, ddp, optimizer)
    assert len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")) > 2
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()


def compare_bits(rank: int) -> list[bytes]:
    return [train(rank, fixed=fixed) for fixed in (False, True)]


def test_two_workers_get_the_very_bits_of_plain_ddp():
    for plain, fixed in run_ranks(compare_bits, 2):
        assert plain == fixed


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


def test_a_value_that_is_not_finite_stays_where_it_is():
    for result in run_ranks(poison, 3)[0]:
        poisoned = ~np.isfinite(result["reduced"])
        assert poisoned.sum() == 1
        assert np.array_equal(result["reduced"][~poisoned], result["clean"][~poisoned])


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


def test_training_goes_on_after_a_backward_pass_that_raised():
    for rank in run_ranks(interrupt, 2):
        assert np.array_equal(rank["reduced"], in_order(rank["local"]))
