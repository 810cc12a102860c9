"""The audit against the distance of the reduced gradient from the mean, element by element."""

import numpy as np
import pytest

from rankscope.bus.groups import cut_sections, group_parameters
from rankscope.stats.audit import AuditPart, residuals, residuals_by_row, residuals_of_all, total_of

SIZES = {"a.w": 7, "a.b": 3, "b.w": 4}
LIMIT = 5
SECTIONS = cut_sections(SIZES, group_parameters(SIZES), section_elements=LIMIT)
FIRSTS = np.searchsorted(SECTIONS.group_of, [0, 1])
PLACES = [(0, 5), (5, 10), (10, 14)]  # of the sections, in all elements
SIZE = 14


def parts_of(vector):
    """Return rows that hold the sections as they are: a sketch that loses nothing."""
    rows = np.zeros((len(PLACES), LIMIT), np.float32)
    for row, (first, last) in zip(rows, PLACES, strict=True):
        row[: last - first] = vector[first:last]
    squares = [np.sum(np.square(vector[first:last], dtype=np.float64)) for first, last in PLACES]
    return rows, np.array(squares)


def audit(locals_, held, copies):
    pairs = zip(locals_, held, strict=True)
    parts = [AuditPart(parts_of(local)[0], *parts_of(own)) for local, own in pairs]
    found = residuals_of_all(parts, FIRSTS, copies)
    hosts = [total_of(some, len(parts), copies) for some in (parts[:1], parts[1:])]
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.sum(np.float32(hosts), axis=0)
    for part, own in zip(parts, found, strict=True):
        by_hosts = residuals(total, part, FIRSTS, len(parts), copies)
        np.testing.assert_allclose(by_hosts, own, rtol=1e-4, atol=1e-6)
    return found


def expected(reduced, mean):
    errors = [np.linalg.norm((reduced - mean)[a:b]) for a, b in PLACES]
    norms = [np.linalg.norm(reduced[a:b]) for a, b in PLACES]
    each = np.divide(errors, norms)
    return [np.linalg.norm(reduced - mean) / np.linalg.norm(reduced), max(each[:2]), each[2]]


@pytest.fixture
def gradients():
    return np.random.default_rng(0).normal(size=(4, SIZE))


def test_a_replicated_result_is_judged_on_each_worker_by_itself(gradients):
    mean = gradients.mean(axis=0)
    held = np.stack([mean] * 4)
    held[2, 8] += 0.01  # one element, in the second section of the first group
    found = audit(gradients, held, copies=4)
    np.testing.assert_allclose(found[2], expected(held[2], mean), rtol=1e-4, atol=1e-6)
    assert found[2, 1] > 1e-3
    assert (np.delete(found, 2, axis=0) < 1e-6).all()
    assert found[2, 2] < 1e-6


@pytest.mark.parametrize(("copies", "shards"), [(1, 4), (2, 2)])
def test_a_sharded_result_is_put_together(gradients, copies, shards):
    mean = gradients.mean(axis=0)
    reduced = mean + 0.05 * np.random.default_rng(1).normal(size=SIZE)
    held = np.zeros((4, SIZE))
    for worker, indices in enumerate(np.array_split(np.arange(SIZE), shards) * copies):
        held[worker, indices] = reduced[indices]
    for own in audit(gradients, held, copies):  # all learn the same
        np.testing.assert_allclose(own, expected(reduced, mean), rtol=1e-5)


@pytest.mark.parametrize("copies", [1, 4])
def test_what_is_narrowed_tells_the_whole_and_the_sections_in_turn(gradients, copies):
    mean = gradients.mean(axis=0)
    held = np.stack([mean] * 4) if copies == 4 else np.zeros((4, SIZE))
    if copies == 1:
        for worker, indices in enumerate(np.array_split(np.arange(SIZE), 4)):
            held[worker, indices] = mean[indices]
    held[0, 2] += 0.01  # of the first section
    parts = [AuditPart(parts_of(g)[0], *parts_of(h)) for g, h in zip(gradients, held, strict=True)]
    narrowed = [part.narrowed(np.array([2, 0]), width=LIMIT) for part in parts]
    total = np.float32(total_of(narrowed, 4, copies))
    found = np.array([residuals_by_row(total, part, 4, copies) for part in narrowed])
    told = found[0] if copies == 4 else found
    norms = [np.linalg.norm(mean), np.linalg.norm(mean[:5])]
    np.testing.assert_allclose(told[..., 0], 0.01 / norms[0], rtol=0.02)
    np.testing.assert_allclose(told[..., 2], 0.01 / norms[1], rtol=0.02)
    assert (told[..., 1] < 1e-6).all()
    if copies == 4:
        assert (found[1:] < 1e-6).all()
