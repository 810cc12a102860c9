import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from documentation.framework_pages import assert_block_ran, python_blocks
from integrations.adapters import assert_same_metrics, loud, run_in
from rankscope.bus.evidence import Table
from rankscope.errors import MissingExtraError, UsageError, install_command
from rankscope.integrations.ray import watch
from support.models import make_model

SCRIPT = Path(__file__).with_name("ray_trainings.py")
BLOCKS = python_blocks("docs/integrations/ray.md")
rays_warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
STEPS = 8
SECONDS = 420
"""How long Ray's some ten processes may take on a busy machine."""


@pytest.fixture(scope="module")
def trained(folder):
    paths = [str(SCRIPT.parents[1]), str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with (folder / "output.txt").open("w") as output:
        # The script tells where it hangs a little before it is ended.
        command = [sys.executable, str(SCRIPT), str(folder), str(SECONDS - 10)]
        script = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        returned = end_of(script)
    assert returned == 0, f"{returned}\n{(folder / 'output.txt').read_text()}"
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def end_of(script):
    """Return what a process returned, or why it was killed with all that it had started."""
    try:
        return script.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return f"killed after {SECONDS} s"
    finally:
        if script.poll() is None:
            for process in [*psutil.Process(script.pid).children(recursive=True), script]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            script.wait()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
class TestUnderRay:
    def test_a_healthy_training_is_recorded_as_by_hand_and_nothing_is_found(self, trained):
        run = run_in(trained[0], "healthy")
        assert len(run.columns(Table.STEPS, "step")["step"]) == STEPS
        assert_same_metrics(run, run_in(trained[0], "hand"))
        assert loud(run) == []

    def test_the_training_ends_with_the_same_bits_as_unwatched(self, trained):
        for worker in trained[1]:
            assert worker["watched"] == worker["unwatched"]

    def test_a_run_is_in_the_storage_of_its_experiment_and_knows_its_name(self, trained):
        assert {worker["storage"] for worker in trained[1]} == {str(trained[0] / "storage" / "all")}
        run = run_in(trained[0] / "storage" / "all", "rankscope")
        assert run.info["config"] == {"framework": "ray", "experiment": "all"}

    def test_a_run_that_nobody_closed_is_complete_when_its_function_has_returned(self, trained):
        run = run_in(trained[0], "returned")
        assert_same_metrics(run, run_in(trained[0], "hand"))
        assert loud(run) == []

    @pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.first)
    def test_a_block_of_the_page_runs(self, trained, block):
        run = assert_block_ran(block, [worker["page"] for worker in trained[1]])
        assert run.path == trained[0] / "storage" / "all" / "rankscope"

    def test_a_run_whose_function_raised_is_incomplete_and_has_its_last_step(self, trained):
        run = run_in(trained[0], "raised")
        assert run.status == "incomplete"
        assert len(run.columns(Table.STEPS, "step")["step"]) == STEPS

    def test_no_process_stays(self, trained):
        assert json.loads((trained[0] / "left.json").read_text()) == []


@rays_warnings
def test_outside_of_a_worker_it_says_where_it_belongs():
    with pytest.raises(UsageError, match="inside the training function of a Ray Train worker"):
        watch(make_model())


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("ray"))):
        watch(make_model())
