"""Faults of the monitor itself: told once, and the training ends with the same bits."""

import contextlib
import errno
import threading
from functools import partial

import pytest
import torch.distributed as dist

from rankscope import Run, files
from rankscope.bus.evidence import Table
from rankscope.record.tables import step_range
from rankscope.session.inbox import WatchedPart
from support.cut import Cut
from support.findings import faults
from support.loops import Loop, root_of
from support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.ranks
STEPS, FAULT_STEP = 10, 3


def fail(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def break_hook(loop):
    loop.scope._collector._tap._sketcher.measure_tensors = fail


def break_link(loop):
    loop.scope._link.send = fail


def break_diagnosis(loop):
    def fail_on(reports):
        loop.failed_on = [report.step for report in reports]
        raise ValueError("a detector fails")

    root_of(loop)._diagnosis.observe_many = fail_on


def fill_disk(loop):
    sync, files.os.fsync = files.os.fsync, fail
    return partial(setattr, files.os, "fsync", sync)


def kill_agent(loop):
    """End the agent without a word: its sockets close."""
    server = loop.scope._handle.agent.agent._server
    server._closing = True
    server._thread.join()
    for connection in server._connections.values():
        connection.socket.close()


def block_agent(loop):
    """Let the agent wait until the training is over: a training that waits never ends."""
    over = threading.Event()
    root = root_of(loop)
    work = root.work

    def wait_and_work():
        assert over.wait(60)
        root.work = work
        return work()

    root.work = wait_and_work
    return over.set


FAULTS = {
    # What is done, on which rank, and how many warnings that rank and the host's first one log.
    # A record that cannot be written is told of at once, and again when it cannot be closed.
    "hook": (break_hook, 1, (1, 1)),
    "link": (break_link, 1, (1, 1)),
    "diagnosis": (break_diagnosis, 0, (1, 1)),
    "full disk": (fill_disk, 0, (2, 2)),
    "dead agent": (kill_agent, 0, (1, 1)),
    "stuck agent": (block_agent, 0, (0, 0)),
}


def train(rank, kind, run_dir):
    inject, where, _ = FAULTS[kind]
    loop = Loop(rank, run_dir, flush_seconds=0.0 if kind == "full disk" else 10.0)
    undo = None
    for step in range(STEPS):
        if step == FAULT_STEP and rank == where:
            undo = inject(loop)
        loop.step(step)
    loop.scope.close(timeout=0.5 if kind == "stuck agent" else 10.0)
    end = loop.scope._last_line("DIR") if rank == 0 else ""
    dist.barrier()
    if undo is not None:
        undo()
    if loop.scope._handle.agent is not None and kind != "dead agent":
        loop.scope._handle.agent.wait(60)
    failed_on = getattr(loop, "failed_on", [])
    return {"warnings": loop.warnings, "bits": loop.bits(), "failed_on": failed_on, "end": end}


def train_all(rank, folder):
    alone = Loop(rank, None)
    alone.train(STEPS)
    return {kind: train(rank, kind, f"{folder}/{kind}") for kind in FAULTS} | {
        "alone": alone.bits()
    }


trained = on_ranks(train_all, 2, timeout=400.0)


@pytest.mark.parametrize("kind", FAULTS)
class TestFaults:
    def test_training_ends_with_the_same_bits(self, trained, kind):
        for by_kind in trained[0]:
            assert by_kind[kind]["bits"] == by_kind["alone"]

    def test_it_is_told(self, trained, kind):
        _, where, (told_there, told_elsewhere) = FAULTS[kind]
        for rank, by_kind in enumerate(trained[0]):
            warnings = by_kind[kind]["warnings"]
            told = told_there if rank == where else told_elsewhere if rank == 0 else 0
            assert len(warnings) == told, warnings
            if kind in ("hook", "link") and rank != where and warnings:
                assert f"rank {where} sends nothing after step" in warnings[0]
            unforeseen = kind in ("hook", "link") and rank == where
            assert all(w.endswith("[traceback]") == unforeseen for w in warnings), warnings

    def test_what_was_gathered_before_is_kept(self, trained, kind):
        run = Run.open(trained[1] / kind)
        whole = kind == "stuck agent"
        assert run.status == ("complete" if whole else "incomplete")
        if kind != "dead agent":  # in a thread, it has written nothing as yet
            rows = run.table(Table.STEPS).num_rows
            if kind == "diagnosis":
                failed_on = trained[0][0][kind]["failed_on"]
                assert failed_on, "a rank left before a step was judged"
                assert rows == failed_on[-1] + 1, "the steps on which it failed are recorded"
            else:
                assert rows == STEPS if whole else rows <= STEPS // 2

    def test_the_last_line_says_what_is_true_of_the_record(self, trained, kind):
        there = step_range(trained[1] / kind, Table.STEPS)
        beginnings = {
            "full disk": "the run could not be recorded to its end in DIR",
            "stuck agent": "the last steps were not judged before the training ended",
        }
        line = trained[0][0][kind]["end"]
        assert line.endswith(": rankscope report DIR")
        if kind in beginnings:
            assert line.startswith(beginnings[kind])
        else:
            assert line.startswith("the monitor switched itself off after step ")
            ends = "no step is" if there is None else f"the record ends with step {there[1]}:"
            assert f"and {ends}" in line


def test_a_part_of_a_record_is_called_one():
    assert str(WatchedPart(55, 42)) == (
        "the monitor switched itself off after step 55, and the record ends with step 42: "
        "nothing later is in it"
    )


# Ctrl-C that Python raises in the middle of the monitor's own work on the training thread -------

NUM_STEPS = 8
TRACED = range(5, 7)  # in which no averages are looked for, whose lines depend on what lives
STRIDE = 797
"""A prime: lines that come again and again are not met at the same place each time."""

EVIDENCE = {
    *("state_layout", "precision", "rng_used"),
    *("applied_scale", "applied_spread", "applied_odd"),
}
"""Columns, beside the digests, that are left out where the optimizer had not had its turn."""


def train_and_cut(folder, cut):
    loop = Loop(0, folder, hang_seconds=None)
    with contextlib.suppress(KeyboardInterrupt), loop.scope:
        for step in range(NUM_STEPS):
            with cut if step in TRACED else contextlib.nullcontext():
                loop.step(step)
    return loop.warnings


def cut_everywhere(rank, folder):
    count = Cut()
    assert train_and_cut(f"{folder}/whole", count) == []
    cuts = {str(at): Cut(at) for at in range(0, count.count, STRIDE)}
    cuts |= {f"end {at}": Cut(at, function="_end") for at in range(3)}  # of the backward pass
    cuts["handing over"] = Cut(0, function="_hand_over")  # of the step before
    for name, cut in cuts.items():
        assert train_and_cut(f"{folder}/{name}", cut) == [], name
    # How many lines there are depends on what the agent has answered by then.
    return [name for name, cut in cuts.items() if cut.cut]


def rows(run):
    """Return what was recorded of each step, worker, micro-batch and group, without times."""
    found = {}
    for table in Table:
        if "step" not in (names := run.table(table).column_names):
            continue
        names = [n for n in names if n != "time" and not n.endswith("seconds")]
        for row in run.table(table).select(names).to_pylist():
            found[table, row["step"], row.get("micro"), row.get("group")] = row
    return found


def test_a_step_is_recorded_whole_or_not_at_all(tmp_path):
    (names,) = run_ranks(cut_everywhere, 1, str(tmp_path), timeout=240)
    assert len(names) > 8
    complete = rows(Run.open(tmp_path / "whole"))
    lasts = set()
    for name in names:
        run = Run.open(tmp_path / name)
        assert run.status == "incomplete", name
        assert faults(run) == {}
        found = rows(run)
        last = max(step for _, step, *_ in found)
        lasts.add(last)
        assert found.keys() == {key for key in complete if key[1] <= last}, name
        for key, row in found.items():
            different = {n for n in row if row[n] != complete[key][n]}
            if "optimizer_steps" in different:
                assert row["optimizer_steps"] == 0
                left_out = {n for n in different if n.endswith("_digest")} | EVIDENCE
                different -= {"optimizer_steps", *left_out}
            assert different == set(), (name, key)
    assert lasts >= {3, 4, 5}


FUNCTIONS = ("_hand_over", "_collect_gradient", "take_seconds")


def cut_while_a_step_is_sent(rank, folder):
    """One rank catches Ctrl-C, and goes on with the batch that it was about to begin."""
    for function in FUNCTIONS:
        loop = Loop(rank, f"{folder}/{function}")
        for step in range(NUM_STEPS):
            if step == 3 and rank == 1:
                with Cut(0, function=function), pytest.raises(KeyboardInterrupt):
                    loop.forward(step)
            loop.step(step)
        loop.close()
        assert loop.warnings == [], function


cut = on_ranks(cut_while_a_step_is_sent, 2)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_others_count_a_step_that_was_cut_short_here(cut, function):
    run = Run.open(cut[1] / function)
    assert run.status == "complete"
    assert faults(run) == {}
    steps, norms_TW = run.per_worker("grad_norm")
    assert steps.tolist() == list(range(NUM_STEPS))
    _, losses_TW = run.per_worker("loss")
    _, digests_TW = run.per_worker("param_digest")
    for known_TW in (losses_TW == losses_TW, norms_TW == norms_TW):
        assert known_TW.tolist() == [[True, step != 2] for step in range(NUM_STEPS)]
    assert (digests_TW[[0, 1, 3, 4], 0] == digests_TW[[0, 1, 3, 4], 1]).all()
