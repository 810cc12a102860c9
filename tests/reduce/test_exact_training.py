"""What the exact tier does to a training: the same end, whatever the measurement does."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankscope.core.direction import gram
from rankscope.errors import UnsupportedError
from rankscope.reduce import exact as exact_module
from rankscope.reduce.bucket_means import reduce_bucket
from rankscope.reduce.exact import ExactGram, check_exact
from support.exact import (
    SMALL_BUCKETS,
    gather_gram,
    gather_rows,
    local_gradient,
    make_ddp,
    unguarded,
    watch_gradients,
)
from support.modes import Mode, train_step
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 8


def train(
    rank: int,
    reduction: str,
    *,
    guarded: Any = unguarded,
    before: Callable[[int, Any], None] = lambda step, exact: None,
    mode: Mode = SMALL_BUCKETS,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Train, and return the parameters at the end and what each step's share was."""
    model, ddp, optimizer = make_ddp(mode, dtype=dtype)
    exact = ExactGram.register(ddp, guarded) if reduction == "exact" else None
    shares = []
    for step in range(steps):
        before(step, exact)
        train_step(rank, mode, step, ddp, optimizer)
        share = None if exact is None else exact.take_gram()
        shares.append(None if share is None else share.numpy())
    log = ddp._get_ddp_logging_data()
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "parameters": parameters.float().numpy(),
        "shares": shares,
        "num_buckets": len(log["rebuilt_bucket_sizes"].split(",")) if steps > 1 else 1,
    }


def compare_trainings(rank: int) -> dict[str, Any]:
    def release(step: int, exact: ExactGram) -> None:
        if step == 3:
            exact.release()

    def look_every_other(step: int, exact: ExactGram) -> None:
        exact.measure = step % 2 == 0

    return {
        "ddp": train(rank, "ddp"),
        "exact": train(rank, "exact"),
        "again": train(rank, "exact"),
        "released": train(rank, "exact", before=release),
        "every other": train(rank, "exact", before=look_every_other),
        "failing": train_with_a_fault(rank),
        "bf16": train(rank, "exact", dtype=torch.bfloat16),
        "bf16 ddp": train(rank, "ddp", dtype=torch.bfloat16),
    }


def train_with_a_fault(rank: int) -> dict[str, Any]:
    """Let the measurement raise in the middle of step 2, on the last rank only."""
    failing = False

    def before(step: int, exact: ExactGram) -> None:
        nonlocal failing
        failing = step == 2 and rank == dist.get_world_size() - 1

    def add(share: Any, gradients_WN: Tensor) -> None:
        if failing and share.num_shown > 500:
            raise RuntimeError("the monitor is broken")
        healthy(share, gradients_WN)

    def guarded(work: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):
            work(*args)

    healthy = exact_module._Share.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_module._Share, "add", add)
        return train(rank, "exact", guarded=guarded, before=before)


@pytest.fixture(scope="module")
def compared():
    return run_ranks(compare_trainings, 3)


class TestTraining:
    def test_ends_where_plain_ddp_does_up_to_rounding(self, compared):
        for rank in compared:
            exact, ddp = rank["exact"]["parameters"], rank["ddp"]["parameters"]
            assert np.linalg.norm(exact - ddp) <= 1e-6 * np.linalg.norm(ddp)
            exact, ddp = rank["bf16"]["parameters"], rank["bf16 ddp"]["parameters"]
            assert np.linalg.norm(exact - ddp) <= 1e-2 * np.linalg.norm(ddp)

    @pytest.mark.parametrize("other", ["again", "released", "every other", "failing"])
    def test_its_bits_do_not_depend_on_the_measurement(self, compared, other):
        expected = compared[0]["exact"]["parameters"].tobytes()
        assert {rank[other]["parameters"].tobytes() for rank in compared} == {expected}

    def test_its_buckets_were_rebuilt(self, compared):
        assert compared[0]["exact"]["num_buckets"] > 2

    @pytest.mark.parametrize(
        ("training", "missing"),
        [("released", {3, 4, 5, 6, 7}), ("every other", {1, 3, 5, 7}), ("exact", set())],
    )
    def test_steps_that_are_not_measured_have_no_share(self, compared, training, missing):
        for rank in compared:
            shares = rank[training]["shares"]
            assert {step for step, share in enumerate(shares) if share is None} == missing

    def test_a_measurement_that_fails_midway_has_no_share_on_that_rank(self, compared):
        missing = [[share is None for share in rank["failing"]["shares"]] for rank in compared]
        never = [False] * len(missing[0])
        assert missing == [never, never, [step == 2 for step in range(len(never))]]


def compare_bits(rank: int) -> list[bytes]:
    return [train(rank, reduction)["parameters"].tobytes() for reduction in ("ddp", "exact")]


def test_two_workers_get_the_very_bits_of_plain_ddp():
    for ddp, exact in run_ranks(compare_bits, 2):
        assert ddp == exact


class InterruptedPassError(Exception):
    """What a training raises in the middle of a backward pass."""


def interrupt(rank: int) -> dict[str, Any]:
    """Register late; raise between two buckets on all ranks, catch it, and train on."""
    model, ddp, optimizer = make_ddp(SMALL_BUCKETS)

    def raise_in_backward(gradient: Tensor) -> Tensor:
        raise InterruptedPassError

    for step in range(2):
        train_step(rank, SMALL_BUCKETS, step, ddp, optimizer)
    exact = ExactGram.register(ddp, unguarded)
    handle = model.embedding.weight.register_hook(raise_in_backward)
    with pytest.raises(InterruptedPassError):
        train_step(rank, SMALL_BUCKETS, 2, ddp, optimizer)
    handle.remove()
    missing = exact.take_gram() is None
    optimizer.zero_grad()
    ddp.reducer._reset_state()  # without this, DDP itself refuses to go on
    local = local_gradient(rank, SMALL_BUCKETS, 3, model)
    reduced = watch_gradients(optimizer, model)
    train_step(rank, SMALL_BUCKETS, 3, ddp, optimizer)
    return {
        "missing": missing,
        "local": gather_rows(local.double()),
        "gram": gather_gram(exact),
        "reduced": reduced[0],
    }


def test_training_goes_on_after_a_backward_pass_that_raised():
    for rank in run_ranks(interrupt, 2):
        assert rank["missing"]
        np.testing.assert_allclose(rank["gram"], gram(rank["local"]), rtol=1e-5)
        np.testing.assert_allclose(
            rank["reduced"], rank["local"].mean(axis=0), rtol=1e-5, atol=1e-9
        )


def refused(model: Any) -> str:
    with pytest.raises(UnsupportedError) as error:
        check_exact(model)
    return str(error.value)


def refuse(rank: int) -> dict[str, str]:
    linear = DistributedDataParallel(nn.Linear(3, 3))
    hooked = DistributedDataParallel(nn.Linear(3, 3))
    hooked.register_comm_hook(None, reduce_bucket)
    native = DistributedDataParallel(nn.Linear(3, 3))
    native._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(3, 3, sparse=True)))
    whole = DistributedDataParallel(nn.Linear(3, 3, dtype=torch.complex64))
    waiting = nn.Linear(3, 3)
    delayed = DistributedDataParallel(
        waiting,
        delay_all_reduce_named_params=[("bias", waiting.bias)],
        param_to_hook_all_reduce=waiting.weight,
    )
    check_exact(linear)
    messages = {
        "got delay_all_reduce_named_params": refused(delayed),
        "got Linear": refused(nn.Linear(3, 3)),
        "got one that has a hook": refused(hooked),
        "one that has a hook": refused(native),
        "got an embedding with sparse=True": refused(sparse),
        "got complex parameters": refused(whole),
    }

    def no_all_to_all(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Backend x does not support alltoall_base")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", no_all_to_all)
        with pytest.raises(UnsupportedError) as error:
            ExactGram.register(linear, unguarded)
    messages["gloo says 'Backend x does not support alltoall_base'"] = str(error.value)
    check_exact(linear)
    ExactGram.register(linear, unguarded)
    check_exact(linear)  # what is in the model already is no obstacle
    copied = copy.deepcopy(linear)
    messages["copy"] = str([state for _, state in copied._comm_hooks])
    ExactGram.register(copied, unguarded)
    return messages


def test_what_cannot_be_reduced_is_refused_in_one_sentence():
    for messages in run_ranks(refuse, 2):
        assert messages.pop("copy") == "[None]"
        for part, message in messages.items():
            assert part in message
            assert message.startswith("the exact tier needs ")
            assert message.endswith(": watch with tier='sketch' instead")
