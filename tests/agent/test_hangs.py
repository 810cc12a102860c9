"""When a hang begins and ends, by a clock made by hand; and the finding about it."""

import os
import threading
import time

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent.hang_report import (
    CodePlace,
    Fate,
    HangReport,
    ProcessState,
    Stack,
    Standing,
    judge_stacks,
)
from rankscope.agent.hangs import HangWatch, hang_finding
from rankscope.agent.processes import permit_inspection, stacks_of
from rankscope.bus.finding import Finding
from support.ranks import run_ranks

ENDED, STOPPED = ProcessState.ENDED, ProcessState.STOPPED
LOCKED = Stack(thread="MainThread", frames=["take (job.py:10)", "train (job.py:20)"], missing="")
BACKWARD = Stack(
    thread="MainThread", frames=["_engine_run_backward (torch/autograd/graph.py:9)"], missing=""
)


class Job:
    """Three ranks that greet at second 0, and are looked at every second."""

    def __init__(self, hang_seconds=120.0):
        self.watch = HangWatch(3, hang_seconds)
        self.now = 0.0
        self.states = dict.fromkeys(range(3), ProcessState.RUNNING)
        self.marks = None
        self.reports = []
        self.deliver(-1)

    def deliver(self, step, ranks=range(3)):
        for rank in ranks:
            self.watch.observe(rank, step, self.now)

    def train(self, first, last, seconds):
        for step in range(first, last):
            self.wait(seconds)
            self.deliver(step)

    def wait(self, seconds):
        for _ in range(int(seconds)):
            self.now += 1.0
            report = self.watch.look(self.now, self.states, self.marks)
            self.reports += [] if report is None else [report]

    def fates(self):
        return [{one.rank: one.fate for one in report.suspects} for report in self.reports]


def test_a_hang_is_told_once_and_its_end_once():
    job = Job()
    job.train(0, 5, 1)
    job.deliver(5, ranks=(0, 1))
    job.wait(119)
    assert job.reports == []
    job.wait(1000)
    assert job.fates() == [{2: Fate.STUCK}]
    assert (job.reports[0].step, job.reports[0].seconds) == (5, 120)
    job.deliver(5, ranks=(2,))
    job.wait(1)
    assert len(job.reports) == 1  # rank 2 came as far as the others; nobody goes on yet
    job.deliver(6)
    job.wait(500)
    assert [report.recovered for report in job.reports] == [False, True, False]
    assert job.reports[1].ranks == (2,)
    assert job.reports[1].seconds == 1120


def test_a_long_pause_of_all_ranks_accuses_nobody():
    job = Job()
    job.train(0, 5, 1)
    job.wait(500)
    [pause] = job.reports
    assert pause.is_pause
    assert hang_finding(pause) is None
    job.train(5, 6, 1)
    job.wait(1)
    assert job.reports[-1].recovered
    assert hang_finding(job.reports[-1]) is None


def test_a_first_step_may_take_long():
    job = Job()
    job.wait(10_000)
    job.marks = dict.fromkeys(range(3), CodePlace(0, 1, "forward"))
    job.wait(10_000)
    job.marks[2] = CodePlace(0, 2, "backward")  # one compiles faster than the others
    assert job.reports == []


@pytest.mark.parametrize(("state", "fate"), [(ENDED, Fate.ENDED), (STOPPED, Fate.STOPPED)])
def test_a_rank_that_dies_or_is_stopped_in_the_first_step_is_named(state, fate):
    job = Job()
    job.states[1] = state
    job.wait(121)
    assert job.fates() == [{1: fate}]


def test_all_in_the_first_backward_pass_but_one_is_a_hang():
    job = Job()
    job.marks = {rank: CodePlace(0, 2, "backward") for rank in range(3)} | {
        1: CodePlace(0, 1, "forward")
    }
    job.wait(121)
    assert job.fates() == [{1: Fate.STUCK}]


# The finding ----------------------------------------------------------------------------------


def report(*fates, **more):
    suspects = [Standing(rank, fate, CodePlace(42, 1, "forward")) for rank, fate in fates]
    return HangReport(42, 130.4, tuple(suspects), (0, 1, 2), "backward", **more)


def test_a_finding_says_who_where_and_who_waits():
    recorded = LOCKED | {"collectives": {"rank": 3, "groups": {}}}
    finding = hang_finding(report((3, Fate.STUCK)), {0: BACKWARD, 3: recorded})
    assert finding.explanation == (
        "Step 42 has not ended for 130 s: rank 3 is alive and behind, in the forward pass of "
        "step 42; ranks 0–2 wait in the backward pass. Rank 3 is in take (job.py:10), called by "
        "train (job.py:20)."
    )
    assert (finding.id, finding.status, finding.ranks) == ("time.hang:step-42", "open", (3,))
    assert (finding.first_step, finding.last_step, finding.step) == (42, 42, 41)
    assert finding.evidence == {
        "seconds": 130.4,
        "stuck": [3],
        "waiting_ranks": 3,
        "place_of_rank_3": "in the forward pass of step 42",
        "stack_of_rank_3": "take (job.py:10) ← train (job.py:20)",
        "stack_of_rank_0": "_engine_run_backward (torch/autograd/graph.py:9)",
    }
    assert Finding.from_json(finding.to_json()) == finding


def test_a_finding_about_many_ranks_stays_short():
    finding = hang_finding(
        report(*[(rank, Fate.ENDED) for rank in range(3, 1003)]), dict.fromkeys(range(9999), LOCKED)
    )
    assert len(finding.explanation) < 700
    assert "ranks 7–1002" in finding.explanation
    assert len(finding.evidence) < 50


# Real ranks -----------------------------------------------------------------------------------


def stand_still(file):
    while not file.exists():
        time.sleep(0.02)


def look_until_seen(folder, pids, where):
    """Look at all ranks until stacks tell who is waited for; let it go on then."""
    level = HangReport(1, 125.0, waiting=(0, 1, 2))
    while True:
        stacks = stacks_of(dict.fromkeys(pids, 0))
        by_rank = {rank: stacks[pid] for rank, pid in enumerate(pids)}
        report = judge_stacks(level, by_rank)
        if report.ranks == (1,) and report.phase == where and "stand_still" in str(by_rank[1]):
            (folder / "finding").write_text(hang_finding(report, by_rank).explanation)
            break
    (folder / "go on").touch()


def train_with_one_that_stands_still(rank, folder, agent, at):
    permit_inspection(agent)
    (folder / str(rank)).write_text(str(os.getpid()))
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(3):
        if (rank, step) == (1, at):
            stand_still(folder / "go on")
        model(torch.ones(2, 4)).sum().backward()


def agent_of(folder, where):
    files = [folder / str(rank) for rank in range(3)]
    while not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.02)
    look_until_seen(folder, [int(file.read_text()) for file in files], where)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("at", "where"),
    [(1, "forward"), (2, "backward")],  # DDP rebuilds its buckets as step 1 begins
)
def test_stacks_of_real_ranks_tell_who_holds_up_a_step(tmp_path, at, where):
    agent = threading.Thread(target=agent_of, args=(tmp_path, where), daemon=True)
    agent.start()
    run_ranks(train_with_one_that_stands_still, 3, tmp_path, os.getpid(), at)
    agent.join()
    told = (tmp_path / "finding").read_text()
    assert f"rank 1 is alive and behind, in step 1; ranks 0 and 2 wait in the {where} pass" in told
    assert "stand_still (test_hangs.py:" in told
