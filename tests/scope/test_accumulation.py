import numpy as np
import pytest

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from rankscope.stats.arrays import MISSING_INT
from support.accumulating import COMPARED, HEALTHY, Waits, cases
from support.findings import told
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks
WARNING = Severity.WARNING
CASES = cases(Waits)


def train_all(rank, folder):
    different = []
    for name, case in CASES.items():
        watched = case(rank).train(f"{folder}/{name}")
        if name in COMPARED and watched != case(rank).train(None):
            different.append(name)
    return different


@pytest.fixture(scope="module")
def runs(folder):
    assert run_ranks(train_all, 2, str(folder), timeout=400) == [[], []]
    return {name: Run.open(folder / name) for name in CASES}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_trainings_raise_nothing(runs, name):
    assert told(runs[name], "sync.") == {}


UNKNOWN = (
    *("WaitsWithAScaleOutsideLater", "ReducesWithDecayInTheLoss", "ReducesSharpnessAware"),
    *("ZeroedInPlace", "DDPWithAScaleOutside", "DDPSharpnessAware"),
)


@pytest.mark.parametrize("name", [n for n in HEALTHY if n not in (*UNKNOWN, "DDPAlwaysOne")])
def test_what_a_pass_finds_is_what_the_one_before_has_left(runs, name):
    run, case = runs[name], CASES[name]
    changes_TW = run.per_worker("accumulator_change")[1]
    assert len(changes_TW) == case.steps
    learnt = range(case.learnt, case.steps)
    several = [n for n in learnt if not name.endswith("Windows") or n % 3 != 1]
    assert run.columns(Table.STEPS, "observed")["observed"][case.learnt :].all()
    assert (changes_TW[several] < 1e-6).all()
    known = np.isfinite(changes_TW[case.learnt :])
    assert known.sum() == len(several) * changes_TW.shape[1]


def test_a_reduction_that_the_training_prepares_is_measured_as_any_other(runs):
    late, other = runs["DDPPreparedLate"], runs["DDPInBuckets"]
    assert late.columns(Table.STEPS, "observed")["observed"].all()
    both = other.columns(Table.STEPS, "observed")["observed"]
    assert both[4:].all()
    for column in ("grad_norm", "reduced_norm", "micro_batches"):
        late_TW, other_TW = (run.per_worker(column)[1][both] for run in (late, other))
        np.testing.assert_allclose(late_TW, other_TW, rtol=1e-6)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_told_is_not_said_and_one_micro_batch_is_not_read_again(runs, name):
    learnt = CASES[name].learnt
    assert np.isnan(runs[name].per_worker("accumulator_change")[1][learnt:]).all()
    if name != "DDPWithAScaleOutside":  # whose last gradients come before it is known of a pass
        assert runs[name].columns(Table.STEPS, "observed")["observed"][learnt:].all()


def test_a_pass_that_only_shows_where_to_compute_the_gradient_is_no_micro_batch(runs):
    run = runs["DDPSharpnessAware"]
    assert (run.per_worker("micro_batches")[1] == 1).all()
    assert (run.per_worker("idle_passes")[1] == 1).all()


@pytest.mark.parametrize(
    ("name", "kind", "factor", "micro"),
    [
        ("WaitsResetInPlace", "reset", 0.0, 2),
        ("ReplicasDivided", "divided", 1 / 3, 1),
        ("ReducesDoubledByOne", "doubled", 2.0, 1),
        ("DDPResetInPlace", "reset", 0.0, 2),
        ("DDPDoubledBehindAutograd", "doubled", 2.0, 1),
    ],
)
def test_the_kind_of_change_its_micro_batch_and_its_workers_are_named(
    runs, name, kind, factor, micro
):
    found, case = told(runs[name], "sync.")["sync.accumulation"], CASES[name]
    ranks = (1,) if name.endswith("ByOne") else (0, 1)
    assert (found.severity, found.ranks, found.groups) == (Severity.ERROR, ranks, ())
    assert (found.first_step, found.evidence["steps"]) == (case.late, case.steps - case.late)
    assert (found.evidence["kind"], found.evidence["micro_batch"]) == (kind, micro)
    assert found.evidence["factor"] == pytest.approx(factor, rel=1e-5)
    assert (runs[name].per_worker("accumulator_change")[1][case.learnt : case.late] < 1e-6).all()


@pytest.mark.parametrize(
    ("name", "layer"), [("ReducesOneLayer", "layers.0"), ("DDPOneLayer", "layers.5")]
)
def test_a_single_layer_is_named(runs, name, layer):
    found = told(runs[name], "sync.")["sync.accumulation"]
    assert (found.severity, found.first_step) == (WARNING, CASES[name].late)
    assert (found.evidence["kind"], found.evidence["micro_batch"]) == ("changed in part", 2)
    assert found.groups == (layer,)
    assert layer in found.explanation


@pytest.mark.parametrize(
    ("name", "ranks", "names"),
    [
        ("ReducesChangedAfterwards", (1,), {"layers.0.bias"}),
        ("DDPLayerChangedAfterwards", (0, 1), {"layers.2.weight", "layers.2.bias"}),
    ],
)
def test_what_is_changed_after_the_reduction_is_named(runs, name, ranks, names):
    """A worker's shard of a clipped gradient, or a layer on all workers."""
    [found] = told(runs[name], "sync.").values()
    assert (found.id, found.severity, found.ranks) == ("sync.changed_later", WARNING, ranks)
    assert set(found.evidence["names"]) == names
    if not name.startswith("DDP"):  # whose gradients take turns to be compared
        assert found.first_step == CASES[name].late
    assert found.evidence["factor"] == pytest.approx(3, rel=1e-5)


def test_a_gradient_that_was_not_zeroed_is_told(runs):
    [found] = told(runs["DDPLeftOver"], "sync.").values()
    assert (found.id, found.cause, found.severity) == (
        *("gradient-left-over", "sync.accumulation", Severity.ERROR),
    )
    assert (found.first_step, found.evidence["steps"]) == (4, 3)


def test_shards_are_not_compared_with_other_workers_shards(runs):
    columns = runs["ReducesClipped"].columns(Table.WORKERS)
    assert np.allclose(columns["applied_odd"], 1)
    assert (columns["applied_scale"] < 1).all()
    for digest in ("reduced_digest", "applied_digest"):
        assert (columns[digest] == MISSING_INT).all()
