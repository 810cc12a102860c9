"""Passes that raise, or that nothing comes of: the training goes on, and so do the books."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from rankscope import Run
from rankscope.bus.evidence import Table
from support.loops import Loop
from support.ranks import alone_and_watched

pytestmark = pytest.mark.ranks

NUM_BATCHES = 8
LOST = (0, 2, 3, 6)
"""Batches of which nothing comes."""

PLACES = ("in forward", "at different places", "in an early micro-batch", "dropped")
"""Where a pass ends. In the last case the training names its samples and gives its loss itself."""


class InterruptedPassError(Exception):
    pass


def stop(*_: Any) -> None:
    raise InterruptedPassError


def press_key(*_: Any) -> None:
    raise KeyboardInterrupt


def run_into(loop: Loop, number: int, place: str, *, named: bool) -> None:
    if place == "in forward":
        handle = loop.model.hidden.register_forward_hook(stop)
    else:
        handle = loop.model.embedding.weight.register_hook(stop)
    with contextlib.suppress(InterruptedPassError, KeyboardInterrupt):
        loss = loop.forward(number)
        give(loop, loss, named=named)
        if place == "in the loss function":
            scaled = 3 * loss
            scaled.register_hook(press_key)
            scaled.backward()
        elif place == "at the output":
            loss.register_hook(press_key)
            loss.backward()
        elif place != "dropped":
            loss.backward()
    handle.remove()


def give(loop: Loop, loss: torch.Tensor, *, named: bool) -> None:
    if loop.scope is not None and named:
        loop.scope.loss(loss)


def train(rank: int, place: str, run_dir: str | None) -> dict[str, Any]:
    loop = Loop(rank, run_dir)
    losses = []
    own_place, named = place, place == "dropped"
    if place == "at different places":
        own_place = ("at the output", "in the model", "in the loss function")[rank]
    for number in range(NUM_BATCHES):
        if loop.scope is not None and named:
            loop.scope.batch([100 * number + rank, f"{number} {rank}"])
        if number not in LOST:
            loss = loop.forward(number)
            give(loop, loss, named=named)
            loss.backward()
            losses.append(loss.item())
            loop.optimizer.step()
        elif place == "in an early micro-batch":
            with loop.ddp.no_sync():
                run_into(loop, number, "in the model", named=named)
        else:
            run_into(loop, number, own_place, named=named)
            loop.ddp.reducer._reset_state()  # else DDP itself may refuse to go on
        loop.optimizer.zero_grad()
    loop.close()
    assert loop.warnings == []
    return {"losses": losses, "bits": loop.bits()}


trained = alone_and_watched(train, PLACES, 3)


@pytest.mark.parametrize("place", PLACES)
def test_nothing_of_such_a_pass_is_recorded(trained, place):
    results, folder = trained
    named = place == "dropped"
    run = Run.open(folder / place)
    assert run.status == "complete"
    kept = [number for number in range(NUM_BATCHES) if number not in LOST]
    steps, losses_TW = run.per_worker("loss")
    assert steps.tolist() == list(range(len(kept)))
    for rank, by_place in enumerate(results):
        alone, watched = by_place[place]
        assert alone["bits"] == watched["bits"], rank
        np.testing.assert_allclose(losses_TW[:, rank], watched["losses"], rtol=1e-6)
    assert run.columns(Table.STEPS, "observed")["observed"].all()
    _, norms_TW = run.per_worker("grad_norm")
    _, scales_TW = run.per_worker("grad_scale")
    assert np.isfinite(norms_TW).all()
    assert (scales_TW == 1).all()
    assert run.table(Table.MICRO).num_rows == 0
    samples = run.columns(Table.SAMPLES, "step", "rank", "samples")
    for step, rank, row in zip(*samples.values(), strict=True):
        if named:
            assert row[0] == 100 * kept[step] + rank
        assert len(row) == (2 if named else 3)
