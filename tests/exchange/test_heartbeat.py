"""Heartbeats over torch's stores: real ranks that hang or die, stores that fail, an exact clock."""

import json
import logging
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rankscope.core.hang import Beat
from rankscope.exchange.heartbeat import Heartbeat, StallWatch, default_store
from support.ranks import RankError, run_ranks

PATIENCE = 60.0


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


# Real ranks -----------------------------------------------------------------------------------


def stall(rank):
    """Rank 2 stays in the forward pass of step 3 until all have complained about it."""
    told = dist.PrefixStore("told", dist.distributed_c10d._get_default_store().clone())
    reports = []

    def on_hang(report):
        reports.append(report)
        if report.own.step == 3 and report.suspects == (2,):
            told.set(str(rank), "yes")

    store = default_store()
    assert store is not None
    heartbeat = Heartbeat(store, rank, 3, interval_seconds=0.1, hang_seconds=1.0, on_hang=on_hang)
    dist.barrier()
    for step in range(4):
        heartbeat.beat(step, "forward")
        if rank == 2 and step == 3:
            wait_for(lambda: told.check(["0", "1", "2"]))
        heartbeat.beat(step, "backward")
        dist.all_reduce(torch.ones(1))
        heartbeat.beat(step, "step")
    heartbeat.beat(4, "forward")
    wait_for(lambda: any(report.recovered for report in reports))
    heartbeat.stop()
    return [(str(r), r.own.step, r.suspects, r.recovered) for r in reports]


@pytest.mark.ranks
def test_waiting_ranks_name_the_one_that_sleeps():
    for rank, reports in enumerate(run_ranks(stall, 3)):
        hang, recovery = [report for report in reports if report[1] == 3]
        assert hang[2] == (2,)
        assert "behind the others: rank 2, in the forward pass of step 3" in hang[0]
        assert not hang[3]
        assert recovery[3], f"rank {rank} did not tell that the step has ended"


def lose_a_rank(rank, folder):
    reports = []
    store = default_store()
    heartbeat = Heartbeat(
        store, rank, 3, interval_seconds=0.1, hang_seconds=1.0, on_hang=reports.append
    )
    heartbeat.beat(0, "forward")
    wait_for(lambda: store.check([f"rankscope/heartbeat/{other}" for other in range(3)]))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(lambda: reports)
    Path(folder, str(rank)).write_text(json.dumps([b.rank for b in reports[0].silent]))
    heartbeat.stop()


@pytest.mark.ranks
def test_a_killed_rank_is_named_as_silent(tmp_path):
    with pytest.raises(RankError, match="rank 2 died"):
        run_ranks(lose_a_rank, 3, str(tmp_path))
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "[2]"


def hold_the_store(rank):
    """Wait for a key in the training's own client, and look whether beats still arrive."""
    training = dist.distributed_c10d._get_default_store()
    store = default_store()
    threading.Thread(target=lambda: training.get("never, until the end"), daemon=True).start()
    heartbeat = Heartbeat(store, rank, 1, interval_seconds=0.02, on_hang=print)
    wait_for(lambda: store.check(["rankscope/heartbeat/0"]))

    def count():
        return json.loads(store.multi_get(["rankscope/heartbeat/0"])[0])[0]

    first = count()
    wait_for(lambda: count() > first + 3)
    heartbeat.stop()
    dist.distributed_c10d._get_default_store().clone().set("never, until the end", "now")
    return True


@pytest.mark.ranks
def test_a_training_that_waits_for_the_store_does_not_hold_up_the_beats():
    assert run_ranks(hold_the_store, 1) == [True]


def test_a_tcp_store_serves_the_heartbeat_while_its_other_client_waits():
    training = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=PATIENCE))
    store = training.clone()
    waiting = threading.Thread(target=training.get, args=("key",))
    waiting.start()
    heartbeat = Heartbeat(store, 0, 1, interval_seconds=0.02, on_hang=print)
    wait_for(lambda: store.check(["rankscope/heartbeat/0"]))
    heartbeat.stop(PATIENCE)
    assert json.loads(store.get("rankscope/heartbeat/0"))[4] == "stopped"
    store.set("key", "now")
    waiting.join()


def test_without_a_process_group_there_is_no_heartbeat(caplog):
    with caplog.at_level(logging.DEBUG, "rankscope"):
        assert default_store() is None
    assert len(caplog.records) == 1


# An exact clock -------------------------------------------------------------------------------


class Watched:
    """A rank of three, looked at every 5 seconds; the others are level with it unless told."""

    def __init__(self):
        self.watch = StallWatch(3, interval_seconds=5.0, hang_seconds=120.0)
        self.now = self.began = 0.0
        self.step, self.count, self.reads = -1, 0, 0
        self.others = {1: 0, 2: 0}  # steps that they are behind
        self.reports = []

    def begin_step(self):
        self.step, self.began = self.step + 1, self.now

    def beat(self, rank):
        step = self.step - self.others.get(rank, 0)
        return Beat(rank, self.count, self.now, step, 1, "forward", self.began)

    def read(self):
        self.reads += 1
        return {rank: self.beat(rank) for rank in range(3)}

    def pass_time(self, seconds):
        for _ in range(int(seconds / 5)):
            self.now, self.count = self.now + 5.0, self.count + 1
            report = self.watch.look(self.beat(0), self.began, self.now, self.read)
            self.reports += [] if report is None else [report]


def test_a_hang_is_told_once_and_its_end_once():
    rank = Watched()
    rank.begin_step()
    rank.pass_time(115)
    assert rank.reports == []
    rank.others[2] = 1
    rank.pass_time(1000)
    assert [report.suspects for report in rank.reports] == [(2,)]
    assert rank.reports[0].seconds == 120
    assert rank.reads == 2
    rank.begin_step()
    rank.pass_time(50)
    assert [report.recovered for report in rank.reports] == [False, True]
    assert rank.reports[1].seconds == 1115
    rank.pass_time(500)
    assert len(rank.reports) == 3


def test_before_the_first_step_nothing_is_a_hang():
    rank = Watched()
    rank.pass_time(10_000)
    assert rank.reports == []
    assert rank.reads == 0


def test_a_training_of_slow_steps_has_time_for_twenty():
    rank = Watched()
    for _ in range(10):
        rank.begin_step()
        rank.pass_time(60)
    rank.begin_step()
    rank.pass_time(1195)
    assert rank.reports == []
    rank.pass_time(5)
    assert len(rank.reports) == 1


def test_quick_steps_read_nothing():
    rank = Watched()
    for _ in range(50):
        rank.begin_step()
        rank.pass_time(5)
    assert rank.reads == 0


def test_steps_between_two_looks_count_for_the_pace():
    rank = Watched()
    for _ in range(20):
        rank.step += 9
        rank.begin_step()
        rank.pass_time(100)
    rank.pass_time(100)  # 10 s a step: 200 s are 20 steps
    assert len(rank.reports) == 1


# A store that fails ---------------------------------------------------------------------------


class BadStore:
    """Raises, or never returns."""

    def __init__(self, error=None):
        self.error = error
        self.called = threading.Event()
        self.released = threading.Event()

    def set(self, key, value):
        self.called.set()
        if self.error is not None:
            raise self.error
        self.released.wait(PATIENCE)

    def check(self, keys):
        raise AssertionError

    multi_get = check


def test_a_store_that_fails_ends_the_heartbeat_with_one_debug_line(caplog):
    with caplog.at_level(logging.DEBUG, "rankscope"):
        heartbeat = Heartbeat(BadStore(RuntimeError("gone")), 3, 4, on_hang=print)
        heartbeat.stop(PATIENCE)
    heartbeat.beat(1, "forward")
    [record] = caplog.records
    assert record.levelno == logging.DEBUG
    assert "heartbeat of rank 3 has ended: gone" in record.getMessage()


def test_a_store_that_never_answers_blocks_neither_training_nor_the_end():
    store = BadStore()
    heartbeat = Heartbeat(store, 0, 1, on_hang=print)
    assert store.called.wait(PATIENCE)
    heartbeat.beat(1, "forward")
    heartbeat.stop(timeout=0.05)
    store.released.set()


def test_an_on_hang_that_raises_is_told_and_survived(caplog):
    called = threading.Event()

    def on_hang(report):
        called.set()
        raise OSError("no space")

    store = dist.HashStore()
    heartbeat = Heartbeat(store, 0, 2, interval_seconds=0.02, hang_seconds=0.05, on_hang=on_hang)
    heartbeat.beat(0, "forward")
    assert called.wait(PATIENCE)
    count = json.loads(store.get("rankscope/heartbeat/0"))[0]
    wait_for(lambda: json.loads(store.get("rankscope/heartbeat/0"))[0] > count + 2)
    heartbeat.stop(PATIENCE)
    assert [record.getMessage() for record in caplog.records] == [
        "on_hang raised; training and heartbeat go on"
    ]


def test_few_of_many_ranks_read(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(threading.Thread, "join", lambda thread, timeout: None)
    heartbeats = [Heartbeat(dist.HashStore(), r, 1000, on_hang=print) for r in range(1000)]
    readers = [rank for rank, heartbeat in enumerate(heartbeats) if heartbeat._reads]
    assert readers == list(range(0, 1000, 125))
    for heartbeat in heartbeats:
        heartbeat.stop()
