"""What happens to what DeepSpeed has summed up between micro-batches, on real ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from support.deepspeed_modes import Mode, import_deepspeed, make_engine, run_micro_batch
from support.findings import told
from support.loops import watch
from support.models import make_batch
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS, MICRO, CHANGED_BEFORE = 3, 4, 2
Fault = Callable[[Any], object]


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
    """Change what the ranks hold of one parameter; its rows are spread over both."""
    parameters = dict(engine.module.named_parameters())
    optimizer, changed = engine.optimizer, parameters["hidden.weight"]
    for group, gradients in optimizer.all_grad_tensors.items():
        pairs = zip(optimizer.params_in_partition[group], gradients, strict=True)
        [gradient.mul_(0.5) for parameter, gradient in pairs if parameter is changed]


@dataclass(frozen=True)
class Case:
    """A training: four micro-batches a step, and what is done before the third one's pass."""

    mode: Mode
    fault: Fault | None = None
    manual: bool = False  # the engine takes each pass for a step's last

    def train(self, rank, run_dir):
        engine = make_engine(rank, self.mode, dropout=0.0)
        with watch(engine, run_dir=run_dir, canary=False):
            for step in range(STEPS):
                for micro in range(MICRO):
                    if self.fault is not None and micro == CHANGED_BEFORE:
                        self.fault(engine)
                    if self.manual:
                        batch = make_batch(rank, MICRO * step + micro)
                        engine.backward(engine(**batch)["loss"] / MICRO)
                    else:
                        run_micro_batch(rank, self.mode, step, micro, engine)
                        engine.step()
                if self.manual:
                    engine.step()
        engine.destroy()


MODES = {
    "ZeRO 0": Mode("", 0, MICRO),
    "ZeRO 1 overlapped": Mode("", 1, MICRO, zero={"overlap_comm": True}),
    "ZeRO 2 fp32 sums": Mode("", 2, MICRO, "bf16", "fp32"),
    "ZeRO 3": Mode("", 3, MICRO),
}
CASES = {f"ZeRO {stage}, manual": Case(Mode("", stage), manual=True) for stage in (0, 1, 3)} | {
    "ZeRO 0, reset": Case(MODES["ZeRO 0"], zero_grad),
    "ZeRO 1 overlapped, doubled": Case(MODES["ZeRO 1 overlapped"], scaled_by(2)),
    "ZeRO 2, reset": Case(Mode("", 2, MICRO), drop_sums),
    "ZeRO 2 fp32 sums, doubled": Case(MODES["ZeRO 2 fp32 sums"], scaled_by(2)),
    "ZeRO 3, divided": Case(MODES["ZeRO 3"], scaled_by(1 / MICRO)),
    "ZeRO 2, zero_grad": Case(Mode("", 2, MICRO), zero_grad),
    "ZeRO 2, in part": Case(Mode("", 2, MICRO), change_one),
}
KINDS = ("sync.", "numerics.", "loss.scale")
HARMLESS = ["ZeRO 0, manual", "ZeRO 3, manual", "ZeRO 2, zero_grad"]
FACTORS = {"reset": 0.0, "doubled": 2.0, "divided": 1 / MICRO}


def train_all(rank, folder):
    for name, case in CASES.items():
        case.train(rank, f"{folder}/{name}")


@pytest.fixture(scope="module")
def runs(folder):
    run_ranks(train_all, 2, str(folder), timeout=400, prepare=import_deepspeed)
    return {name: Run.open(folder / name) for name in CASES}


@pytest.mark.parametrize("name", HARMLESS)
def test_sums_that_stay_raise_nothing(runs, name):
    assert told(runs[name], *KINDS) == {}


@pytest.mark.parametrize("name", CASES)
def test_what_is_known_is_said_of_each_step(runs, name):
    observed = runs[name].columns(Table.STEPS, "observed")["observed"]
    assert len(observed) == STEPS
    changes_TW = runs[name].per_worker("accumulator_change")[1]
    if name == "ZeRO 0, manual":
        assert not observed.any()  # what is reduced holds what was reduced before
        return
    assert observed.all()
    assert np.isfinite(changes_TW).all()
    assert (changes_TW < 1e-6).all() == (name in HARMLESS)


@pytest.mark.parametrize("name", [name for name in CASES if name.partition(", ")[2] in FACTORS])
def test_the_kind_of_change_and_its_micro_batch_are_named(runs, name):
    found = told(runs[name], *KINDS)["sync.accumulation"]
    kind = name.partition(", ")[2]
    assert (found.severity, found.ranks, found.groups) == (Severity.ERROR, (0, 1), ())
    assert (found.first_step, found.evidence["steps"]) == (0, STEPS)
    assert (found.evidence["kind"], found.evidence["micro_batch"]) == (kind, CHANGED_BEFORE)
    assert found.evidence["factor"] == pytest.approx(FACTORS[kind], rel=1e-5)


def test_an_engine_that_begins_anew_with_each_micro_batch_is_found(runs):
    name = "ZeRO 1, manual"
    found = told(runs[name], *KINDS)["sync.accumulation"]
    assert (found.severity, found.evidence["kind"]) == (Severity.ERROR, "reset")
    assert found.evidence["micro_batch"] == 1
    assert runs[name].per_worker("accumulator_scale")[1].max() == 0


def test_a_single_parameter_is_named(runs):
    found = told(runs["ZeRO 2, in part"], *KINDS)["sync.accumulation"]
    assert (found.severity, found.evidence["kind"]) == (Severity.WARNING, "changed in part")
    assert (found.groups, found.evidence["micro_batch"]) == (("hidden",), CHANGED_BEFORE)
