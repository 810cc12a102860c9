"""Whether two groups of ranks train one model apart, from what their first ranks publish."""

import dataclasses

import numpy as np
import pytest

from rankscope.bus.finding import Severity
from rankscope.evidence.world.director import Unit, UnitsOfJob, World, first_apart, replicas_apart

ELEMENTS = 64


def unit(*ranks: int, moves=0.0, begins=0, batches=None, **more) -> Unit:
    """Return a unit whose elements take equal steps, and one of its own from the second step on."""
    values = np.random.default_rng(begins).normal(size=ELEMENTS)
    common = np.random.default_rng(7).normal(size=ELEMENTS)
    own = np.random.default_rng(ranks[0]).normal(size=ELEMENTS)
    taken = {
        "main": True, "layout": 1, "names": ("a", "b"), "dtype": "float32", "divisor": 2.0,
        "wrapper": "fully_shard got a mesh", "axes": {}, "given_dir": "run", "seed": 0,
    }  # fmt: skip
    steps = {at: at * common + max(at - 1, 0) * moves * own for at in (0, 1, 2, 4)}
    readings = {at: (values + 1e-3 * step).astype(np.float32) for at, step in steps.items()}
    return Unit(
        tuple(ranks),
        **{**taken, **more},
        readings=readings,
        settings=dict.fromkeys(readings, 3),
        batches=batches or {0: ranks[0], 1: ranks[0]},
    )


def found(own: list[Unit], others: list[Unit], seed: int | None = None, **more):
    world = World(10, lambda finding: None, lambda: seed, **more)
    sent = UnitsOfJob(*(tuple(memoryview(one.pack()) for one in units) for units in (own, others)))
    world.take(0, 14, sent.pack())
    return world.findings


def test_what_looks_intended_is_a_note_and_what_is_declared_is_nothing():
    own, other = unit(0, 1, moves=1.0), unit(2, 3, moves=1.0)
    [note] = found([own], [dataclasses.replace(other, given_dir="member-1")]).values()
    assert note.severity is Severity.NOTE
    [note] = found([own], [dataclasses.replace(other, seed=1)], seed=0).values()
    assert note.severity is Severity.NOTE
    assert found([own], [other], independent=True) == {}


def tensor_parallel(rank: int, *, apart: int, last: int = 6) -> Unit:
    """Return a unit of 16 parameters, of which it holds 4 in parts, and so many replicas apart."""
    one = unit(rank, begins=3)
    own = np.random.default_rng(rank).normal(size=(16, 4))
    for at in one.readings:
        values = one.elements(at).reshape(16, 4)
        values[12:] += own[12:]
        values[8:12] = 1.0 + 1e-3 * at * own[8:12]  # they begin with a constant
        values[:apart] += 1e-3 * at * own[:apart]
        one.readings[at] = values.astype(np.float32).ravel()
    names = tuple(f"p{number}" for number in range(16))
    return dataclasses.replace(one, names=names, batches={0: 5, 1: last})


def test_replicas_of_ranks_that_share_each_sample_must_stay_equal():
    one, other = (tensor_parallel(rank, apart=8) for rank in (0, 1))
    names = [f"p{number}" for number in range(8)]
    assert replicas_apart(one, other) == (0, names, [f"p{number}" for number in range(8, 12)])
    assert first_apart(one, other) is None
    [finding] = found([one], [other]).values()
    assert (finding.id, finding.cause) == ("replicas-of-groups-differ", "state.replicas_differ")
    assert finding.severity is Severity.WARNING
    assert "p0, p1, p2 and 5 others, began" in finding.explanation
    assert found([one], [other], independent=True) == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (tensor_parallel(0, apart=0), tensor_parallel(1, apart=0)),
        (tensor_parallel(0, apart=7), tensor_parallel(1, apart=7)),  # parts that begin alike
        (tensor_parallel(0, apart=8), tensor_parallel(1, apart=8, last=7)),
        (unit(0, moves=1.0, batches={0: 5}), unit(1, moves=1.0, batches={0: 5})),  # two trainings
    ],
)
def test_replicas_that_agree_or_are_none_are_silent(one, other):
    assert replicas_apart(one, other) is None


@pytest.mark.parametrize(
    ("axes", "severity"), [({"rep": (0, 2)}, Severity.WARNING), ({"ep": (0, 2)}, Severity.NOTE)]
)
def test_parameters_left_on_a_smaller_mesh_are_named_unless_they_may_be_experts(axes, severity):
    main = unit(*range(4), divisor=4.0)
    own = dataclasses.replace(unit(0, 1, moves=1.0, main=False), scale=1.0, axes=axes)
    [finding] = found([main, own], [unit(2, 3, moves=1.0, main=False)]).values()
    assert (finding.cause, finding.severity) == ("sync.part_of_ranks", severity)
    assert "a and b" in finding.explanation
