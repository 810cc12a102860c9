"""A step by way of summaries of hosts, against the same step of whole messages."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.agent.assembly import Assembly, summarize
from rankscope.agent.host_summary import (
    HostsStep,
    HostSummary,
    as_columns,
    host_summary,
    summary_layout,
    with_directions,
)
from rankscope.agent.step_message import StepMessage, pack_values
from rankscope.bus.gradient_part import sizes_of
from rankscope.bus.messages import Layout

COUNTS = (1, 3, 2)  # sections of three groups
LAYOUT = Layout(
    num_workers=80,
    groups=("a", "b", "c"),
    section_counts=COUNTS,
    sketch_width=1021,
    group_width=251,
    audit_width=1021,
    reduced_copies=80,
)


def messages_of(step, layout=LAYOUT, faulty=None):
    """Return the messages of all workers; the faulty one holds another reduced gradient."""
    rng = np.random.default_rng(step)
    num_sections, width = sum(COUNTS), layout.audit_width
    local = rng.normal(size=(layout.num_workers, num_sections, width)) + rng.normal(
        size=(num_sections, width)
    )
    mean = local.mean(axis=0)
    messages = {}
    for rank in range(layout.num_workers):
        reduced = mean * 1.5 if rank == faulty else mean
        held = 1.0
        if layout.reduced_copies == 1:  # each holds its own part of every section
            reduced = np.where(np.arange(width) % layout.num_workers == rank, reduced, 0.0)
            held = np.square(reduced).sum() / np.square(mean).sum()
        squares = np.square(local[rank]).sum(axis=1)
        numbers = [*squares, *(np.square(mean).sum(axis=1) * held), 1.0, 2.0, 0.0, 0.0]
        groups = rng.normal(size=(3, 251)) + np.linspace(-1, 1, 251)
        parts = [local[rank].sum(axis=0), groups.ravel(), local[rank].ravel(), reduced.ravel()]
        sizes = {"squares": num_sections, "reduced_squares": num_sections, "micro": 1}
        sizes |= dict.fromkeys(("largest", "nonfinite", "carried"), 1)
        sketches = dict(zip(("total", "groups", "local", "reduced"), map(len, parts), strict=True))
        messages[rank] = StepMessage(
            step=step,
            slots=np.frombuffer(
                pack_values({"overhead_seconds": 0.25, "step_seconds": rank + 1.0}), np.int64
            ),
            losses_U=rng.normal(size=4),
            weights_U=np.ones(4),
            units_M=np.array([4]),
            samples_B=rng.integers(2**62, size=2 + rank % 3),
            digests_D=np.arange(5),
            unchanged_D=np.zeros(5, np.uint8),
            numbers=np.array(numbers),
            sizes=np.array(sizes_of(sizes, sketches, norm_estimated=False)),
            sketches=np.concatenate(parts).astype(np.float32),
        )
    return messages


def whole(messages):
    columns = as_columns([messages[rank] for rank in sorted(messages)])
    return Assembly(LAYOUT, 0).step_of(columns, 1)


def by_hosts(messages, layout=LAYOUT):
    """Return the step as the root has it; hosts of 7 workers, the ranks dealt out in turn."""
    num_hosts = -(-len(messages) // 7)
    hosts = [{r: m for r, m in messages.items() if r % num_hosts == h} for h in range(num_hosts)]
    sent = HostsStep([HostSummary.unpack(host_summary(own, layout)) for own in hosts])
    gathered = Assembly(summary_layout(layout), 0).step_of(sent.messages, 1)
    return with_directions(gathered, sent, layout)


def test_what_needs_no_sketch_is_the_same():
    messages = messages_of(3)
    expected, found = whole(messages), by_hosts(messages)
    assert found.observed
    for name, column in expected.workers.items():
        np.testing.assert_allclose(found.workers[name], column, rtol=1e-14, err_msg=name)
    for one, other in zip(found.samples, expected.samples, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(found.micro_losses, expected.micro_losses)
    np.testing.assert_allclose(found.group_norms_WG, expected.group_norms_WG)


def test_directions_are_those_of_the_sketches():
    messages = messages_of(3)
    expected, found = summarize(whole(messages)), summarize(by_hosts(messages))
    np.testing.assert_allclose(
        found.derived["cosine_rest"], expected.derived["cosine_rest"], atol=1e-3
    )
    for name in ("cosine_mean", "cosine_weighted"):
        assert found.values[name] == pytest.approx(expected.values[name], abs=1e-4)
    np.testing.assert_allclose(found.group_cosine_rest_WG, expected.group_cosine_rest_WG, atol=1e-3)


def test_a_worker_that_holds_another_result_is_named():
    found = by_hosts(messages_of(3, faulty=33))
    np.testing.assert_allclose(found.total_residuals_W[33], 0.5, rtol=0.2)
    assert (np.delete(found.total_residuals_W, 33) < 1e-6).all()
    known_G = np.isfinite(found.residuals_WG).all(axis=0)
    assert (found.residuals_WG[33, known_G] > 0.3).all()
    assert (np.delete(found.residuals_WG[:, known_G], 33, axis=0) < 1e-6).all()


def test_a_sharded_result_is_put_together():
    layout = replace(LAYOUT, reduced_copies=1)
    found = by_hosts(messages_of(3, layout), layout)
    assert found.total_residuals_W.shape == (80,)
    assert (found.total_residuals_W < 1e-5).all()
    wrong = by_hosts(messages_of(3, layout, faulty=5), layout)
    assert len(set(wrong.total_residuals_W)) == 1
    assert wrong.total_residuals_W[0] > 1e-2


def test_a_step_that_one_worker_did_not_measure_is_not_observed():
    messages = messages_of(3)
    messages[5].without_bulk()
    found = by_hosts(messages)
    assert not found.observed
    assert found.consensus is None
    np.testing.assert_array_equal(found.workers["loss"], whole(messages_of(3)).workers["loss"])
