"""What happens to the DeepSpeed tap: faults, late arrivals, steps left out, engines refused."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from rankscope.errors import UnsupportedError
from rankscope.wrappers.deepspeed import deepspeed_process_group, is_deepspeed
from rankscope.wrappers.guard import Guard
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
    STEPS,
    make_sketcher,
    make_tap,
    sketch_of,
    to_numpy,
    train,
    trained,
)
from support.models import make_model
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ACCUMULATED = Mode("accumulated", 0, 2)
IN_PARTS = Mode("in parts", 2, 2, in_parts=True)


def break_measuring(rank: int, mode: Mode) -> dict[str, Any]:
    told: list[str] = []
    plain = train(rank, mode, range(0))
    sketcher = make_sketcher(trained(make_model()))
    sketcher.measure_many = None  # type: ignore[assignment]  # every call raises
    guard = Guard(lambda error: told.append(type(error).__name__))
    broken = train(rank, mode, range(STEPS), sketcher=sketcher, guarded=guard)
    return {"plain": plain["state"], "broken": broken["state"], "told": told}


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


def refuse(rank: int) -> dict[str, str]:
    return {name: _refusal(make(rank)) for name, make in _REFUSED.items()}


def _refusal(engine: Any) -> str:
    try:
        deepspeed_process_group(engine)
    except UnsupportedError as error:
        return str(error)
    return "watched"


def _engine(rank: int, model: nn.Module, optimizer: bool = True, **options: Any) -> Any:
    config = {"train_micro_batch_size_per_gpu": 1, **options.pop("config", {})}
    if optimizer:
        options["optimizer"] = torch.optim.AdamW(model.parameters())
    return import_deepspeed(rank).initialize(model=model, config=config, **options)[0]


def _pipeline(rank: int) -> Any:
    import_deepspeed(rank).init_distributed("gloo", verbose=False)
    from deepspeed.pipe import PipelineModule

    return _engine(rank, PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.MSELoss()))


_REFUSED = {
    "pipeline parallelism": _pipeline,
    "sequence parallelism": lambda rank: _engine(
        rank,
        nn.Linear(2, 2),
        config={"sequence_parallel_size": 2, "data_parallel_size": 1},
        mesh_param=(1, 2),
    ),
}


def do_all(rank: int) -> dict[str, Any]:
    both = (ACCUMULATED, IN_PARTS)
    return {
        "recognised": be_recognised(rank),
        "broken": [break_measuring(rank, mode) for mode in both],
        "late": [arrive_between_micro_batches(rank, mode) for mode in both],
        "aborted": abort_a_backward_pass(rank, ACCUMULATED),
        "reduced": [read_less_of_the_reduced_gradient(rank, mode) for mode in both],
        "refused": refuse(rank),
    }


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(do_all, 2, prepare=look_before_importing)


def test_deepspeed_is_recognised_and_never_imported(outcomes):
    assert all(seen["recognised"] == [True, False, True] for seen in outcomes)


def test_a_fault_in_the_monitor_leaves_training_untouched_and_is_told_once(outcomes):
    for seen in outcomes:
        for run in seen["broken"]:
            assert run["told"] == ["TypeError"]
            for name, value in run["plain"].items():
                assert value.tobytes() == run["broken"][name].tobytes(), name


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


def test_what_cannot_be_watched_is_refused_in_one_sentence(outcomes):
    for seen in outcomes:
        for name, refusal in seen["refused"].items():
            assert name in refusal
            assert "cannot be watched" in refusal
