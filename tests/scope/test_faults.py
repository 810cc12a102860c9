"""Faults of the monitor itself: told once, and the training ends with the same bits."""

import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from rankscope import Run, files
from rankscope.bus.evidence import Table
from rankscope.record.tables import step_range
from rankscope.session.inbox import WatchedPart
from support.loops import Loop, root_of
from support.ranks import on_ranks

pytestmark = pytest.mark.ranks

STEPS = 10
FAULT_STEP = 3

Undo = Callable[[], None] | None


def fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def break_hook(loop: Loop) -> None:
    sketcher = loop.scope._collector._tap._sketcher
    sketcher._measure = fail


def break_link(loop: Loop) -> None:
    loop.scope._link.send = fail


def break_diagnosis(loop: Loop) -> None:
    def fail_on(reports: Any) -> None:
        loop.failed_on = [report.step for report in reports]
        raise ValueError("a detector fails")

    root_of(loop)._diagnosis.observe_many = fail_on


def fill_disk(loop: Loop) -> Undo:
    sync, files.os.fsync = files.os.fsync, fail

    def undo() -> None:
        files.os.fsync = sync

    return undo


def kill_agent(loop: Loop) -> None:
    """End the agent without a word: its sockets close."""
    server = loop.scope._handle.agent.agent._server
    server._closing = True
    server._thread.join()
    for connection in server._connections.values():
        connection.socket.close()


def block_agent(loop: Loop) -> Undo:
    """Let the agent wait until the training is over: a training that waits never ends."""
    over = threading.Event()
    root = root_of(loop)
    work = root.work

    def wait_and_work() -> Any:
        assert over.wait(60)
        root.work = work
        return work()

    root.work = wait_and_work
    return over.set


FAULTS: dict[str, tuple[Callable[[Loop], Undo], int, tuple[int, int]]] = {
    # What is done, on which rank, and how many warnings that rank and the host's first one log.
    # A record that cannot be written is told of at once, and again when it cannot be closed.
    "hook": (break_hook, 1, (1, 1)),
    "link": (break_link, 1, (1, 1)),
    "diagnosis": (break_diagnosis, 0, (1, 1)),
    "full disk": (fill_disk, 0, (2, 2)),
    "dead agent": (kill_agent, 0, (1, 1)),
    "stuck agent": (block_agent, 0, (0, 0)),
}


def train(rank: int, kind: str, run_dir: str | None) -> dict[str, Any]:
    on_disk = kind == "full disk"
    loop = Loop(rank, run_dir, flush_seconds=0.0 if on_disk else 10.0)
    undo: Undo = None
    for step in range(STEPS):
        if step == FAULT_STEP and run_dir is not None:
            inject, where, _ = FAULTS[kind]
            undo = inject(loop) if rank == where else None
        loop.step(step)
    if run_dir is not None:
        loop.scope.close(timeout=0.5 if kind == "stuck agent" else 10.0)
        end = loop.scope._last_line("DIR") if rank == 0 else ""
        dist.barrier()
    if undo is not None:
        undo()
    if run_dir is not None and loop.scope._handle.agent is not None and kind != "dead agent":
        loop.scope._handle.agent.wait(60)
    facts = {"warnings": loop.warnings, "bits": loop.bits(), "failed_on": loop.failed_on}
    if run_dir is not None:
        facts["end"] = end
    return facts


def train_all(rank: int, folder: str) -> dict[str, Any]:
    alone = train(rank, "", None)
    watched = {kind: train(rank, kind, f"{folder}/{kind}") for kind in FAULTS}
    return {"alone": alone, **watched}


trained = on_ranks(train_all, 2, timeout=400.0)


@pytest.mark.parametrize("kind", FAULTS)
class TestFaults:
    def test_training_ends_with_the_same_bits(self, trained, kind):
        for by_kind in trained[0]:
            assert by_kind[kind]["bits"] == by_kind["alone"]["bits"]

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
        never_closed = kind == "full disk"
        ended = "interrupted" if never_closed else "incomplete"
        assert run.status == ("complete" if whole else ended)
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
            last = (
                "and no step is" if there is None else f"and the record ends with step {there[1]}:"
            )
            assert last in line


def test_a_part_of_a_record_is_called_one():
    assert str(WatchedPart(55, 42)) == (
        "the monitor switched itself off after step 55, and the record ends with step 42: "
        "nothing later is in it"
    )
