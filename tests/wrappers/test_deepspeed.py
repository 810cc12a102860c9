import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from rankscope.wrappers.deepspeed import is_deepspeed
from support import deepspeed_modes as modes
from support import loops
from support.findings import faults, told
from support.models import make_batch
from support.ranks import on_ranks
from support.recorded import SKETCH_NORM_ERROR, WIDTH, Recorded, Truth

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
NUM_RANKS, STEPS = 2, 3
ROUNDING = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 2e-3}  # of a reduction in this dtype
ACCUMULATED = modes.Mode("accumulated", 0, 2)
IN_PARTS = modes.Mode("in parts", 2, 2, in_parts=True)
REPLACED = {"_backward_prologue", "_backward_epilogue", "allreduce_gradients", "_take_model_step"}


watch = partial(loops.watch, sketch_width=WIDTH, reduced="sketch", canary=False, plan=loops.PLAN)


def truth_of(rank, mode, step, engine):
    with torch.random.fork_rng(devices=[]):
        micro = modes.micro_gradients(rank, mode, step, engine)
    total = modes.accumulated(mode, micro)
    gradient = {n: g.double().flatten().numpy() / mode.loss_scale for n, g in total.items()}
    norms = [torch.cat([g.double().flatten() for g in part.values()]).norm() for part in micro]
    return Truth(gradient, [float(norm) * mode.accumulate / mode.loss_scale for norm in norms])


def evaluate(rank, step, engine):
    """Let one rank train in evaluation mode from some step on."""
    if rank == 1 and step == STEPS - 2:
        engine.eval()


def train(rank, mode, folder):
    engine = modes.make_engine(rank, mode, dropout=0.0)
    truths = []
    with watch(engine, run_dir=f"{folder}/{mode.name}"):
        for step in range(STEPS - 1):
            evaluate(rank, step, engine)
            truths.append(truth_of(rank, mode, step, engine))
            modes.train_step(rank, mode, step, engine)
    modes.train_step(rank, mode, STEPS - 1, engine)
    left = sum(len(p._backward_hooks or ()) for p in engine.module.parameters())
    left += len(REPLACED & vars(engine).keys())
    alone = modes.make_engine(rank, mode, dropout=0.0)
    for step in range(STEPS):
        evaluate(rank, step, alone)
        modes.train_step(rank, mode, step, alone)
    states = [modes.state_of(each) for each in (engine, alone)]
    for each in (engine, alone):
        each.destroy()
    return {"truths": truths, "states": states, "left": left}


def watch_between_micro_batches(rank, mode, folder):
    engine = modes.make_engine(rank, mode, dropout=0.0)
    modes.run_micro_batch(rank, mode, 0, 0, engine)
    engine.step()
    with watch(engine, run_dir=f"{folder}/late {mode.name}"):
        truths = [truth_of(rank, mode, 0, engine)]
        modes.run_micro_batch(rank, mode, 0, 1, engine)
        engine.step()
        truths.append(truth_of(rank, mode, 1, engine))
        modes.train_step(rank, mode, 1, engine)
    return truths


def raise_in_a_backward_pass(rank, mode, folder):
    engine = modes.make_engine(rank, mode, dropout=0.0)
    with watch(engine, run_dir=f"{folder}/raised"):
        handle = engine.module.embedding.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            modes.run_micro_batch(rank, mode, 0, 0, engine)
        handle.remove()
        modes.train_step(rank, mode, 1, engine)


def read_less_of_the_reduced_gradient(rank, mode, folder):
    engine = modes.make_engine(rank, mode, dropout=0.0)
    for reduced in ("norm", "off"):
        with watch(engine, run_dir=f"{folder}/{reduced} {mode.name}", reduced=reduced):
            modes.train_step(rank, mode, 0, engine)


def look_before_importing():
    assert not is_deepspeed(nn.Linear(2, 2))
    assert "deepspeed" not in sys.modules
    modes.import_deepspeed()


def do_all(rank, folder):
    seen = {mode.name: train(rank, mode, folder) for mode in modes.MODES}
    late = {}
    for mode in (ACCUMULATED, IN_PARTS):
        late[mode.name] = watch_between_micro_batches(rank, mode, folder)
        read_less_of_the_reduced_gradient(rank, mode, folder)
    raise_in_a_backward_pass(rank, ACCUMULATED, folder)
    for name in CASES:
        train_summing(rank, name, folder)
    assert not is_deepspeed(modes.make_engine(rank, ACCUMULATED, dropout=0.0).module)
    dist.barrier()
    return {**seen, "late": late}


trained = on_ranks(do_all, NUM_RANKS, timeout=400, prepare=look_before_importing)


def check_what_passes_find(recorded, mode):
    unknown = mode.stage >= 2 and (mode.style == "coalesce" or "offload_optimizer" in mode.zero)
    changes_TW = recorded.per_worker("accumulator_change")
    if mode.accumulate == 1 or unknown:
        assert np.isnan(changes_TW).all()
    else:
        assert (changes_TW < 1e-6).all()


@pytest.mark.parametrize("mode", modes.MODES, ids=lambda mode: mode.name)
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
    assert faults(run) == {}


@pytest.mark.parametrize("mode", modes.MODES, ids=lambda mode: mode.name)
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


# What happens to the sums between micro-batches -------------------------------------------------

MICRO, CHANGED_BEFORE = 4, 2


def sums(engine):
    """Yield what the engine has summed up so far, wherever that is."""
    for parameter in engine.module.parameters():
        own = (getattr(parameter, name, None) for name in ("grad", "grad_accum", "_hp_grad"))
        yield from (gradient for gradient in own if gradient is not None)
    for name in ("all_grad_tensors", "averaged_gradients"):
        for group in getattr(engine.optimizer, name, {}).values():
            yield from group or ()


def scaled_by(factor):
    def scale(engine):
        for gradient in {id(gradient): gradient for gradient in sums(engine)}.values():
            gradient.data.mul_(factor)  # its version stays

    return scale


def zero_grad(engine):
    """Call what zeroes gradients; without ZeRO, the optimizer is the training's own."""
    (engine if engine.zero_optimization_stage() == 0 else engine.optimizer).zero_grad()


def drop_sums(engine):
    engine.optimizer.all_grad_tensors.clear()


def change_one(engine):
    parameters = dict(engine.module.named_parameters())
    optimizer, changed = engine.optimizer, parameters["hidden.weight"]
    for group, gradients in optimizer.all_grad_tensors.items():
        pairs = zip(optimizer.params_in_partition[group], gradients, strict=True)
        [gradient.mul_(0.5) for parameter, gradient in pairs if parameter is changed]


def train_summing(rank, name, folder):
    """Train with four micro-batches a step; change their sum before the third one's pass."""
    mode, change = CASES[name]
    manual = name.endswith("manual")  # the engine takes each pass for a step's last
    engine = modes.make_engine(rank, mode, dropout=0.0)
    with loops.watch(engine, run_dir=f"{folder}/{name}", canary=False):
        for step in range(STEPS):
            for micro in range(MICRO):
                if change is not None and micro == CHANGED_BEFORE:
                    change(engine)
                if manual:
                    batch = make_batch(rank, MICRO * step + micro)
                    engine.backward(engine(**batch)["loss"] / MICRO)
                else:
                    modes.run_micro_batch(rank, mode, step, micro, engine)
                    engine.step()
            if manual:
                engine.step()
    engine.destroy()


CASES = {f"ZeRO {stage}, manual": (modes.Mode("", stage), None) for stage in (0, 1, 3)} | {
    "ZeRO 0, reset": (modes.Mode("", 0, MICRO), zero_grad),
    "ZeRO 1, doubled": (modes.Mode("", 1, MICRO, zero={"overlap_comm": True}), scaled_by(2)),
    "ZeRO 2, reset": (modes.Mode("", 2, MICRO), drop_sums),
    "ZeRO 2 fp32 sums, doubled": (modes.Mode("", 2, MICRO, "bf16", "fp32"), scaled_by(2)),
    "ZeRO 3, divided": (modes.Mode("", 3, MICRO), scaled_by(1 / MICRO)),
    "ZeRO 2, zero_grad": (modes.Mode("", 2, MICRO), zero_grad),
    "ZeRO 2, in part": (modes.Mode("", 2, MICRO), change_one),
}
KINDS = ("sync.", "numerics.", "loss.scale")
HARMLESS = ["ZeRO 0, manual", "ZeRO 3, manual", "ZeRO 2, zero_grad"]
FACTORS = {"reset": 0.0, "doubled": 2.0, "divided": 1 / MICRO}


@pytest.mark.parametrize("name", CASES)
def test_what_is_known_is_said_of_each_step_and_sums_that_stay_raise_nothing(trained, name):
    run = Run.open(trained[1] / name)
    assert told(run, *KINDS) == {} or name not in HARMLESS
    observed = run.columns(Table.STEPS, "observed")["observed"]
    assert len(observed) == STEPS
    changes_TW = run.per_worker("accumulator_change")[1]
    if name == "ZeRO 0, manual":
        assert not observed.any()  # what is reduced holds what was reduced before
        return
    assert observed.all()
    assert np.isfinite(changes_TW).all()
    assert (changes_TW < 1e-6).all() == (name in HARMLESS)


@pytest.mark.parametrize("name", [name for name in CASES if name.partition(", ")[2] in FACTORS])
def test_the_kind_of_change_and_its_micro_batch_are_named(trained, name):
    found = told(Run.open(trained[1] / name), *KINDS)["sync.accumulation"]
    kind = name.partition(", ")[2]
    assert (found.severity, found.ranks, found.groups) == (Severity.ERROR, (0, 1), ())
    assert (found.first_step, found.evidence["steps"]) == (0, STEPS)
    assert (found.evidence["kind"], found.evidence["micro_batch"]) == (kind, CHANGED_BEFORE)
    assert found.evidence["factor"] == pytest.approx(FACTORS[kind], rel=1e-5)


def test_an_engine_that_begins_anew_with_each_micro_batch_is_found(trained):
    run = Run.open(trained[1] / "ZeRO 1, manual")
    found = told(run, *KINDS)["sync.accumulation"]
    assert (found.severity, found.evidence["kind"]) == (Severity.ERROR, "reset")
    assert found.evidence["micro_batch"] == 1
    assert run.per_worker("accumulator_scale")[1].max() == 0


def test_a_single_parameter_is_named(trained):
    found = told(Run.open(trained[1] / "ZeRO 2, in part"), *KINDS)["sync.accumulation"]
    assert (found.severity, found.evidence["kind"]) == (Severity.WARNING, "changed in part")
    assert (found.groups, found.evidence["micro_batch"]) == (("hidden",), CHANGED_BEFORE)
