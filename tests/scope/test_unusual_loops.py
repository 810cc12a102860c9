"""Training loops off the beaten track: measured right or not at all, and never changed."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rankscope import Run
from rankscope.bus.evidence import Table
from support.loops import Loop
from support.models import make_batch
from support.ranks import on_ranks
from support.releases import SINCE_TORCH_2_13

pytestmark = pytest.mark.ranks

STEPS = 4
UNMEASURED, CARRIED_OVER = "unmeasured", "carried over"

Expected = str | float
"""What is recorded of a step on one rank: one of the words above, or the gradient's norm."""


def never_zeroed(loop: Loop) -> Iterator[Expected]:
    for step in range(STEPS):
        norm = loop.exact_norm(step)
        loop.forward(step).backward()
        loop.optimizer.step()
        yield CARRIED_OVER if step else norm


def micro_batches_that_all_synchronise(loop: Loop) -> Iterator[Expected]:
    """Each pass adds to what the one before has left; the optimizer's call ends the step."""
    for step in range(STEPS):
        norm = loop.exact_norm(*range(3 * step, 3 * step + 3))
        for number in range(3 * step, 3 * step + 3):
            (loop.forward(number) / 3).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        moved = step == 0 and loop.ddp.gradient_as_bucket_view  # DDP has made its buckets anew
        yield UNMEASURED if moved else norm


def fewer_micro_batches_at_an_end(loop: Loop) -> Iterator[Expected]:
    for step, count in enumerate((2, 1, 2, 1)):
        norm = loop.exact_norm(*range(2 * step, 2 * step + count))
        for number in range(2 * step, 2 * step + count):
            (loop.forward(number) / count).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        moved = step == 0 and loop.ddp.gradient_as_bucket_view
        yield UNMEASURED if moved else norm


def backward_twice(loop: Loop) -> Iterator[Expected]:
    """The second pass adds the local gradient to the reduced one: a bug, but not the monitor's."""
    for step in range(STEPS):
        norm = loop.exact_norm(step)
        loss = loop.forward(step)
        if step == 1:
            loss.backward(retain_graph=True)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        yield UNMEASURED if step == 1 else norm


def one_backward_for_two_forwards(loop: Loop) -> Iterator[Expected]:
    for step in range(STEPS):
        norm = loop.exact_norm(2 * step, 2 * step + 1)
        (loop.forward(2 * step) + loop.forward(2 * step + 1)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        yield norm


def branch_in_some_micro_batches(loop: Loop) -> Iterator[Expected]:
    """A parameter that only an early micro-batch uses is not read in the last one."""
    for step in range(STEPS):
        used = [(True, True), (True, False), (False, True), (True, True)][step]
        if loop.rank == 1:
            used = (True, True)
        norm = loop.exact_norm(2 * step, 2 * step + 1, branch=used)
        for micro in range(2):
            with loop.ddp.no_sync() if micro == 0 else contextlib.nullcontext():
                batch: dict[str, Any] = make_batch(loop.rank, 2 * step + micro)
                (loop.ddp(**batch, use_branch=used[micro])["loss"] / 2).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        yield UNMEASURED if used == (True, False) else norm


def odd_steps_after_many_alike(loop: Loop) -> Iterator[Expected]:
    """By then most parameters have no hook any more."""

    def one(numbers: tuple[int, ...], *, used: bool = True, zeroed: bool = True) -> float:
        norm = loop.exact_norm(*numbers, branch=(used,) * len(numbers))
        for number in numbers:
            last = number == numbers[-1]
            batch: dict[str, Any] = make_batch(loop.rank, number)
            with contextlib.nullcontext() if last else loop.ddp.no_sync():
                (loop.ddp(**batch, use_branch=used)["loss"] / len(numbers)).backward()
        loop.optimizer.step()
        if zeroed:
            loop.optimizer.zero_grad()
        return norm

    for step in range(10):
        yield one((step,))
    hooked = sum(bool(p._post_accumulate_grad_hooks) for p in loop.ddp.parameters())  # type: ignore[attr-defined]
    views = loop.ddp.gradient_as_bucket_view
    assert loop.scope is None or hooked == (len(list(loop.ddp.parameters())) if views else 2)
    yield one((10,), used=loop.rank == 1)
    yield one((11,), zeroed=False)
    one((12,))
    yield CARRIED_OVER
    yield one((13, 14))
    loop.ddp.eval()
    yield one((15,))
    loop.ddp.train()
    for step in range(16, 20):
        yield one((step,))


LOOPS: list[Callable[[Loop], Iterator[Expected]]] = [
    never_zeroed,
    micro_batches_that_all_synchronise,
    fewer_micro_batches_at_an_end,
    backward_twice,
    *([one_backward_for_two_forwards] if SINCE_TORCH_2_13 else []),
    branch_in_some_micro_batches,
    odd_steps_after_many_alike,
]


IN_VIEWS = (
    *(never_zeroed, micro_batches_that_all_synchronise),
    *(branch_in_some_micro_batches, odd_steps_after_many_alike),
)
"""Tried with gradients that are views of DDP's buckets as well."""


def train_all(rank: int, folder: str) -> dict[str, Any]:
    results = {}
    for loop in LOOPS:
        for views in (False, True) if loop in IN_VIEWS else (False,):
            name = f"{loop.__name__}{' in bucket views' * views}"
            options: dict[str, Any] = {"ddp": {"gradient_as_bucket_view": views}}
            if loop is odd_steps_after_many_alike:  # statistics of an evaluation are its own
                options["ddp"]["broadcast_buffers"] = False
            if loop in (branch_in_some_micro_batches, odd_steps_after_many_alike):
                options["ddp"]["find_unused_parameters"] = options["branch"] = True
            alone = Loop(rank, None, **copy.deepcopy(options))
            list(loop(alone))
            watched = Loop(rank, f"{folder}/{name}", **options)
            expected = list(loop(watched))
            watched.close()
            assert watched.warnings == []
            results[name] = {"expected": expected, "same": alone.bits() == watched.bits()}
    return results


trained = on_ranks(train_all, 2)


CASES = [
    (loop, views) for loop in LOOPS for views in (False, True) if not views or loop in IN_VIEWS
]


@pytest.mark.parametrize(("loop", "views"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_measured_right_or_not_at_all(trained, loop, views):
    results, folder = trained
    name = f"{loop.__name__}{' in bucket views' * views}"
    run = Run.open(folder / name)
    assert all(rank[name]["same"] for rank in results)
    expected = [
        list(step) for step in zip(*[rank[name]["expected"] for rank in results], strict=True)
    ]
    observed = run.columns(Table.STEPS, "observed")["observed"].astype(bool)
    assert observed.tolist() == [not any(isinstance(e, str) for e in step) for step in expected]
    assert observed.any()
    _, flags = run.per_worker("grad_carried_over")
    assert flags.astype(bool).tolist() == [[e == CARRIED_OVER for e in step] for step in expected]
    _, norms = run.per_worker("grad_norm")
    fine = [step for step, seen in enumerate(observed) if seen]
    estimated = loop in (micro_batches_that_all_synchronise, fewer_micro_batches_at_an_end)
    np.testing.assert_allclose(
        norms[fine], [expected[step] for step in fine], rtol=0.15 if estimated else 1e-6
    )
    assert np.isfinite(run.columns(Table.STEPS, "loss_mean")["loss_mean"]).all()
