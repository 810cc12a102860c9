import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.agent.hang_report import (
    CodePlace,
    Fate,
    HangReport,
    Reader,
    RecorderThread,
    Stack,
    Standing,
    hanging_collective,
    judge_collectives,
    read_dumps,
)
from rankscope.agent.hangs import hang_finding
from rankscope.bus.finding import Severity
from support.accidents import wait_until
from support.findings import events_of
from support.ranks import RankError, run_ranks


def call(number, operation="all_reduce", shape=(4,), *, ended=True, group="0", p2p=False):
    """Return an entry with the fields of torch 2.13's version 2.10, as NCCL and gloo write it."""
    tensor = {
        f"{side}_{what}": value
        for side in ("input", "output")
        for what, value in (("sizes", [list(shape)]), ("dtypes", ["Float"]))
    }
    return {
        "collective_seq_id": 0 if p2p else number,
        "p2p_seq_id": number if p2p else 0,
        "is_p2p": p2p,
        "op_id": number,
        "pg_id": int(group),
        "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "profiling_name": f"nccl:{operation}",
        "record_id": number - 1,
        "retired": ended,
        "state": "completed" if ended else "started",
        "thread_id": "140001963301760",
        "thread_name": "python",
        "time_created_ns": 1795886488352565532,
        "timeout_ms": 600000,
        **tensor,
    }


def dump(*entries, groups=None):
    config = {
        name: {"name": name, "desc": "", "ranks": str(r)} for name, r in (groups or {}).items()
    }
    return json.dumps({"version": "2.10", "pg_config": config, "entries": entries}).encode()


def known(*dumps):
    return {rank: read_dumps(rank, [each]) for rank, each in enumerate(dumps)}


DONE = [call(7), call(8)]
WAITING = dump(*DONE, call(9, shape=(7, 2), ended=False))


@pytest.mark.parametrize("operation", ["all_to_all", "gather", "all_gather"])
def test_operations_of_uneven_shapes_may_differ(operation):
    dumps = [dump(call(1, operation, (size,), ended=False)) for size in (3, 4)]
    found = hanging_collective(known(*dumps))
    assert not found.differs
    assert found.words().endswith("does not end, and all its ranks have entered it")


# In a report ----------------------------------------------------------------------------------


def stacks(*dumps):
    return {
        rank: Stack(thread="", frames=["f (a.py:1)"], missing="", collectives=one)
        for rank, one in known(*dumps).items()
    }


MISMATCH = stacks(WAITING, WAITING, dump(*DONE, call(9, ended=False)))
PAUSE = HangReport(7, 125.0, waiting=(0, 1, 2))
BACKWARD = HangReport(7, 125.0, waiting=(0, 1, 2), phase="backward")
BEHIND = HangReport(7, 125.0, (Standing(0, Fate.STUCK, CodePlace(7)),), (1, 2))


def test_collectives_that_do_not_match_are_no_pause():
    report = judge_collectives(PAUSE, MISMATCH)
    assert {one.rank: one.fate for one in report.suspects} == {2: Fate.OTHER}
    finding = hang_finding(report, MISMATCH)
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (2,))
    assert "rank 2 is alive, in a collective that does not match" in finding.explanation
    assert finding.evidence["collective"] == "number 9 of default_pg"
    assert finding.evidence["calls"] == {"all_reduce 7×2 Float": [0, 1], "all_reduce 4 Float": [2]}


@pytest.mark.parametrize(("before", "fate"), [(BACKWARD, Fate.STUCK), (BEHIND, Fate.AHEAD)])
def test_the_rank_outside_of_the_collective_is_suspect(before, fate):
    report = judge_collectives(before, stacks(WAITING, dump(*DONE), WAITING))
    assert {one.rank: one.fate for one in report.suspects} == {1: fate}
    assert report.waiting == (0, 2)


METRICS = [call(3, group="1")]
SKIPPED = {  # ranks 0 and 2 wait in a group's collective, rank 1 in the next backward pass
    0: dump(*DONE, *METRICS, call(4, shape=(), ended=False, group="1"), groups={"1": [0, 1, 2]}),
    1: dump(*DONE, *METRICS, call(9, ended=False), groups={"1": [0, 1, 2]}),
}


@pytest.mark.parametrize(
    "before",
    [
        HangReport(7, 125.0, tuple(Standing(r, Fate.STUCK, CodePlace(7)) for r in (0, 2)), (1,)),
        HangReport(7, 125.0, (Standing(1, Fate.AHEAD, CodePlace(7)),), (0, 2)),
    ],
)
def test_the_rank_that_skipped_a_collective_of_a_group_is_blamed_alone(before):
    by_rank = stacks(SKIPPED[0], SKIPPED[1], SKIPPED[0])
    report = judge_collectives(before, by_rank)
    assert {one.rank: one.fate for one in report.suspects} == {1: Fate.AHEAD}
    assert (report.waiting, report.phase) == ((0, 2), "")
    assert judge_collectives(report, by_rank) == report
    explanation = hang_finding(report, by_rank).explanation
    assert "rank 1 is alive and ahead, without the collective in which others wait" in explanation
    assert "Rank 0 is in f (a.py:1)." in explanation  # where the collective is called
    assert explanation.endswith(
        "all_reduce 4 of group 1, scalar Float, does not end: rank 1 has not entered it and waits "
        "in all_reduce 9 of default_pg."
    )
    over = hang_finding(replace(report, recovered=True), by_rank).explanation
    assert over.endswith(
        "did not end: rank 1 had not entered it and waited in all_reduce 9 of default_pg."
    )


@pytest.mark.parametrize(
    ("before", "fates"),
    [
        (BEHIND, {1: Fate.AHEAD}),
        (PAUSE, {0: Fate.OTHER, 1: Fate.OTHER}),  # nothing shows who of two went wrong
    ],
)
def test_of_two_ranks_in_a_circle_the_one_that_went_on_is_blamed(before, fates):
    report = judge_collectives(before, stacks(SKIPPED[0], SKIPPED[1]))
    assert {one.rank: one.fate for one in report.suspects} == fates


def test_a_rank_behind_that_only_waits_for_another_is_no_suspect():
    behind = tuple(Standing(rank, Fate.STUCK, CodePlace(7)) for rank in (0, 1))
    dumps = [
        dump(*DONE, groups={"1": [0, 1]}),
        dump(*DONE, call(4, ended=False, group="1"), groups={"1": [0, 1]}),
        WAITING,
    ]
    report = judge_collectives(HangReport(7, 125.0, behind, (2,)), stacks(*dumps))
    assert report.suspects == behind[:1]
    assert report.waiting == (1, 2)


# Between two processes ------------------------------------------------------------------------


def ask(reader, seconds):
    reader.request()
    return reader.read(time.monotonic() + seconds)


def test_entries_are_read_again_and_again_until_the_end():
    dumps = [[WAITING], [dump(*DONE)], ["no JSON"]]
    thread = RecorderThread(3, lambda: dumps.pop(0))
    reader = Reader(os.getpid(), thread.numbers)
    first, second, third = (ask(reader, 30.0) for _ in range(3))
    assert first == json.loads(json.dumps(read_dumps(3, [WAITING])))
    assert [entry[0] for entry in second["groups"]["0"]["entries"]] == [7, 8]
    assert third is None
    thread.close()
    wait_until(lambda: not Path(f"/proc/self/fd/{thread.numbers.answer}").exists())
    assert ask(reader, 0.0) is None
    reader.close()


# Real ranks -----------------------------------------------------------------------------------


def record_collectives():
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"


def train_until_seen(rank, folder, train):
    def leave():
        wait_until((folder / "seen").exists, 120.0)
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    options = {"hang_seconds": 1.0, "canary": False, "overhead_budget": None}
    with rankscope.watch(model, run_dir=folder / "run", **options):
        train(rank, folder, model)
    raise AssertionError("the hang has ended")


def with_two_hangs(rank, folder, model):
    """Rank 1 comes late in step 4; in step 6 it broadcasts in place of the others' all-reduce."""
    for step in range(7):
        loss = model(torch.ones(2, 4)).sum()
        if (rank, step) == (1, 4):
            wait_until((folder / "one seen").exists, 120.0)
        loss.backward()
        if (rank, step) == (1, 6):
            dist.broadcast(loss.detach(), 0)
        else:
            dist.all_reduce(loss.detach())


def with_a_skipped_collective(rank, folder, model):
    """In step 4, rank 1 leaves out an all-reduce of a group of which it has entered none before."""
    group = dist.new_group()
    for step in range(7):
        model(torch.ones(2, 4)).sum().backward()
        if step == 4 and rank != 1:
            dist.all_reduce(torch.ones(1), group=group)


def hangs_in(run_dir):
    return [event for event in events_of(run_dir) if event["cause"] == "time.hang"]


def see_hangs(folder, train, *names):
    """Train; return all findings of hangs. A file tells of each that is known by its collective."""
    found = []

    def known():
        hangs = [each for each in hangs_in(folder / "run") if "Recorder" in each["explanation"]]
        return {each["first_step"] for each in hangs}

    def see():
        for number, name in enumerate(names, 1):
            wait_until(lambda number=number: len(known()) >= number, 120.0)
            found.extend(hangs_in(folder / "run"))
            (folder / name).touch()

    watcher = threading.Thread(target=see, daemon=True)
    watcher.start()
    with pytest.raises(RankError, match="died"):
        run_ranks(train_until_seen, 3, folder, train, prepare=record_collectives)
    watcher.join(1.0)
    return found


@pytest.mark.ranks
def test_hangs_of_real_ranks_name_the_collective(tmp_path):
    said = str(see_hangs(tmp_path, with_two_hangs, "one seen", "seen"))
    assert "of default_pg, 20 Float, does not end: rank 1 has not entered it" in said
    assert "rank 1 is alive, in a collective that does not match those of others" in said
    assert "ranks 0 and 2 in all_reduce scalar Float; rank 1 in broadcast scalar Float" in said


@pytest.mark.ranks
def test_a_collective_that_one_rank_skips_is_named_with_that_rank(tmp_path):
    found = see_hangs(tmp_path, with_a_skipped_collective, "seen")
    assert {tuple(event["ranks"]) for event in found} == {(1,)}  # and never ranks that wait
    assert "all_reduce 1 of group 1, 1 Float, does not end: rank 1 has not entered it" in str(found)
