"""The Ray Train adapter, on two workers of a real Ray that is started once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from integrations.adapter_runs import assert_same_metrics, loud, run_in
from rankscope.core.signals import Table
from rankscope.errors import MissingExtraError, UsageError
from rankscope.integrations.ray import watch
from support.models import make_model

SCRIPT = Path(__file__).with_name("ray_trainings.py")
STEPS = 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of all runs, and what each worker says."""
    folder = tmp_path_factory.mktemp("ray")
    paths = [str(SCRIPT.parents[1]), str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(SCRIPT), str(folder)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(600)  # Ray starts some ten processes
class TestUnderRay:
    def test_a_healthy_training_is_recorded_as_by_hand_and_nothing_is_found(self, trained):
        run = run_in(trained[0], "healthy")
        assert len(run.columns(Table.STEPS, "step")["step"]) == STEPS
        assert_same_metrics(run, run_in(trained[0], "hand"))
        assert loud(run) == []

    def test_the_training_ends_with_the_same_bits_as_unwatched(self, trained):
        for worker in trained[1]:
            assert worker["watched"] == worker["unwatched"]

    def test_another_learning_rate_on_one_worker_is_found(self, trained):
        run = run_in(trained[0] / "storage" / "all", "rankscope")
        [finding] = [f for f in run.findings() if f.cause == "state.hyperparameters_differ"]
        assert finding.evidence["what"] == "the learning rate is 0.1 on rank 0, 0.2 on rank 1"

    def test_a_run_is_in_the_storage_of_its_experiment_and_knows_its_name(self, trained):
        assert {worker["storage"] for worker in trained[1]} == {str(trained[0] / "storage" / "all")}
        run = run_in(trained[0] / "storage" / "all", "rankscope")
        assert run.info["config"] == {"framework": "ray", "experiment": "all"}

    def test_a_run_that_nobody_closed_is_complete_when_its_function_has_returned(self, trained):
        run = run_in(trained[0] / "storage" / "all", "rankscope")
        assert run.status == "complete"
        assert len(run.columns(Table.STEPS, "step")["step"]) == STEPS

    def test_a_run_whose_function_raised_is_incomplete_and_has_its_last_step(self, trained):
        run = run_in(trained[0] / "storage" / "raising", "rankscope")
        assert run.status == "incomplete"
        assert len(run.columns(Table.STEPS, "step")["step"]) == STEPS

    def test_no_process_stays(self, trained):
        assert json.loads((trained[0] / "left.json").read_text()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # ray's own
def test_outside_of_a_worker_it_says_where_it_belongs():
    with pytest.raises(UsageError, match="inside the training function of a Ray Train worker"):
        watch(make_model())


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rankscope\[ray\]'"):
        watch(make_model())
