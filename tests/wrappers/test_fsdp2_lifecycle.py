"""Steps that raise, taps that come and go in the middle of one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state

from rankscope.wrappers.fsdp2 import FSDP2Tap
from support.cut import Cut
from support.fsdp2_modes import mode_named
from support.fsdp2_training import (
    EXACT,
    Session,
    local_gradient,
    make_tap,
    norm_error,
    optimize,
    other_gradients,
    sketch_error,
    start,
    train_step,
)
from support.releases import SINCE_TORCH_2_13
from support.scenarios import run_scenarios

pytestmark = pytest.mark.ranks


def torch_functions() -> list[Any]:
    state = _fsdp_state.FSDPState
    return [
        _fsdp_param_group.foreach_reduce,
        state._register_root_post_backward_final_callback,
        state._root_post_backward_final_callback,
        getattr(state, "_end_backward_iteration", None),  # since torch 2.15
    ]


def check_step(session: Session, tap: FSDP2Tap, step: int) -> None:
    exact, _ = local_gradient(session, step)
    train_step(session, step, tap)
    assert tap.complete
    local = tap.collect()
    assert local is not None
    assert sketch_error(tap, local, exact) < EXACT
    assert norm_error(local, exact) < EXACT
    optimize(session)


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in the middle of a backward pass")


def explode(session: Session, tap: FSDP2Tap) -> None:
    """Run a step whose backward pass raises after a part of the reductions."""
    hook = session.root.blocks[0].register_forward_hook(
        lambda module, args, output: Explode.apply(output)
    )
    with pytest.raises(ArithmeticError):
        train_step(session, 0, tap)
    hook.remove()
    assert not tap.complete
    assert tap.aborted
    assert tap._read
    session.root.reset_iter_state()
    session.optimizer.zero_grad()


def forget_unreduced_gradients(session: Session) -> None:
    """Drop what an aborted pass has left in the unsharded parameters; torch keeps it."""
    for module in [session.root, *session.root.blocks]:
        module.unshard()
    session.root.zero_grad()
    for module in [session.root, *session.root.blocks]:
        module.reshard()


def an_aborted_pass_is_not_counted() -> None:
    session = start(mode_named("1-D"))
    tap = make_tap(session)
    explode(session, tap)
    forget_unreduced_gradients(session)
    for step in range(1, 3):
        check_step(session, tap, step)
        assert not tap.aborted
    tap.remove()


def other_gradients_make_no_step() -> None:
    """``autograd.grad`` runs through the model without accumulating anything."""
    for name in ("HSDP", "HSDP half reduced", "frozen in part"):
        session = start(mode_named(name))
        tap = make_tap(session)
        session.root.set_requires_gradient_sync(True)
        for step in range(3):
            other_gradients(session, 10 + step, tap, measure=step < 2)
            assert not tap.complete
            assert not tap.aborted
            exact, _ = local_gradient(session, step)
            train_step(session, step, tap)
            assert tap.complete
            local = tap.collect()
            assert local is not None
            assert sketch_error(tap, local, exact) < EXACT
            assert local.reduced is not None
            assert local.micro_squared_norms is None
            optimize(session)
        tap.remove()


def a_pass_whose_end_is_cut_short_is_not_counted() -> None:
    """Wherever Ctrl-C strikes after the reduction, the next step has nothing of this one."""
    session = start(mode_named("1-D"))
    tap = make_tap(session)
    with Cut(function="_end_pass") as end:
        check_step(session, tap, 0)
    assert end.count > 5
    for at in range(end.count):
        with Cut(at, function="_end_pass"), pytest.raises(KeyboardInterrupt):
            train_step(session, 1, tap)
        assert tap.aborted
        assert not tap.complete
        session.optimizer.zero_grad()
        check_step(session, tap, 2)
    tap.remove()


def taps_do_not_see_each_others_models() -> None:
    original = torch_functions()
    one, other, unwatched = (
        start(mode_named("1-D")),
        start(mode_named("accumulated")),
        start(mode_named("1-D")),
    )
    tap, second = make_tap(one), make_tap(one)
    elsewhere = make_tap(other)
    train_step(unwatched, 0, None)
    assert not any(each.complete for each in (tap, second, elsewhere))
    exact, _ = local_gradient(one, 1)
    second.begin_forward(measure=True)
    train_step(one, 1, tap)
    assert not elsewhere.complete
    for each in (tap, second):
        local = each.collect()
        assert local is not None
        assert sketch_error(each, local, exact) < EXACT
    optimize(one)
    second.remove()
    check_step(one, tap, 2)
    check_step(other, elsewhere, 3)
    tap.remove()
    assert torch_functions() != original
    elsewhere.remove()
    elsewhere.remove()
    assert torch_functions() == original


ABORTED = [
    an_aborted_pass_is_not_counted,
]
SCENARIOS = [
    *(ABORTED if SINCE_TORCH_2_13 else []),
    other_gradients_make_no_step,
    a_pass_whose_end_is_cut_short_is_not_counted,
    taps_do_not_see_each_others_models,
]


@pytest.fixture(scope="module")
def problems():
    return run_scenarios(SCENARIOS, 2)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(problems, scenario):
    assert problems[scenario.__name__] == ""
