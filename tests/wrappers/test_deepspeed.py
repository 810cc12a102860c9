"""DeepSpeed engines on real ranks: the gradient is recorded as it is, and no bit changes."""

import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.bus.finding import Severity
from rankscope.wrappers.deepspeed import is_deepspeed
from support import loops
from support.deepspeed_modes import (
    MODES,
    Mode,
    accumulated,
    import_deepspeed,
    make_engine,
    micro_gradients,
    run_micro_batch,
    state_of,
    train_step,
)
from support.ranks import on_ranks
from support.recorded import SKETCH_NORM_ERROR, WIDTH, Recorded, Truth

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

NUM_RANKS, STEPS = 2, 3
ROUNDING = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 2e-3}  # of a reduction in this dtype
ACCUMULATED = Mode("accumulated", 0, 2)
IN_PARTS = Mode("in parts", 2, 2, in_parts=True)
REPLACED = (
    "_backward_prologue", "_backward_epilogue", "allreduce_gradients", "_take_model_step",
)  # fmt: skip


watch = partial(loops.watch, sketch_width=WIDTH, reduced="sketch", canary=False, plan=loops.PLAN)


def truth_of(rank, mode, step, engine):
    with torch.random.fork_rng(devices=[]):
        micro = micro_gradients(rank, mode, step, engine)
    total = accumulated(mode, micro)
    gradient = {n: g.double().flatten().numpy() / mode.loss_scale for n, g in total.items()}
    norms = [torch.cat([g.double().flatten() for g in part.values()]).norm() for part in micro]
    return Truth(gradient, [float(norm) * mode.accumulate / mode.loss_scale for norm in norms])


def train(rank, mode, folder):
    """Train watched, but for the last step, and unwatched; return the truth and all bits."""
    engine = make_engine(rank, mode, dropout=0.0)
    truths = []
    with watch(engine, run_dir=f"{folder}/{mode.name}"):
        for step in range(STEPS - 1):
            truths.append(truth_of(rank, mode, step, engine))
            train_step(rank, mode, step, engine)
    train_step(rank, mode, STEPS - 1, engine)
    left = sum(len(p._backward_hooks or ()) for p in engine.module.parameters())
    left += sum(name in vars(engine) for name in REPLACED)
    alone = make_engine(rank, mode, dropout=0.0)
    for step in range(STEPS):
        train_step(rank, mode, step, alone)
    states = []
    for each in (engine, alone):
        states.append({name: value.tobytes() for name, value in state_of(each).items()})
        each.destroy()
    return {"truths": truths, "states": states, "left": left}


def watch_between_micro_batches(rank, mode, folder):
    engine = make_engine(rank, mode, dropout=0.0)
    run_micro_batch(rank, mode, 0, 0, engine)
    engine.step()
    with watch(engine, run_dir=f"{folder}/late {mode.name}"):
        truths = [truth_of(rank, mode, 0, engine)]
        run_micro_batch(rank, mode, 0, 1, engine)
        engine.step()
        truths.append(truth_of(rank, mode, 1, engine))
        train_step(rank, mode, 1, engine)
    return truths


def raise_in_a_backward_pass(rank, mode, folder):
    """The next step is on top of what the failed pass has left."""
    engine = make_engine(rank, mode, dropout=0.0)
    with watch(engine, run_dir=f"{folder}/raised"):
        handle = engine.module.embedding.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_micro_batch(rank, mode, 0, 0, engine)
        handle.remove()
        train_step(rank, mode, 1, engine)


def read_less_of_the_reduced_gradient(rank, mode, folder):
    engine = make_engine(rank, mode, dropout=0.0)
    for reduced in ("norm", "off"):
        with watch(engine, run_dir=f"{folder}/{reduced} {mode.name}", reduced=reduced):
            train_step(rank, mode, 0, engine)


def look_before_importing():
    assert not is_deepspeed(nn.Linear(2, 2))
    assert "deepspeed" not in sys.modules
    import_deepspeed()


def do_all(rank, folder):
    seen = {mode.name: train(rank, mode, folder) for mode in MODES}
    late = {}
    for mode in (ACCUMULATED, IN_PARTS):
        late[mode.name] = watch_between_micro_batches(rank, mode, folder)
        read_less_of_the_reduced_gradient(rank, mode, folder)
    raise_in_a_backward_pass(rank, ACCUMULATED, folder)
    assert not is_deepspeed(make_engine(rank, ACCUMULATED, dropout=0.0).module)
    dist.barrier()
    return {**seen, "late": late}


trained = on_ranks(do_all, NUM_RANKS, timeout=280, prepare=look_before_importing)


def check_what_passes_find(recorded, mode):
    """What a pass finds is what the one before has left."""
    unknown = mode.stage >= 2 and (mode.style == "coalesce" or "offload_optimizer" in mode.zero)
    changes_TW = recorded.per_worker("accumulator_change")
    if mode.accumulate == 1 or unknown:
        assert np.isnan(changes_TW).all()
    else:
        assert (changes_TW < 1e-6).all()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_what_is_recorded_is_the_gradient_before_and_after_the_reduction(trained, mode):
    ranks, folder = trained
    run = Run.open(folder / mode.name)
    recorded = Recorded(run, [of_rank[mode.name]["truths"] for of_rank in ranks])
    assert len(recorded.steps) == recorded.num_steps == STEPS - 1
    estimated = mode.in_parts and mode.accumulate > 1
    assert (recorded.per_worker("grad_norm_estimated") == estimated).all()
    recorded.check_norms(5 * SKETCH_NORM_ERROR if estimated else 1e-6)
    recorded.check_groups(8 * SKETCH_NORM_ERROR if estimated else 1e-6)
    assert np.abs(recorded.cosine_errors()).max() <= 4 / WIDTH**0.5
    recorded.check_micro_norms(*((1e-6, 1e-6) if mode.in_parts else (1e-6, 5 * SKETCH_NORM_ERROR)))
    check_what_passes_find(recorded, mode)
    if "offload_optimizer" in mode.zero:
        assert np.isnan(recorded.column("grad_norm_reduced")).all()
    else:
        recorded.check_reduced(ROUNDING[mode.dtype])
    assert (recorded.per_worker("grad_carried_over") == 0).all()
    assert (recorded.per_worker("optimizer_steps")[:-1] >= 1).all()
    assert [f for f in run.findings() if f.severity > Severity.NOTE] == []


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_every_bit_is_the_same_and_nothing_is_left_behind(trained, mode):
    for of_rank in trained[0]:
        watched, alone = of_rank[mode.name]["states"]
        assert any(name.startswith("exp_avg") for name in alone)
        assert watched == alone
        assert of_rank[mode.name]["left"] == 0


@pytest.mark.parametrize("mode", [ACCUMULATED, IN_PARTS], ids=lambda mode: mode.name)
def test_a_step_that_had_begun_before_is_flagged_or_left_out(trained, mode):
    ranks, folder = trained
    run = Run.open(folder / f"late {mode.name}")
    recorded = Recorded(run, [of_rank["late"][mode.name] for of_rank in ranks])
    assert recorded.steps.tolist() == [1]
    flags_TW = recorded.per_worker("grad_carried_over")
    assert (flags_TW[0] == (mode is ACCUMULATED)).all()
    recorded.check_norms(5 * SKETCH_NORM_ERROR if mode.in_parts else 1e-6)


def test_a_step_after_a_backward_pass_that_raised_is_flagged(trained):
    run = Run.open(trained[1] / "raised")
    assert run.columns(Table.STEPS, "observed")["observed"].tolist() == [False]
    assert (run.per_worker("grad_carried_over")[1] == 1).all()


@pytest.mark.parametrize("mode", [ACCUMULATED, IN_PARTS], ids=lambda mode: mode.name)
def test_the_reduced_gradient_is_read_as_far_as_asked(trained, mode):
    norm, off = (Run.open(trained[1] / f"{reduced} {mode.name}") for reduced in ("norm", "off"))
    columns = norm.columns(Table.STEPS, "grad_norm_reduced", "reduction_residual")
    assert columns["grad_norm_reduced"] > 0
    assert np.isnan(columns["reduction_residual"])
    assert np.isnan(off.columns(Table.STEPS, "grad_norm_reduced")["grad_norm_reduced"])
