"""Gathering at rank 0 against gathering everything: the same workers, the same numbers."""

import threading

import numpy as np
import pytest

from rankscope.core.step import MeasuredGradient
from rankscope.core.summarize import summarize
from rankscope.exchange import (
    FlatGathering,
    Goodbye,
    Layout,
    MemoryChannel,
    PayloadError,
    RootGathering,
    WorkerStep,
    choose_gathering,
)

WIDTH, GROUP_WIDTH = 64, 16
GROUPS = tuple(f"layers.{index}" for index in range(6))
LAYOUT = Layout(sketch_width=WIDTH, groups=GROUPS, group_width=GROUP_WIDTH)


def make_messages(num_workers, step):
    rng = np.random.default_rng(step)
    common = rng.standard_normal(WIDTH)
    group_common = rng.standard_normal((len(GROUPS), GROUP_WIDTH))
    messages = []
    for rank in range(num_workers):
        sketch = common + rng.standard_normal(WIDTH)
        groups = group_common + rng.standard_normal((len(GROUPS), GROUP_WIDTH))
        gradient = MeasuredGradient(
            group_norms_G=np.linalg.norm(groups, axis=1),
            sketch_K=sketch.astype(np.float32),
            group_sketches_GK=groups.astype(np.float32),
            gram=np.empty(0),
        )
        values = {"loss": float(rank), "grad_norm": 1.0, "overhead_seconds": rank / 10}
        messages.append(WorkerStep(step, values, gradient, np.arange(rank)))
    return messages


def exchange(make, messages, interval=1):
    """Return each worker's outcome, or what it raised."""
    channels = MemoryChannel.connect(len(messages))
    results = [None] * len(messages)

    def work(rank):
        try:
            results[rank] = make(channels[rank], LAYOUT).exchange(messages[rank], interval)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(messages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("num_workers", [1, 2, 5, 70])
def test_rank_0_knows_what_all_would_know(num_workers):
    messages = make_messages(num_workers, step=3)
    flat = exchange(FlatGathering, messages)[0]
    root, *others = exchange(RootGathering, messages)
    assert root.observed
    assert all(other.observed and other.gathered is None for other in others)
    assert root.overhead_seconds.max() == pytest.approx((num_workers - 1) / 10)
    pairs, consensus = summarize(flat.gathered), summarize(root.gathered)
    for name in ("cosine_mean", "cosine_weighted", "directions_undefined", "loss_mean"):
        np.testing.assert_allclose(consensus.values[name], pairs.values[name], atol=1e-5)
    np.testing.assert_allclose(
        consensus.derived["cosine_rest"], pairs.derived["cosine_rest"], atol=1e-5
    )
    turn = root.gathered.groups_in_turn
    assert len(turn) == 4
    np.testing.assert_allclose(
        consensus.group_cosine_rest_WG[:, turn], pairs.group_cosine_rest_WG[:, turn], atol=1e-5
    )
    assert np.isnan(np.delete(consensus.group_cosine_rest_WG, turn, axis=1)).all()
    np.testing.assert_array_equal(root.gathered.group_norms_WG, flat.gathered.group_norms_WG)
    assert [len(samples) for samples in root.gathered.samples] == [
        *range(num_workers)  # none left behind
    ]


def test_every_group_has_its_turn_whatever_the_interval():
    turns = [
        exchange(RootGathering, make_messages(2, step), interval=4)[0].gathered.groups_in_turn
        for step in (0, 4, 8)
    ]
    assert sorted(set(np.concatenate(turns).tolist())) == list(range(len(GROUPS)))


def test_a_worker_without_a_gradient_leaves_the_step_unobserved():
    messages = make_messages(3, step=0)
    messages[1] = WorkerStep(0, {"loss": 1.0})
    outcomes = exchange(RootGathering, messages)
    assert not any(outcome.observed for outcome in outcomes)
    assert outcomes[0].gathered.workers["loss"].tolist() == [0.0, 1.0, 2.0]
    assert not outcomes[0].gathered.observed


def test_a_step_between_two_measured_ones_carries_no_gradient():
    outcomes = exchange(RootGathering, make_messages(3, step=3), interval=2)
    assert not any(outcome.observed for outcome in outcomes)
    assert outcomes[0].gathered.group_norms_WG is None


def test_workers_at_different_steps_are_told_so():
    messages = make_messages(3, step=4)
    messages[2] = make_messages(3, step=5)[2]
    results = exchange(RootGathering, messages)
    assert all(isinstance(result, PayloadError) for result in results)
    assert "expected one step on every worker, got 4 to 5" in str(results[0])


def test_a_leaving_worker_is_named_on_all():
    messages = make_messages(3, step=4)
    messages[1] = WorkerStep(4, leaving=True)
    for result in exchange(RootGathering, messages):
        assert isinstance(result, Goodbye)
        assert result.ranks == (1,)


@pytest.mark.parametrize(("num_workers", "kind"), [(64, FlatGathering), (65, RootGathering)])
def test_pairs_are_compared_up_to_64_workers(num_workers, kind):
    channel = MemoryChannel.connect(num_workers)[0]
    assert isinstance(choose_gathering(channel, LAYOUT), kind)
