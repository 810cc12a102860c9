"""What happens to a gradient between its micro-batches under FSDP2, on real ranks."""

import numpy as np
import pytest

from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from rankscope.bus.step import MISSING_INT
from support.findings import told
from support.fsdp2_accumulating import COMPARED, HEALTHY, LATE, STEPS, Waits, cases
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks
WARNING = Severity.WARNING


def train_all(rank: int, folder: str) -> list[str]:
    """Train; return those of the compared trainings that have other bits when watched."""
    different = []
    for name, case in cases(Waits).items():
        watched = case(rank).train(f"{folder}/{name}")
        if name in COMPARED and watched != case(rank).train(None):
            different.append(name)
    return different


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Return the runs of trainings, all of which have the bits that they have unwatched."""
    folder = tmp_path_factory.mktemp("runs")
    assert run_ranks(train_all, 2, str(folder), timeout=400) == [[], []]
    return {name: Run.open(folder / name) for name in cases(Waits)}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_trainings_raise_nothing(runs, name):
    assert told(runs[name], "sync.") == {}


UNKNOWN = (
    *("WaitsWithAScaleOutsideLater", "ReducesWithDecayInTheLoss"),
    *("ReducesSharpnessAware", "ZeroedInPlace"),
)


def test_what_a_pass_finds_is_what_the_one_before_has_left(runs):
    for name in set(HEALTHY).difference(UNKNOWN):
        run = runs[name]
        changes_TW = run.per_worker("accumulator_change")[1]
        several = [n for n in range(STEPS) if not name.endswith("Windows") or n % 3 != 1]
        assert run.columns(Table.STEPS, "observed")["observed"].all(), name
        assert len(changes_TW) == STEPS, name
        assert (changes_TW[several] < 1e-6).all(), name
        assert np.isfinite(changes_TW).sum() == len(several) * changes_TW.shape[1], name


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_told_is_not_said_and_one_micro_batch_is_not_read_again(runs, name):
    assert np.isnan(runs[name].per_worker("accumulator_change")[1]).all()
    assert runs[name].columns(Table.STEPS, "observed")["observed"].all()


@pytest.mark.parametrize(
    ("name", "kind", "factor", "micro"),
    [
        ("WaitsResetInPlace", "reset", 0.0, 2),
        ("ReplicasDivided", "divided", 1 / 3, 1),
        ("ReducesDoubledByOne", "doubled", 2.0, 1),
    ],
)
def test_the_kind_of_change_its_micro_batch_and_its_workers_are_named(
    runs, name, kind, factor, micro
):
    found = told(runs[name], "sync.")["sync.accumulation"]
    ranks = (1,) if name.endswith("ByOne") else (0, 1)
    assert (found.severity, found.ranks, found.groups) == (Severity.ERROR, ranks, ())
    assert (found.first_step, found.evidence["steps"]) == (LATE, STEPS - LATE)
    assert (found.evidence["kind"], found.evidence["micro_batch"]) == (kind, micro)
    assert found.evidence["factor"] == pytest.approx(factor, rel=1e-5)


def test_a_single_layer_is_named(runs):
    found = told(runs["ReducesOneLayer"], "sync.")["sync.accumulation"]
    assert (found.severity, found.first_step) == (Severity.WARNING, LATE)
    assert (found.evidence["kind"], found.evidence["micro_batch"]) == ("changed in part", 2)
    assert found.groups == ("layers.0",)


def test_a_worker_that_changes_its_shard_of_a_clipped_gradient_is_named(runs):
    [found] = told(runs["ReducesChangedAfterwards"], "sync.").values()
    assert (found.id, found.severity, found.ranks) == ("sync.changed_later", WARNING, (1,))
    assert set(found.evidence["names"]) == {"layers.0.bias"}
    assert (found.first_step, found.evidence["factor"]) == (LATE, pytest.approx(3, rel=1e-5))


def test_shards_are_not_compared_with_other_workers_shards(runs):
    columns = runs["ReducesClipped"].columns(Table.WORKERS)
    assert np.allclose(columns["applied_odd"], 1)
    assert (columns["applied_scale"] < 1).all()
    for digest in ("reduced_digest", "applied_digest"):
        assert (columns[digest] == MISSING_INT).all()
