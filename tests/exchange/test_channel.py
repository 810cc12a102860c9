"""Channels against sums and stacks made by hand: between threads, in lockstep, on real ranks."""

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from rankscope.exchange.allreduce import rounds_of_all_reduce
from rankscope.exchange.channel import ChannelError, GlooChannel, Traffic
from rankscope.exchange.memory import MemoryChannel, all_reduce_in_lockstep
from support.ranks import run_ranks

WORKERS = [1, 2, 3, 4, 5, 7, 8, 12, 31, 64, 100, 257]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("size", [1, 6, 100, 2045])
def test_all_reduce_sums_exactly_with_the_fewest_bytes_and_rounds(num_workers, size):
    numbers = np.random.default_rng(num_workers).integers(-999, 999, (num_workers, size))
    results = numbers.astype(np.float32)
    traffic, num_rounds = all_reduce_in_lockstep(results, np.add)
    assert (results == numbers.sum(axis=0)).all()
    for moved in ([t.sent for t in traffic], [t.received for t in traffic]):
        assert sum(moved) == 2 * (num_workers - 1) * size * 4
        assert max(moved) <= 2 * (num_workers - 1) * size * 4 / num_workers + 4 * num_rounds
    assert num_rounds == 2 * math.ceil(math.log2(num_workers))


@pytest.mark.parametrize("num_workers", WORKERS)
def test_every_message_is_expected_where_it_arrives(num_workers):
    values_WN = np.zeros((num_workers, 10))
    rounds = [rounds_of_all_reduce(row, r, num_workers, np.add) for r, row in enumerate(values_WN)]
    shifts = [next(worker, None) for worker in rounds]
    while all(shifts):
        for rank, shift in enumerate(shifts):
            assert shifts[shift.source].destination == rank
            assert len(shifts[shift.source].outgoing) == shift.num_incoming
        answers = [np.zeros(shift.num_incoming) for shift in shifts]
        shifts = [_next(*pair) for pair in zip(rounds, answers, strict=True)]


def _next(rounds, answer):
    try:
        return rounds.send(answer)
    except StopIteration:
        return None


@pytest.mark.parametrize("num_workers", [1, 2, 5, 64])
def test_a_broadcast_brings_rank_0s_bytes_to_all(num_workers):
    message = np.random.default_rng(0).integers(0, 256, 777, np.uint8)
    own = message.copy()

    def work(channel):
        given = message if channel.rank == 0 else np.full(777, 255, np.uint8)
        return channel.broadcast(given), channel.traffic

    for received, traffic in on_threads(num_workers, work):
        assert received.dtype == np.uint8
        assert (received == own).all()
        assert traffic.sent <= 2 * 777 + 64
    assert (message == own).all()


def broadcast(rank):
    channel = GlooChannel()
    messages = [np.arange(size) % 251 + 1 if rank == 0 else np.ones(size) for size in (0, 1, 9999)]
    received = [channel.broadcast(message.astype(np.uint8)) for message in messages]
    channel.close()
    return received


def test_a_broadcast_on_real_ranks():
    for received in run_ranks(broadcast, 3):
        for values in received:
            np.testing.assert_array_equal(values, np.arange(len(values)) % 251 + 1)


def test_all_workers_get_the_same_bits_and_small_errors():
    values = np.random.default_rng(0).normal(size=(100, 300)).astype(np.float32)
    results = values.copy()
    all_reduce_in_lockstep(results, np.add)
    assert (results == results[0]).all()
    error = np.abs(results[0] - values.astype(np.float64).sum(axis=0)).max()
    largest = np.abs(values).sum(axis=0).max()
    assert error <= math.ceil(math.log2(100)) * 2**-24 * largest


def test_huge_values_overflow_silently():
    values = np.full((3, 4), 3e38, np.float32)
    all_reduce_in_lockstep(values, np.add)
    assert np.isinf(values).all()


def on_threads(num_workers, work, timeout_seconds=60.0):
    """Run ``work(channel)`` for each worker in a thread of its own; return results in order."""
    channels = MemoryChannel.connect(num_workers, timeout_seconds)
    results: list[Any] = [None] * num_workers

    def run(rank):
        results[rank] = work(channels[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def everything(channel):
    """Use each operation once; return its result and its traffic."""
    rank, num_workers = channel.rank, channel.num_workers
    message = np.full(100, rank, np.uint8)
    operations = {
        "gather": lambda: channel.gather(message),
        "root": lambda: channel.gather_to_root(message),
        "sum": lambda: channel.reduce_sum(np.arange(50, dtype=np.float32) + rank / 8),
        "max": lambda: channel.reduce_max(np.arange(num_workers) * (-1) ** rank * 10**15),
    }
    results, traffic = {}, {}
    for name, operation in operations.items():
        before = channel.traffic
        results[name] = operation()
        after = channel.traffic
        traffic[name] = (after.sent - before.sent, after.received - before.received)
    return results, traffic


def check_everything(all_workers):
    num_workers = len(all_workers)
    stacked = np.repeat(np.arange(num_workers, dtype=np.uint8)[:, None], 100, axis=1)
    total = num_workers * np.arange(50) + sum(range(num_workers)) / 8
    for rank, (results, traffic) in enumerate(all_workers):
        assert (results["gather"] == stacked).all()
        assert (results["sum"] == total.astype(np.float32)).all()
        assert results["max"].tolist() == [10**15 * n for n in range(num_workers)]
        others = 100 * (num_workers - 1)
        assert traffic["gather"] == (others, others)
        if rank == 0:
            assert (results["root"] == stacked).all()
            assert traffic["root"] == (0, others)
        else:
            assert results["root"] is None
            assert traffic["root"] == (100, 0)
    for name, size in (("sum", 4 * 50), ("max", 8 * num_workers)):
        for side in (0, 1):
            moved = [traffic[name][side] for _, traffic in all_workers]
            assert sum(moved) == 2 * (num_workers - 1) * size


@pytest.mark.parametrize("num_workers", [2, 5, 16])
def test_threads_exchange_everything_and_count_it(num_workers):
    check_everything(on_threads(num_workers, everything))


def test_one_worker_alone_moves_nothing():
    [(results, traffic)] = on_threads(1, everything)
    assert results["gather"].tolist() == results["root"].tolist() == [[0] * 100]
    assert set(traffic.values()) == {(0, 0)}


def test_a_missing_thread_ends_a_reduction():
    present, _absent = MemoryChannel.connect(2, timeout_seconds=0.1)
    with pytest.raises(ChannelError, match="did not answer"):
        present.reduce_sum(np.ones(3, np.float32))


def test_threads_that_reduce_different_sizes_are_told():
    def work(channel):
        try:
            channel.reduce_sum(np.ones(4 + 4 * channel.rank, np.float32))
        except ChannelError as error:
            return str(error)
        return ""

    assert any("expected" in text for text in on_threads(2, work, timeout_seconds=1.0))


def test_traffic_adds_up():
    assert (Traffic(1, 2) + Traffic(10, 20)).total == 33


def use_gloo(rank):
    channel = GlooChannel()
    outcome = everything(channel)
    channel.close()
    try:
        channel.gather(np.zeros(1, np.uint8))
    except ChannelError as error:
        return outcome, str(error)
    return outcome, ""


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_ranks_exchange_everything_and_count_it(num_ranks):
    outcomes = run_ranks(use_gloo, num_ranks)
    check_everything([outcome for outcome, _ in outcomes])
    assert all(error == "the side channel is closed" for _, error in outcomes)
    for (_, real), (_, simulated) in zip(
        [outcome for outcome, _ in outcomes], on_threads(num_ranks, everything), strict=True
    ):
        assert real == simulated


def use_subgroup(rank):
    groups = [dist.new_group([1, 3]), dist.new_group([0, 2])]
    channel = GlooChannel(groups[0 if rank % 2 else 1])
    root = channel.gather_to_root(np.array([rank], np.uint8))
    total = channel.reduce_sum(np.array([rank], np.float32))
    channel.close()
    return channel.rank, None if root is None else root[:, 0].tolist(), float(total[0])


@pytest.mark.ranks
def test_a_subgroup_has_its_own_root():
    assert run_ranks(use_subgroup, 4) == [
        (0, [0, 2], 2.0),
        (0, [1, 3], 4.0),
        (1, None, 2.0),
        (1, None, 4.0),
    ]


def lose_a_peer(rank, operation):
    """Rank 2 stays away from the side channel; the training's own group must survive."""
    channel = GlooChannel(timeout_seconds=1.0)
    failed = ""
    if rank != 2:
        try:
            getattr(channel, operation)(
                np.ones(9, np.float32 if operation == "reduce_sum" else np.uint8)
            )
        except ChannelError as error:
            failed = str(error)
    dist.barrier()
    channel.close()
    return failed


@pytest.mark.ranks
@pytest.mark.parametrize("operation", ["reduce_sum", "gather_to_root", "gather"])
def test_a_missing_rank_ends_the_channel_and_nothing_else(operation):
    outcomes = run_ranks(lose_a_peer, 3, operation)
    waiting = outcomes[:1] if operation == "gather_to_root" else outcomes[:2]
    assert all("the side channel to the other workers broke" in outcome for outcome in waiting)
