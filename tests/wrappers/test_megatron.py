"""Megatron-core's DistributedDataParallel, watched on real ranks on the CPU.

Its own code trains there once it is told where to make its tensors, but for the distributed
optimizer. Nothing here was tried on an accelerator.
"""

import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from rankscope.wrappers.megatron import (
    is_megatron,
)
from support.megatron_training import (
    MISSING,
    MODES,
    MegatronLoop,
    Mode,
    flat,
    import_megatron,
    make_ddp,
)
from support.ranks import on_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(MISSING, reason="megatron-core is not installed"),
]

NUM_RANKS, STEPS = 3, 3
PLAIN = MODES[0]
ROUNDING = 1e-5  # of sums in float32, also of gradients in bf16


def train(rank: int, mode: Mode, folder: str) -> dict[str, Any]:
    """Train twice, watched and not."""
    reduced = "norm" if mode.tier == "scalars" else "sketch"
    options = {"tier": mode.tier, "reduced": reduced}
    loop = MegatronLoop(rank, mode, f"{folder}/{mode.name}", **options)
    truths = []
    for step in range(STEPS):
        local, micro_norms, losses = loop.truth(step)
        truths.append((flat(local), micro_norms, losses))
        loop.step(step)
    loop.scope.close()
    alone = MegatronLoop(rank, mode, None)
    for step in range(STEPS):
        alone.step(step)
    return {
        "truths": truths,
        "bits": (loop.bits(), alone.bits()),
        "warnings": loop.warnings,
        "left": loop.left(),
    }


def corrupt_the_reduction(rank: int, folder: str) -> None:
    """Double what the reduce-scatter of the first buckets gives one worker."""

    def corrupt(ddp: Any) -> None:
        group = ddp.bucket_groups[0]
        reduce = group.start_grad_sync

        def reduce_wrongly(**options: Any) -> None:
            reduce(**options)
            if rank == 1:
                group.buckets[0].grad_data *= 2

        if "corrupted" not in vars(ddp):
            ddp.corrupted, group.start_grad_sync = True, reduce_wrongly

    loop = MegatronLoop(
        rank, Mode("corrupted", sharded=True), f"{folder}/corrupted", reduced="sketch"
    )
    for step in range(6):
        loop.step(step, before_sync=corrupt)
    loop.scope.close()


def do_all(rank: int, folder: str) -> dict[str, Any]:
    seen: dict[str, Any] = {mode.name: train(rank, mode, folder) for mode in MODES}
    corrupt_the_reduction(rank, folder)
    ddp = make_ddp(nn.Linear(2, 2), PLAIN)
    seen["recognised"] = [is_megatron(ddp), is_megatron(ddp.module)]
    dist.barrier()
    return seen


def look_before_importing() -> None:
    assert not is_megatron(nn.Linear(2, 2))
    assert "megatron" not in sys.modules
    import_megatron()


trained = on_ranks(do_all, NUM_RANKS, timeout=280, prepare=look_before_importing)


def gradients_of(trained, mode: Mode) -> np.ndarray:
    """Return local gradients ``[T, W, N]``, of the loss as it was before it was scaled."""
    by_rank = [[local for local, *_ in seen[mode.name]["truths"]] for seen in trained[0]]
    return np.array(by_rank).swapaxes(0, 1) / (mode.factor * mode.accumulate)


def check_bits(trained, mode):
    for seen in trained[0]:
        watched, alone = seen[mode.name]["bits"]
        assert watched == alone
        assert seen[mode.name]["warnings"] == []


def check_local_norms(run, truths):
    _, norms_TW = run.per_worker("grad_norm")
    np.testing.assert_allclose(norms_TW, np.linalg.norm(truths, axis=2), rtol=ROUNDING)


def check_cosines(run, truths, mode):
    units = truths / np.linalg.norm(truths, axis=2, keepdims=True)
    pairs = [units[:, i] * units[:, j] for i in range(NUM_RANKS) for j in range(i)]
    means_T = np.mean([pair.sum(1) for pair in pairs], axis=0)
    found_T = run.columns(Table.STEPS, "cosine_mean")["cosine_mean"]
    if mode.tier == "sketch":
        np.testing.assert_allclose(found_T, means_T, atol=0.05)  # it has 4,093 numbers
    else:
        assert np.isnan(found_T).all()


def check_the_reduced_norm(run, truths):
    norms_T = run.columns(Table.STEPS, "grad_norm_reduced")["grad_norm_reduced"]
    expected_T = np.linalg.norm(truths.mean(axis=1), axis=1)
    np.testing.assert_allclose(norms_T, expected_T, rtol=ROUNDING)


def check_micro_batches(trained, run, mode):
    told = run.columns(Table.MICRO, "grad_norm", "rank", "step")
    for rank, seen in enumerate(trained[0]):
        for step, (_, expected, _) in enumerate(seen[mode.name]["truths"]):
            norms = told["grad_norm"][(told["rank"] == rank) & (told["step"] == step)]
            norms = norms * mode.factor
            if mode.tier == "scalars":
                assert np.isnan(norms).all()
            elif mode.accumulate > 1:
                np.testing.assert_allclose(norms, expected, rtol=0.1)
                np.testing.assert_allclose(norms[0], expected[0], rtol=ROUNDING)


def check_the_optimizer(run):
    told = run.per_worker("optimizer_steps")[1]
    assert told.tolist() == [[1] * NUM_RANKS] * STEPS
    np.testing.assert_array_equal(run.per_worker("lr")[1], np.full((STEPS, NUM_RANKS), 0.05))


def check_what_is_compared_of_the_state(run, mode):
    """Bits of shards, and of their gradients, belong to one worker."""
    by_parameter = not mode.sharded
    for kind, known in {"param": True, "optimizer": by_parameter, "applied": by_parameter}.items():
        told = run.table(Table.WORKERS).column(f"{kind}_digest").to_pylist()
        assert any(told) == known, (kind, told)


def check_losses(trained, run, mode):
    _, losses_TW = run.per_worker("loss")
    by_rank = [[np.mean(losses) for *_, losses in s[mode.name]["truths"]] for s in trained[0]]
    tolerance = 1e-2 if mode.dtype is torch.bfloat16 else ROUNDING
    np.testing.assert_allclose(losses_TW, np.array(by_rank).T, rtol=tolerance)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_healthy_training_is_measured_as_it_is_and_left_as_it_is(trained, mode):
    run, truths = Run.open(trained[1] / mode.name), gradients_of(trained, mode)
    check_bits(trained, mode)
    check_local_norms(run, truths)
    check_cosines(run, truths, mode)
    check_the_reduced_norm(run, truths)
    check_micro_batches(trained, run, mode)
    check_the_optimizer(run)
    check_what_is_compared_of_the_state(run, mode)
    check_losses(trained, run, mode)
    assert [f.explanation for f in run.findings() if f.severity > Severity.NOTE] == []
    assert run.status == "complete"
    assert all(seen[mode.name]["left"] == 0 for seen in trained[0])


def test_a_reduction_that_errs_is_found(trained):
    found = {finding.cause: finding for finding in Run.open(trained[1] / "corrupted").findings()}
    assert found["numerics.reduction_error"].severity >= Severity.WARNING
    assert found["numerics.reduction_error"].ranks == (0, 1, 2)


def test_wrappers_are_recognised_without_an_import(trained):
    for seen in trained[0]:
        assert seen["recognised"] == [True, False]
