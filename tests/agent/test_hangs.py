import os
import threading

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent import hangs
from rankscope.agent.hang_report import (
    CodePlace,
    Fate,
    HangReport,
    ProcessState,
    Stack,
    Standing,
    judge_hang,
    judge_stacks,
)
from rankscope.agent.hangs import HangNotes, HangWatch, hang_finding
from rankscope.agent.rank_processes import permit_inspection, stacks_of
from rankscope.bus.finding import Finding
from support.accidents import wait_until
from support.ranks import run_ranks

GONE = [(ProcessState.ENDED, Fate.ENDED), (ProcessState.STOPPED, Fate.STOPPED)]
FORWARD, BACKWARD, AFTER = (1, "forward"), (2, "backward"), (3, "step")


def judge(*places, states=None, left=(), num_workers=None):
    """Judge ranks whose processes run unless told, at ``(step, (passes, phase))`` each."""
    by_rank = {
        rank: CodePlace(step, *within)
        for rank, (step, *rest) in enumerate(places)
        for within in rest
    }
    running = dict.fromkeys(by_rank, ProcessState.RUNNING)
    return judge_hang(125.0, num_workers or len(places), by_rank, running | (states or {}), left)


def fates(report):
    return {one.rank: one.fate for one in report.suspects}


def stack(*frames):
    return Stack(thread="MainThread", frames=list(frames), missing="")


IN_BACKWARD = stack("_engine_run_backward (torch/autograd/graph.py:841)", "backward (_tensor.py:1)")
IN_BARRIER = stack("barrier (torch/distributed/distributed_c10d.py:4000)", "save (job.py:1)")
IN_WRAPPER = stack("DistributedDataParallel._pre_forward (torch/nn/parallel/distributed.py:1775)")
IN_GATHERING = stack(
    "all_gather_into_tensor (torch/distributed/distributed_c10d.py:4000)",
    "foreach_all_gather (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:200)",
)
IN_LAYER = stack("Block.forward (model.py:10)", *IN_WRAPPER["frames"])
IN_LOCK = stack("take (job.py:10)", "train (job.py:20)")


def test_a_rank_in_the_forward_pass_holds_up_those_in_the_backward_pass():
    report = judge((7, BACKWARD), (7, FORWARD), (7, BACKWARD))
    assert fates(report) == {1: Fate.STUCK}
    assert (report.step, report.waiting, report.phase) == (7, (0, 2), "backward")
    assert str(report) == (
        "step 7 has not ended for 125 s; rank 1 is alive and behind, in the forward pass of step 7"
    )


@pytest.mark.parametrize(("state", "fate"), GONE)
def test_an_ended_or_stopped_rank_accounts_for_the_hang_wherever_it_was(state, fate):
    # Rank 0 is behind too, but only since it waits for rank 1.
    report = judge((7, FORWARD), (7, BACKWARD), (7, BACKWARD), states={1: state})
    assert fates(report) == {1: fate}
    assert report.waiting == (0, 2)


def test_a_rank_that_left_early_is_named_and_one_that_left_in_time_is_not():
    report = judge((7, FORWARD), (5, AFTER), (7, FORWARD), left=(1, 2))
    assert fates(report) == {1: Fate.LEFT}
    assert (report.step, report.waiting) == (7, (0,))
    assert "rank 1 is not watched any more, after the backward pass of step 5" in str(report)


def test_a_rank_that_never_spoke_is_missing_in_the_first_step_only():
    report = judge((0, BACKWARD), (0, BACKWARD), num_workers=4)
    assert fates(report) == {2: Fate.MISSING, 3: Fate.MISSING}
    assert str(report).endswith("rank 2 never said anything; rank 3 never said anything")
    assert judge((1, FORWARD), (1, FORWARD), num_workers=4).is_pause


# Stacks, where places tell nothing -----------------------------------------------------------

LEVEL = HangReport(7, 125.0, waiting=(0, 1, 2))


@pytest.mark.parametrize("waits", [IN_WRAPPER, IN_GATHERING])
def test_ranks_that_wait_in_the_wrapper_as_a_step_begins_are_held_up(waits):
    report = judge_stacks(LEVEL, {0: waits, 1: IN_LAYER, 2: waits})
    assert (report.ranks, report.phase) == ((1,), "forward")


def test_ranks_that_wait_for_one_that_saves_pause():
    assert judge_stacks(LEVEL, {0: IN_LOCK, 1: IN_BARRIER, 2: IN_BARRIER}) == LEVEL
    assert judge_stacks(LEVEL, dict.fromkeys(range(3), IN_LOCK)) == LEVEL
    assert judge_stacks(LEVEL, dict.fromkeys(range(3), IN_LAYER)) == LEVEL


def test_ranks_that_all_compile_do_not_hang():
    compiling = stack(
        "wait (subprocess.py:1)", "load (torch/_inductor/codecache.py:3000)", *IN_BACKWARD["frames"]
    )
    running = stack("call (torch/_inductor/output_code.py:600)", *IN_BACKWARD["frames"])
    level = judge(*[(7, BACKWARD)] * 3)
    assert not level.is_pause
    assert judge_stacks(level, dict.fromkeys(range(3), compiling)).is_pause
    assert judge_stacks(level, {0: compiling, 1: running, 2: compiling}) == level


def test_the_rank_that_went_on_without_a_collective_is_named():
    behind = judge((7, FORWARD), (7, FORWARD), (7, BACKWARD), (7, FORWARD))
    assert behind.ranks == (0, 1, 3)
    report = judge_stacks(behind, dict.fromkeys((0, 1, 3), IN_GATHERING) | {2: IN_BACKWARD})
    assert fates(report) == {2: Fate.AHEAD}
    assert (report.waiting, report.phase) == ((0, 1, 3), "")
    assert "rank 2 is alive and ahead, without the collective" in str(report)
    assert judge_stacks(report, {2: IN_BACKWARD}) == report


@pytest.mark.parametrize(
    "stacks",
    [
        {0: IN_GATHERING, 1: IN_BARRIER, 3: IN_GATHERING},
        {0: IN_LOCK, 1: IN_LOCK, 3: IN_LOCK},
        {0: IN_GATHERING, 1: IN_GATHERING},
    ],
    ids=["two collectives", "no collective", "one stack is unknown"],
)
def test_who_is_ahead_is_not_accused_otherwise(stacks):
    behind = judge((7, FORWARD), (7, FORWARD), (7, BACKWARD), (7, FORWARD))
    assert judge_stacks(behind, stacks | {2: IN_BACKWARD}) == behind


# When one begins and ends --------------------------------------------------------------------


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
        return [fates(report) for report in self.reports]


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


@pytest.mark.parametrize(("state", "fate"), GONE)
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
    recorded = IN_LOCK | {"collectives": {"rank": 3, "groups": {}}}
    finding = hang_finding(report((3, Fate.STUCK)), {0: IN_BACKWARD, 3: recorded})
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
        "stack_of_rank_0": "_engine_run_backward (torch/autograd/graph.py:841) ← "
        "backward (_tensor.py:1)",
    }
    assert Finding.from_json(finding.to_json()) == finding


def test_a_finding_about_many_ranks_stays_short():
    finding = hang_finding(
        report(*[(rank, Fate.ENDED) for rank in range(3, 1003)]),
        dict.fromkeys(range(9999), IN_LOCK),
    )
    assert len(finding.explanation) < 700
    assert "ranks 7–1002" in finding.explanation
    assert len(finding.evidence) < 50


class Processes:
    """Two ranks, of which rank 1 is behind; each look takes the next stacks, if there are some."""

    def __init__(self, *taken):
        self.taken = list(taken)
        self.places = {0: CodePlace(7, *BACKWARD), 1: CodePlace(7, *FORWARD)}
        self.lines = []

    def states(self):
        return dict.fromkeys(self.places, ProcessState.RUNNING)

    def marks(self):
        return self.places

    def stacks(self):
        return self.taken.pop(0) if self.taken else None

    def request_states(self):
        pass

    def take_stacks(self):
        pass

    def write_line(self, line):
        self.lines.append(line)


@pytest.fixture
def notes_of(monkeypatch):
    monkeypatch.setattr(hangs, "_LOOK_SECONDS", 0.0)

    def begin(processes):
        found = []
        notes = HangNotes(2, 0.0, processes, found.append)
        for step in (-1, 6):
            for rank in (0, 1):
                notes.observe(rank, step)
        return notes, found

    return begin


def test_the_line_of_a_hang_comes_once_with_all_stacks_and_once_as_it_ends(notes_of):
    processes = Processes(None, {0: IN_BACKWARD}, None, {1: IN_LOCK})
    notes, found = notes_of(processes)
    for _ in range(6):
        notes.look(6)
    [line] = processes.lines
    assert line.startswith("warning: Step 7 has not ended for 0 s: rank 1 is alive and behind")
    assert line.endswith(
        "by train (job.py:20). " + hangs._RECORDER_OFF.strip() + " [time.hang, since step 7]"
    )
    for rank in (0, 1):
        notes.observe(rank, 7)
    notes.close(7)
    assert processes.lines[1:] == [
        "closed: Step 7 ended only after 0 s: rank 1 was alive and behind, in the forward pass of "
        "step 7; rank 0 waited in the backward pass. [time.hang, since step 7]"
    ]
    assert [one.status for one in found] == ["open", "closed"]


def test_a_hang_is_noted_without_the_stacks_of_a_host_that_sends_none(notes_of, monkeypatch):
    monkeypatch.setattr(hangs, "_STACKS_SECONDS", 0.0)
    processes = Processes()
    notes, found = notes_of(processes)
    for _ in range(3):
        notes.look(6)
    assert len(processes.lines) == len(found) == 1


# Real ranks -----------------------------------------------------------------------------------


def stand_still(file):
    wait_until(file.exists, 100.0)


def look_until_seen(folder, pids, where):
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
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), 100.0)
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
