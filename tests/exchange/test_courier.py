"""The courier over channels between threads: order, agreement, and every way to end."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from rankscope.core.step import GatheredStep, MeasuredGradient
from rankscope.exchange import (
    ChannelError,
    Courier,
    FlatGathering,
    Goodbye,
    Layout,
    MemoryChannel,
    Outcome,
    WorkerStep,
    courier,
)


class Worker:
    """One simulated worker with a courier that remembers what it got."""

    def __init__(
        self,
        channel: MemoryChannel,
        *,
        every: int = 1,
        fail_at: int = -1,
        error: type[BaseException] = OSError,
        before_delivery: Callable[[], object] = lambda: None,
    ) -> None:
        self.got: list[GatheredStep] = []
        self.ended: list[BaseException] = []
        self.fail_at = fail_at
        self.error = error
        self.before_delivery = before_delivery
        self.courier = Courier(
            FlatGathering(channel, Layout(sketch_width=3)),
            interval_at=lambda step: every,
            deliver=self.deliver,
            idle=lambda: None,
            ended=self.ended.append,
        )

    def deliver(self, outcome: Outcome) -> None:
        self.before_delivery()
        gathered = outcome.gathered
        if gathered.step == self.fail_at:
            raise self.error("disk full")
        self.got.append(gathered)


def message(step: int, rank: int) -> WorkerStep:
    empty = np.empty(0)
    sketch = np.full(3, rank, np.float32)
    gradient = MeasuredGradient(empty, sketch, np.empty((0, 0), np.float32), empty, empty)
    return WorkerStep(step, {"loss": 10.0 * step + rank}, gradient, np.arange(rank + 1))


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_all_workers_get_all_steps_in_order(num_workers):
    workers = [Worker(channel, every=2) for channel in MemoryChannel.connect(num_workers)]
    for step in range(5):
        for rank, worker in enumerate(workers):
            worker.courier.send(lambda step=step, rank=rank: message(step, rank))
    for worker in workers:
        worker.courier.leave()
    for worker in workers:
        assert worker.courier.join(30)
        assert not worker.ended
        assert [g.step for g in worker.got] == list(range(5))
        assert [g.observed for g in worker.got] == [True, False, True, False, True]
        assert worker.got[3].workers["loss"].tolist() == [30.0 + r for r in range(num_workers)]
        assert [len(s) for s in worker.got[3].samples] == list(range(1, num_workers + 1))


def test_messages_grow_while_running():
    workers = [Worker(channel) for channel in MemoryChannel.connect(2)]
    for step in range(3):
        for worker in workers:
            many = WorkerStep(step, samples=np.arange(1000))
            worker.courier.send(lambda many=many: many)
    for worker in workers:
        worker.courier.leave()
    for worker in workers:
        assert worker.courier.join(30)
    assert [len(g.samples[1]) for g in workers[0].got] == [64, 1000, 1000]


def test_a_worker_that_leaves_early_is_named_to_the_others():
    stays, leaves = (Worker(channel) for channel in MemoryChannel.connect(2))
    for worker, rank in ((stays, 0), (leaves, 1)):
        worker.courier.send(lambda rank=rank: message(0, rank))
    leaves.courier.leave()
    stays.courier.send(lambda: message(1, 0))
    assert stays.courier.join(30)
    assert leaves.courier.join(30)
    assert len(stays.got) == 1
    assert isinstance(stays.ended[0], Goodbye)
    assert stays.ended[0].ranks == (1,)
    assert not leaves.ended


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_a_worker_whose_delivery_fails_releases_the_others(error):
    fails, stays = (
        Worker(channel, fail_at=fail_at, error=error)
        for channel, fail_at in zip(MemoryChannel.connect(2), (1, -1), strict=True)
    )
    for step in range(4):
        for rank, worker in enumerate((fails, stays)):
            worker.courier.send(lambda step=step, rank=rank: message(step, rank))
    assert fails.courier.join(30)
    assert stays.courier.join(30)
    assert isinstance(fails.ended[0], error)
    assert isinstance(stays.ended[0], Goodbye)
    assert [g.step for g in stays.got] == [0, 1]


def test_a_missing_peer_ends_the_channel_and_not_the_sender():
    present, _absent = MemoryChannel.connect(2, timeout_seconds=0.2)
    worker = Worker(present)
    worker.courier.send(lambda: message(0, 0))
    assert worker.courier.join(30)
    assert "did not answer" in str(worker.ended[0])
    assert threading.current_thread().is_alive()


def test_a_step_waits_for_its_turn(monkeypatch):
    monkeypatch.setattr(courier, "_MOST_PUT_OFF_SECONDS", 600.0)
    [channel] = MemoryChannel.connect(1)
    worker, taken = Worker(channel), threading.Event()

    def prepare():
        taken.set()
        return message(0, 0)

    worker.courier.send(prepare)
    assert not taken.wait(0.2)
    worker.courier.take_turn()
    assert taken.wait(30)
    worker.courier.leave()
    assert worker.courier.join(30)
    assert [g.step for g in worker.got] == [0]


def test_a_step_waits_no_longer_than_until_the_next(monkeypatch):
    monkeypatch.setattr(courier, "_MOST_PUT_OFF_SECONDS", 600.0)
    [channel] = MemoryChannel.connect(1)
    worker, taken = Worker(channel), threading.Event()

    def prepare():
        taken.set()
        return message(0, 0)

    worker.courier.send(prepare)
    worker.courier.send(lambda: message(1, 0))
    assert taken.wait(30)
    worker.courier.leave()
    assert worker.courier.join(30)
    assert [g.step for g in worker.got] == [0, 1]


def test_a_step_without_a_turn_comes_late_and_not_never(monkeypatch):
    monkeypatch.setattr(courier, "_MOST_PUT_OFF_SECONDS", 0.05)
    [channel] = MemoryChannel.connect(1)
    came = threading.Event()
    worker = Worker(channel, before_delivery=came.set)
    worker.courier.send(lambda: message(0, 0))
    assert came.wait(30)
    worker.courier.leave()
    assert worker.courier.join(30)


def test_the_lock_is_let_go_unless_steps_wait(monkeypatch):
    slept = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    monkeypatch.setattr(courier, "time", clock)
    [channel] = MemoryChannel.connect(1)
    counts, here, goes_on = [], threading.Event(), threading.Event()

    def look():
        before = len(slept)
        worker.courier.give_way()
        counts.append(len(slept) - before)
        here.set()
        assert goes_on.wait(30)

    worker = Worker(channel, before_delivery=look)
    worker.courier.send(lambda: message(0, 0))
    worker.courier.take_turn()
    assert here.wait(30)
    for step in (1, 2):
        worker.courier.send(lambda step=step: message(step, 0))
    goes_on.set()
    worker.courier.leave()
    assert worker.courier.join(30)
    assert counts == [1, 0, 0]


def test_own_work_is_waited_for_longer_than_the_others():
    [channel] = MemoryChannel.connect(1)
    slow = threading.Event()
    worker = Worker(channel, before_delivery=slow.wait)
    worker.courier.send(lambda: message(0, 0))
    worker.courier.leave()
    threading.Timer(0.3, slow.set).start()
    assert worker.courier.join(0.01)
    assert len(worker.got) == 1


def test_another_worker_is_not_waited_for_longer():
    present, _absent = MemoryChannel.connect(2, timeout_seconds=2.0)
    worker = Worker(present)
    worker.courier.send(lambda: message(0, 0))
    worker.courier.leave()
    assert not worker.courier.join(0.1)
    assert worker.courier.join(30)  # the channel gives up


def test_a_worker_that_falls_far_behind_leaves_once_its_steps_are_delivered(monkeypatch):
    monkeypatch.setattr(courier, "_MOST_WAITING", 2)
    delivering, goes_on = threading.Event(), threading.Event()

    def stall():
        delivering.set()
        assert goes_on.wait(30)

    channels = MemoryChannel.connect(2)
    slow, other = Worker(channels[0], before_delivery=stall), Worker(channels[1])
    for rank, worker in enumerate((slow, other)):
        worker.courier.send(lambda rank=rank: message(0, rank))
    assert delivering.wait(30)
    other.courier.send(lambda: message(1, 1))
    while not other.got or other.courier._stage % 2:  # until it waits with step 1
        time.sleep(0.001)
    for rank, worker, behind in ((0, slow, "this worker's"), (1, other, "of another")):
        for step in (1, 2) if rank == 0 else (2, 3):
            worker.courier.send(lambda step=step, rank=rank: message(step, rank))
        with pytest.raises(ChannelError, match=behind):
            worker.courier.send(lambda: message(9, 9))
    slow.courier.leave()
    goes_on.set()
    assert slow.courier.join(30)
    assert other.courier.join(30)
    assert [g.step for g in slow.got] == [g.step for g in other.got] == [0, 1, 2]
    assert slow.ended == []
    assert isinstance(other.ended[0], Goodbye)
