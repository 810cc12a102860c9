"""A recorded run in Python: tables that other libraries take, and its verdict in a notebook."""

import json

import numpy as np
import pyarrow as pa
import pytest

import rankscope
from rankscope.bus.evidence import Table
from rankscope.errors import RunError
from rankscope.evidence import columns_of
from rankscope.record import Run
from report.recorded_runs import changing, record_run, with_everything


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("loaded") / "<b>run"
    return record_run(place, num_workers=4, num_steps=16, change=with_everything)


@pytest.mark.parametrize("table", Table)
def test_every_table_is_there_with_all_of_its_columns(run, table):
    loaded = rankscope.load(run.path)
    rows = getattr(loaded, table)
    assert isinstance(rows, pa.Table)
    named = [f"{signal.name}_in_words" for signal in columns_of(table) if signal.bits]
    assert rows.drop_columns(named).equals(run.table(table))
    assert rows.drop_columns(named).column_names == [signal.name for signal in columns_of(table)]
    assert len(rows.to_pandas()) == len(rows)


def test_one_opening_gives_tables_and_arrays(run):
    loaded = rankscope.load(run.path)
    assert isinstance(loaded.run, Run)
    np.testing.assert_array_equal(loaded.run.per_worker("loss")[1], run.per_worker("loss")[1])
    with pytest.raises(RunError, match="cannot reach"):
        Run.open("gs-nowhere://bucket/run")


def test_flags_have_names_beside_them(tmp_path):
    @changing
    def change(step, workers):
        workers["rng_used"][:] = (0, 4, 1 + 2, 8 + 16 * 2)
        workers["loader_rng_repeats"][1:] = (1, 4, 5)

    path = record_run(tmp_path / "run", num_workers=4, num_steps=1, change=change).path
    rows = rankscope.load(path).workers
    used = ["", "torch", "Python, numpy", "accelerator, numpy between passes"]
    assert rows["rng_used_in_words"].to_pylist() == used
    repeated = [None, "Python", "torch", "Python, torch"]
    assert rows["loader_rng_repeats_in_words"].to_pylist() == repeated


def test_what_watching_costs_is_said_in_every_step_and_for_each_read(tmp_path):
    @changing
    def change(step, workers):
        observed = step.step % 2 == 0
        workers["overhead_seconds"][:] = 0.002 + 0.003 * observed
        workers["read_seconds"][:] = 0.003 * observed
        workers["overhead_seconds"][1] += 0.002
        return {"interval": 2, "observed": observed}

    run = record_run(tmp_path / "run", num_workers=4, num_steps=16, change=change)
    said = rankscope.load(run.path).assess()
    assert said.values["overhead_fixed_seconds"] == pytest.approx(0.004)
    assert said.values["overhead_read_seconds"] == pytest.approx(0.003)
    [cost] = [line for line in said.statements if line.startswith("Watching took")]
    assert "gradients were measured every 2 steps at the widest" in cost
    assert "4 ms in every step whatever its length, and 3 ms to read the gradient" in cost
    assert cost.endswith("both are 7.00% of a step of 100 ms, and 0.70% of one of 1 second.")
    info = json.loads((run.path / "run.json").read_text())
    overhead = {"within_budget": False, "budget": 0.01}
    (run.path / "run.json").write_text(json.dumps({**info, "overhead": overhead}))
    said = rankscope.load(run.path).assess()
    [cost] = [line for line in said.statements if line.startswith("Watching took")]
    assert "The budget of 1.00% was not kept" in cost
