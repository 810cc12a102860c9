import contextlib
import time
from itertools import product

import numpy as np
import pytest
import torch

from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.bus.finding import Severity
from rankscope.session.collector import MOVES, Event, Phase
from support.accidents import wait_until
from support.loops import Loop, collect_lines
from support.models import make_batch
from support.ranks import on_ranks, run_ranks


def skipped_optimizer_step(rank, run_dir):
    loop = Loop(rank, run_dir)
    for step in range(5):
        loop.step(step, optimize=not (rank == 1 and step == 2))
    loop.scope.close()
    return loop.warnings


def train_all(rank, folder):
    works = (skipped_optimizer_step, evaluate_and_pause, named_samples)
    works += (raising_callback, stopping_callback)
    return {work: work(rank, f"{folder}/{work.__name__}") for work in works}


trained = on_ranks(train_all, 2)


def told(trained, work):
    ranks, folder = trained
    return [rank[work] for rank in ranks], Run.open(folder / work.__name__)


def test_a_rank_that_skips_its_optimizer_step_does_not_shift_the_channel(trained):
    warnings, run = told(trained, skipped_optimizer_step)
    assert warnings == [[], []]
    steps, counts = run.per_worker("optimizer_steps")
    assert steps.tolist() == list(range(5))
    assert counts.tolist() == [[1, 1], [1, 1], [1, 0], [1, 1], [1, 1]]
    assert run.status == "complete"
    _, rates = run.per_worker("lr")
    assert (rates == 0.1).all()


def evaluate_and_pause(rank, run_dir):
    loop = Loop(rank, run_dir, every=2)
    for step in range(8):
        if step in (2, 6):
            (loop.scope.pause if step == 2 else loop.scope.resume)()
        loop.step(step)
        loop.ddp.eval()
        loop.ddp(**make_batch(rank, 99))
        loop.ddp.train()
        with torch.no_grad():
            loop.ddp(**make_batch(rank, 98))
    loop.scope.close()
    latest = loop.scope.latest
    return latest.step, latest.observed, latest.loss_mean, hasattr(latest, "nothing")


def test_sampling_pausing_and_evaluation(trained):
    latest, run = told(trained, evaluate_and_pause)
    columns = run.columns(Table.STEPS, "step", "observed", "loss_mean", "samples_drawn")
    assert latest == [(7, False, columns["loss_mean"][7], False)] * 2
    assert columns["step"].tolist() == list(range(8))
    assert columns["observed"].tolist() == [True, *[False] * 5, True, False]
    assert np.isfinite(columns["loss_mean"]).all()
    assert (columns["samples_drawn"] == 6).all()  # evaluation batches are not counted
    assert not run.columns(Table.WORKERS, "samples_named")["samples_named"].any()


def named_samples(rank, run_dir):
    loop = Loop(rank, run_dir)
    for step in range(4):
        for micro in range(2):
            loop.scope.batch([100 * step + 10 * micro + rank, f"{step} {micro} {rank}"])
            batch = make_batch(rank, 10 * step + micro)
            with loop.ddp.no_sync() if micro == 0 else contextlib.nullcontext():
                loss = loop.ddp(**batch)["loss"]
                loss.backward()
            loop.scope.loss("ten", weight=3)
            loop.scope.loss(10.0 * step + micro + rank, weight=3)
        loop.optimizer.step()
    loop.scope.close()
    return loop.warnings


def test_samples_and_losses_that_are_given_belong_to_their_step(trained):
    """Ids come before the forward pass, losses here after the backward pass."""
    warnings, run = told(trained, named_samples)
    line = "loss() expected numbers or a tensor of them as value, got str; what backward shows is "
    assert [[text.startswith(line) for text in texts] for texts in warnings] == [[True], [True]]
    assert run.columns(Table.WORKERS, "samples_named")["samples_named"].all()
    columns = run.columns(Table.SAMPLES, "step", "rank", "samples")
    for step, rank, samples in zip(*columns.values(), strict=True):
        assert samples[[0, 2]].tolist() == [100 * step + rank, 100 * step + 10 + rank]
    assert len(columns["step"]) == 8
    _, losses = run.per_worker("loss")
    assert losses.tolist() == [[10 * t + 0.5, 10 * t + 1.5] for t in range(4)]
    drawn = run.columns(Table.STEPS, "samples_drawn", "samples_distinct")
    assert drawn["samples_drawn"].tolist() == drawn["samples_distinct"].tolist() == [8] * 4


def interrupted_in_a_step(rank, run_dir):
    loop = Loop(rank, run_dir, agent="process")  # which goes on when the ranks have ended
    with contextlib.suppress(KeyboardInterrupt), loop.scope:
        for step in range(5):
            loop.forward(step).backward()
            if step == 4 and rank == 1:
                raise KeyboardInterrupt
            loop.update()
        raise KeyboardInterrupt
    return loop.warnings


def test_a_step_that_was_interrupted_on_one_rank_is_not_held_against_it(tmp_path):
    assert run_ranks(interrupted_in_a_step, 2, str(tmp_path / "run")) == [[], []]
    wait_until(lambda: Run.open(tmp_path / "run").table(Table.STEPS).num_rows == 5)
    found = Run.open(tmp_path / "run").findings()
    assert [f.cause for f in found if f.severity > Severity.NOTE] == []


def one_rank_raises(rank, run_dir):
    loop = Loop(rank, run_dir, agent="process", announce=True)
    lines = collect_lines()
    with contextlib.suppress(ValueError), loop.scope:
        for step in range(3):
            loop.step(step)
        raise ValueError("a broken row" if rank else "a closed connection")
    return lines


def test_a_rank_that_raised_is_recorded_so_and_rank_0_prints_the_place_before_it_waits(tmp_path):
    lines, _ = run_ranks(one_rank_raises, 2, str(tmp_path / "run"))
    [shown] = [line for line in lines if "the training ended with an error" in line]
    assert "rankscope report" in shown
    wait_until(lambda: Run.open(tmp_path / "run").status == "incomplete")
    ended = Run.open(tmp_path / "run").info["ended"]
    assert {end["why"] for end in ended} == {"its training raised ValueError"}


def raising_callback(rank, run_dir):
    def on_finding(finding):
        raise ValueError("user's bug")

    return Loop(rank, run_dir, on_finding=on_finding).train(4, rank=0)


def test_a_callback_that_raises_changes_nothing(trained):
    of_ranks, run = told(trained, raising_callback)
    for warnings in of_ranks:
        assert warnings
        assert all("on_finding raised" in warning for warning in warnings)
    assert run.status == "complete"


def stopping_callback(rank, run_dir):
    stopped = []

    def stop(finding):
        if not stopped:
            stopped.append(finding.cause)
            raise SystemExit

    loop = Loop(rank, run_dir, on_finding=stop)
    for step in range(1000):
        try:
            loop.step(step, rank=0)
        except SystemExit:
            loop.scope.close()
            return step, stopped[0]
        time.sleep(0.005)
    return 1000, ""


def test_a_callback_stops_all_ranks_at_the_beginning_of_the_same_step(trained):
    results, run = told(trained, stopping_callback)
    assert results[0] == results[1]
    assert results[0][1] == "data.duplicate_batches"
    assert run.table(Table.STEPS).num_rows == results[0][0]


# The phases of a step ---------------------------------------------------------------------------

MEANING = {
    Phase.OPEN: (False, False),
    Phase.REDUCED: (True, False),
    Phase.UPDATED: (False, True),
    Phase.APPLIED: (True, True),
}
EFFECT = {
    Event.REDUCTION: lambda reduced, updated: (True, updated),
    Event.OPTIMIZER_BEGINS: lambda reduced, updated: (reduced, False),
    Event.OPTIMIZER_ENDS: lambda reduced, updated: (reduced, True),
    Event.FORGET: lambda reduced, updated: (False, False),
}


@pytest.mark.parametrize(("event", "phase"), list(product(EFFECT, MEANING)))
def test_an_event_changes_what_a_phase_means(event, phase):
    moved = MOVES[event].get(phase, phase)
    assert MEANING[moved] == EFFECT[event](*MEANING[phase])


def test_a_step_that_is_handed_over_stays_so_until_the_next_one_begins():
    assert {MOVES[Event.HAND_OVER][phase] for phase in MEANING} == {Phase.LEAVING}
    assert not any(Phase.LEAVING in moves for moves in MOVES.values())
