"""Repeated steps: what varies is named, what does not is left in peace, and nothing is changed."""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from rankscope.tools.doctor import determinism
from rankscope.tools.doctor.stage import Bench, Options, Status

sys.path.insert(0, str(Path(__file__).parent))
import patients


def examine(model, batch=None, seconds=60.0):
    if batch is None:
        batch = next(iter(DataLoader(patients.Numbers(), batch_size=4)))
    options = Options(seconds=seconds)
    bench = Bench(None, options, None, torch.device("cpu"), model=model, batch=batch)
    facts = determinism.look(bench)
    [result] = determinism.STAGE.judge([facts])
    return result, facts


def test_a_step_that_repeats_is_well():
    result, facts = examine(patients.repeats())
    assert result.status is Status.OK, result
    assert facts["different"] == 1
    assert facts["runs"] == determinism.RUNS
    assert facts["operators_repeated"] > 20
    assert facts["operators"] == {}
    assert facts["cost"] > 0


def test_a_flag_that_helps_is_named_with_its_cost():
    result, facts = examine(patients.fixable())
    assert result.status is Status.WARNING
    assert facts["fixed"]
    assert "use_deterministic_algorithms(True) gives the same bits" in result.advice
    assert "times as long" in result.advice


def test_nothing_is_changed():
    model = patients.any_order()
    model(**next(iter(DataLoader(patients.Numbers(), batch_size=4))))["loss"].backward()

    def state():
        tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
        flags = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.is_warn_always_enabled(),
        )
        return [t.clone() for t in tensors], torch.get_rng_state(), np.random.get_state(), flags  # noqa: NPY002

    batch = next(iter(DataLoader(patients.Numbers(), batch_size=4)))
    before = state()
    examine(model, batch)
    after = state()
    assert all(map(torch.equal, before[0], after[0]))
    assert torch.equal(before[1], after[1])
    assert (before[2][1] == after[2][1]).all()
    assert before[3] == after[3]
