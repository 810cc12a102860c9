"""What happens to the DeepSpeed tap: faults, late arrivals, steps left out, engines refused."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from rankscope.wrappers.deepspeed import deepspeed_process_group, is_deepspeed
from rankscope.wrappers.tap import ReadReduced
from support.deepspeed_modes import (
    Mode,
    accumulated,
    import_deepspeed,
    make_engine,
    micro_gradients,
    run_micro_batch,
    train_step,
)
from support.deepspeed_training import (
    make_tap,
    sketch_of,
    to_numpy,
)
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ACCUMULATED = Mode("accumulated", 0, 2)
IN_PARTS = Mode("in parts", 2, 2, in_parts=True)


def arrive_between_micro_batches(rank: int, mode: Mode) -> list[Any]:
    engine = make_engine(rank, mode, dropout=0.0)
    run_micro_batch(rank, mode, 0, 0, engine)
    engine.step()
    tap = make_tap(engine)
    tap.begin_forward(measure=True)
    run_micro_batch(rank, mode, 0, 1, engine)
    engine.step()
    complete, first = tap.complete, tap.collect()
    expected = accumulated(mode, micro_gradients(rank, mode, 1, engine))
    tap.begin_forward(measure=True)
    train_step(rank, mode, 1, engine)
    gradient = tap.collect()
    assert gradient is not None
    truth = sketch_of({name: value.double().numpy() for name, value in expected.items()})
    torch.testing.assert_close(gradient.totals.sketches, truth.sketches, rtol=1e-4, atol=1e-6)
    return [complete, first and to_numpy(first)]


def abort_a_backward_pass(rank: int, mode: Mode) -> dict[str, Any]:
    class NoMemoryError(RuntimeError):
        pass

    def fail(gradient: torch.Tensor) -> None:
        raise NoMemoryError

    engine = make_engine(rank, mode, dropout=0.0)
    tap = make_tap(engine)
    handle = engine.module.embedding.weight.register_hook(fail)
    tap.begin_forward(measure=True)
    with pytest.raises(NoMemoryError):
        run_micro_batch(rank, mode, 0, 0, engine)
    handle.remove()
    seen: dict[str, Any] = {"aborted": tap.aborted, "complete": tap.complete, "got": tap.collect()}
    seen["aborted after"] = tap.aborted
    tap.begin_forward(measure=True)
    train_step(rank, mode, 1, engine)  # on top of what the failed pass has left
    gradient = tap.collect()
    assert gradient is not None
    seen["carried over"] = bool(gradient.carried_over)
    return seen


def read_less_of_the_reduced_gradient(rank: int, mode: Mode) -> list[Any]:
    engine = make_engine(rank, mode, dropout=0.0)
    seen = []
    for reduced in (ReadReduced.NORM, ReadReduced.OFF):
        tap = make_tap(engine, reduced=reduced)
        tap.begin_forward(measure=True)
        train_step(rank, mode, 0, engine)
        gradient = tap.collect()
        assert gradient is not None
        seen.append(gradient.reduced and to_numpy(gradient)["reduced"])
        tap.remove()
    return seen


def look_before_importing() -> None:
    assert not is_deepspeed(nn.Linear(2, 2))
    assert "deepspeed" not in sys.modules
    import_deepspeed()


def be_recognised(rank: int) -> list[bool]:
    engine = make_engine(rank, ACCUMULATED, dropout=0.0)
    group = deepspeed_process_group(engine)
    return [is_deepspeed(engine), is_deepspeed(engine.module), group.size() == 2]


def do_all(rank: int) -> dict[str, Any]:
    both = (ACCUMULATED, IN_PARTS)
    return {
        "recognised": be_recognised(rank),
        "late": [arrive_between_micro_batches(rank, mode) for mode in both],
        "aborted": abort_a_backward_pass(rank, ACCUMULATED),
        "reduced": [read_less_of_the_reduced_gradient(rank, mode) for mode in both],
    }


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(do_all, 2, prepare=look_before_importing)


def test_deepspeed_is_recognised_and_never_imported(outcomes):
    assert all(seen["recognised"] == [True, False, True] for seen in outcomes)


def test_a_step_that_had_begun_before_is_flagged_or_left_out(outcomes):
    for seen in outcomes:
        accumulated, in_parts = seen["late"]
        assert accumulated[0] is True
        assert accumulated[1]["carried_over"] is True
        assert in_parts == [True, None]


def test_a_backward_pass_that_raises_is_noticed(outcomes):
    for seen in outcomes:
        assert seen["aborted"] == {
            "aborted": True,
            "complete": False,
            "got": None,
            "aborted after": False,
            "carried over": True,
        }


def test_the_reduced_gradient_is_read_as_far_as_asked(outcomes):
    for seen in outcomes:
        for norm_only, off in seen["reduced"]:
            assert norm_only["squared_norms"].sum() > 0
            assert not norm_only["sketches"].any()
            assert off is None
