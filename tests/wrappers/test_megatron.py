"""Megatron-core's DistributedDataParallel, watched on real ranks on the CPU."""

import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from rankscope.wrappers.megatron import is_megatron
from support.megatron_training import MISSING, MODES, MegatronLoop, Mode, import_megatron, make_ddp
from support.ranks import on_ranks
from support.recorded import WIDTH, Recorded

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(MISSING, reason="megatron-core is not installed"),
]

NUM_RANKS, STEPS = 3, 3
PLAIN = MODES[0]
ROUNDING = 1e-5  # of sums in float32, also of gradients in bf16


def train(rank, mode, folder):
    reduced = "norm" if mode.tier == "scalars" else "sketch"
    options = {"tier": mode.tier, "reduced": reduced, "sketch_width": WIDTH}
    loop = MegatronLoop(rank, mode, f"{folder}/{mode.name}", **options)
    truths = []
    for step in range(STEPS):
        truths.append(loop.truth(step))
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


def corrupt_the_reduction(rank, folder):
    """Double what the reduce-scatter of the first buckets gives one worker."""

    def corrupt(ddp):
        group = ddp.bucket_groups[0]
        reduce = group.start_grad_sync

        def reduce_wrongly(**options):
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


def do_all(rank, folder):
    seen = {mode.name: train(rank, mode, folder) for mode in MODES}
    corrupt_the_reduction(rank, folder)
    ddp = make_ddp(nn.Linear(2, 2), PLAIN)
    seen["recognised"] = [is_megatron(ddp), is_megatron(ddp.module)]
    dist.barrier()
    return seen


def look_before_importing():
    assert not is_megatron(nn.Linear(2, 2))
    assert "megatron" not in sys.modules
    import_megatron()


trained = on_ranks(do_all, NUM_RANKS, timeout=280, prepare=look_before_importing)


def check_what_is_compared_of_the_state(run, mode):
    """Bits of shards, and of their gradients, belong to one worker."""
    by_parameter = not mode.sharded
    for kind, known in {"param": True, "optimizer": by_parameter, "applied": by_parameter}.items():
        told = run.table(Table.WORKERS).column(f"{kind}_digest").to_pylist()
        assert any(told) == known, (kind, told)


def check_directions(recorded, mode):
    if mode.tier == "sketch":
        assert np.abs(recorded.cosine_errors()).max() <= 4 / WIDTH**0.5
        recorded.check_micro_norms(ROUNDING, 0.1)
    else:
        assert np.isnan(recorded.column("cosine_mean")).all()
        assert np.isnan(recorded.run.columns(Table.MICRO, "grad_norm")["grad_norm"]).all()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_healthy_training_is_measured_as_it_is_and_left_as_it_is(trained, mode):
    ranks, folder = trained
    run = Run.open(folder / mode.name)
    recorded = Recorded(run, [seen[mode.name]["truths"] for seen in ranks])
    recorded.check_norms(ROUNDING)
    recorded.check_groups(ROUNDING)
    recorded.check_reduced(ROUNDING, sketched=mode.tier == "sketch")
    check_directions(recorded, mode)
    assert run.per_worker("optimizer_steps")[1].tolist() == [[1] * NUM_RANKS] * STEPS
    assert run.per_worker("lr")[1].tolist() == [[0.05] * NUM_RANKS] * STEPS
    check_what_is_compared_of_the_state(run, mode)
    close = 1e-2 if mode.dtype is torch.bfloat16 else ROUNDING
    np.testing.assert_allclose(recorded.per_worker("loss"), recorded.truth("loss"), rtol=close)
    assert [f.explanation for f in run.findings() if f.severity > Severity.NOTE] == []
    assert run.status == "complete"
    for seen in (of_rank[mode.name] for of_rank in ranks):
        watched, alone = seen["bits"]
        assert watched == alone
        assert (seen["warnings"], seen["left"]) == ([], 0)


def test_a_reduction_that_errs_is_found(trained):
    found = {finding.cause: finding for finding in Run.open(trained[1] / "corrupted").findings()}
    assert found["numerics.reduction_error"].severity >= Severity.WARNING
    assert found["numerics.reduction_error"].ranks == (0, 1, 2)


def test_wrappers_are_recognised_without_an_import(trained):
    for seen in trained[0]:
        assert seen["recognised"] == [True, False]
