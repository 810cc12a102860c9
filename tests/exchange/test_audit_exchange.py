"""The audit of a reduction among many workers: each learns what its own result is worth."""

import threading

import numpy as np
import pytest

from rankscope.core.audit import AUDIT_WIDTH, AuditPart, contribution
from rankscope.core.groups import group_parameters
from rankscope.core.sections import cut_sections
from rankscope.core.step import MeasuredGradient
from rankscope.core.summarize import summarize
from rankscope.exchange import FlatGathering, Layout, MemoryChannel, RootGathering, WorkerStep

SIZES = {"layers.0.w": 50, "layers.1.w": 30, "head.w": 10}
GROUPS = group_parameters(SIZES)
SECTIONS = cut_sections(SIZES, GROUPS, section_elements=20)
WIDTH = 20
LAYOUT = Layout(
    sketch_width=16,
    groups=GROUPS.names,
    group_width=8,
    sections=SECTIONS,
    audit_width=WIDTH,
)
NUM_GROUPS, NUM_SECTIONS = len(GROUPS), len(SECTIONS)


def message(rank, step, local_SK, reduced_SK):
    rng = np.random.default_rng((rank, step))
    gradient = MeasuredGradient(
        group_norms_G=rng.uniform(1, 2, NUM_GROUPS),
        sketch_K=rng.normal(size=16).astype(np.float32),
        group_sketches_GK=rng.normal(size=(NUM_GROUPS, 8)).astype(np.float32),
        gram=np.empty(0),
        audit=AuditPart(
            local_SK.astype(np.float32),
            reduced_SK.astype(np.float32),
            np.square(reduced_SK).sum(axis=1),
        ),
    )
    return WorkerStep(step, {"loss": float(rank), "grad_norm": 1.0}, gradient)


def make_messages(num_workers, *, odd=None, step=0):
    """Return messages of workers that hold the mean; ``odd`` holds another section 1 (group 0)."""
    rng = np.random.default_rng(step)
    locals_WSK = rng.normal(size=(num_workers, NUM_SECTIONS, WIDTH))
    mean_SK = locals_WSK.mean(axis=0)
    messages = []
    for rank in range(num_workers):
        held_SK = mean_SK.copy()
        if rank == odd:
            held_SK[1, 3] += 0.01 * np.linalg.norm(mean_SK[1])
        messages.append(message(rank, step, locals_WSK[rank], held_SK))
    return messages


def exchange(make, messages, *, copies=None, interval=1):
    layout = LAYOUT if copies is None else Layout(**{**fields_of(LAYOUT), "reduced_copies": copies})
    channels = MemoryChannel.connect(len(messages))
    results = [None] * len(messages)

    def work(rank):
        try:
            results[rank] = make(channels[rank], layout).exchange(messages[rank], interval)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(messages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results, channels


def fields_of(layout):
    return {name: getattr(layout, name) for name in layout.__slots__}


@pytest.mark.parametrize(
    ("make", "num_workers"),
    [(FlatGathering, 2), (FlatGathering, 5), (RootGathering, 3), (RootGathering, 70)],
)
def test_the_worker_whose_result_differs_stands_out_alone(make, num_workers):
    odd = num_workers - 1
    results, _ = exchange(make, make_messages(num_workers, odd=odd), copies=num_workers)
    gathered = results[0].gathered
    residuals_WG = gathered.residuals_WG
    assert residuals_WG.shape == (num_workers, NUM_GROUPS)
    assert residuals_WG[odd, 0] == pytest.approx(0.01, rel=0.01)
    healthy = residuals_WG.copy()
    healthy[odd, 0] = 0.0
    assert healthy.max() < 1e-6
    assert 0.002 < summarize(gathered).reduction_residual < 0.01  # of all sections together
    if make is FlatGathering:
        for other in results:  # everybody knows the same
            np.testing.assert_array_equal(other.gathered.residuals_WG, residuals_WG)


@pytest.mark.parametrize(("make", "num_workers"), [(FlatGathering, 4), (RootGathering, 66)])
def test_a_result_that_could_not_be_read_is_unknown_and_nobody_waits(make, num_workers):
    messages = make_messages(num_workers)
    audit = messages[1].gradient.audit
    audit.reduced_SK[:] = np.nan
    audit.reduced_squares_S[:] = np.nan
    results, _ = exchange(make, messages, copies=num_workers)
    gathered = results[0].gathered
    assert gathered.observed
    assert np.isnan(gathered.residuals_WG[1]).all()
    assert (np.delete(gathered.residuals_WG, 1, axis=0) < 1e-6).all()
    results, _ = exchange(make, messages, copies=1)  # as if it were a shard: then nobody knows
    assert np.isnan(results[0].gathered.residuals_WG).all()
    assert np.isnan(summarize(results[0].gathered).reduction_residual)


@pytest.mark.parametrize("make", [FlatGathering, RootGathering])
def test_a_worker_without_a_gradient_takes_part(make):
    messages = make_messages(4)
    messages[2] = WorkerStep(0, {"loss": 1.0})
    results, _ = exchange(make, messages, copies=4)
    assert [result.observed for result in results] == [False] * 4
    assert results[0].gathered.residuals_WG is None


@pytest.mark.parametrize("make", [FlatGathering, RootGathering])
def test_steps_between_measured_ones_are_not_audited(make):
    results, channels = exchange(make, make_messages(3, step=3), copies=3, interval=2)
    assert results[0].gathered.residuals_WG is None
    assert channels[0].traffic.total < 4 * NUM_SECTIONS * WIDTH + 3 * 2 * LAYOUT.num_bytes


def test_bytes_are_those_that_docs_tiers_states():
    layer = {"q": 2048**2, "k": 512 * 2048, "v": 512 * 2048, "o": 2048**2, "norms": 2 * 2048}
    layer |= dict.fromkeys(("gate", "up", "down"), 8192 * 2048)
    sizes = {"model.embed_tokens.weight": 128_256 * 2048, "model.norm.weight": 2048}
    for number in range(16):
        sizes |= {f"model.layers.{number}.{name}": size for name, size in layer.items()}
    groups = group_parameters(sizes)
    sections = cut_sections(sizes, groups)
    assert (len(groups), len(sections)) == (18, 140)
    part = AuditPart.unknown(len(sections), AUDIT_WIDTH)
    given = contribution(part, 8, copies=8).nbytes
    assert given == 4 * 1021 * 140 == 571_760
    assert contribution(part, 8, copies=1).nbytes == given + 4 * 140
    assert [round(2 * (1 - 1 / width) * given) for width in (8, 64)] == [1_000_580, 1_125_652]
    audited = Layout(sketch_width=0, groups=groups.names, sections=sections, audit_width=1021)
    plain = Layout(sketch_width=0, groups=groups.names)
    assert audited.num_bytes - plain.num_bytes == 8 * (18 + 1)


def test_what_a_worker_moves_does_not_grow_with_the_number_of_workers():
    moved = []
    plain = Layout(**{**fields_of(LAYOUT), "sections": None, "audit_width": 0})
    for num_workers in (66, 130):
        _, channels = exchange(RootGathering, make_messages(num_workers), copies=num_workers)
        moved.append(channels[1].traffic.total)
        assert channels[1].traffic.total > plain.num_bytes
    assert moved[1] < 1.05 * moved[0]
