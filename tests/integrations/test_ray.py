"""The Ray Train adapter, on two workers of a real Ray that is started once, for one training."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

from documentation.framework_pages import assert_block_ran, python_blocks
from integrations.adapter_runs import assert_same_metrics, loud, run_in
from rankscope.bus.evidence import Table
from rankscope.errors import MissingExtraError, UsageError, install_command
from rankscope.integrations.ray import HIDDEN_SECONDS, _close_at_the_end, watch
from support.models import make_model

SCRIPT = Path(__file__).with_name("ray_trainings.py")
BLOCKS = python_blocks("docs/integrations/ray.md")
rays_warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
STEPS = 8
SECONDS = 420
"""How long Ray's some ten processes may take on a busy machine."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of all runs, and what each worker says."""
    folder = tmp_path_factory.mktemp("ray")
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

    def test_another_learning_rate_on_one_worker_is_found(self, trained):
        run = run_in(trained[0], "raised")
        [finding] = [f for f in run.findings() if f.cause == "state.hyperparameters_differ"]
        assert finding.evidence["what"] == "the learning rate is 0.1 on rank 0, 0.2 on rank 1"

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


class Closing:
    """A scope whose end takes until it is let; it keeps what it was ended with."""

    def __init__(self):
        self.let, self.ended_with = threading.Event(), []

    def close(self):
        self.__exit__(None, None, None)

    def __exit__(self, kind, error, traceback):
        self.let.wait(SECONDS)
        self.ended_with.append(error)


class Job:
    """A training function that Ray's own thread runs, watched, until it is let end."""

    def __init__(self, monkeypatch, error=None):
        from ray.train.v2._internal.execution.worker_group.thread_runner import ThreadRunner

        self.runner, self.now = ThreadRunner(), 0.0
        self.scope = Closing()
        self._others = threading.enumerate()
        self.let, self._error, begun = threading.Event(), error, threading.Event()
        monkeypatch.setattr("rankscope.integrations.ray._runner", lambda: self.runner)

        def train():
            _close_at_the_end(self.scope, torch.device("cpu"), lambda: self.now)
            begun.set()
            self.let.wait(SECONDS)
            if self._error is not None:
                raise self._error

        self.runner.run(train)
        assert begun.wait(SECONDS)

    def error_after(self, seconds):
        self.now += seconds
        return self.runner.get_error()

    def fail_in_a_nested_thread(self, error):
        thread = threading.Thread(target=self.runner.get_exception_queue().put, args=(error,))
        thread.start()
        thread.join(SECONDS)
        self.runner._monitor_thread.join(SECONDS)

    def end(self):
        self.let.set()
        self.runner._thread.join(SECONDS)
        assert not self.runner._thread.is_alive()

    def close(self):
        """Let the scope close; return what it was ended with."""
        new = [thread for thread in threading.enumerate() if thread not in self._others]
        [closing] = [thread for thread in new if thread.name == "rankscope-closing"]
        self.scope.let.set()
        closing.join(SECONDS)
        return self.scope.ended_with


@rays_warnings
def test_an_error_of_another_thread_stops_a_training_that_goes_on(monkeypatch):
    job = Job(monkeypatch)
    error = OSError("the upload of a checkpoint failed")
    job.fail_in_a_nested_thread(error)
    assert job.error_after(0) is None  # it could be the training's own
    assert job.error_after(HIDDEN_SECONDS / 2) is None
    assert job.error_after(HIDDEN_SECONDS / 2) is error
    assert job.runner.is_running()
    job.end()
    assert job.close() == [error]
    assert job.error_after(0) is error
    assert not job.runner.is_running()


@rays_warnings
def test_an_error_at_the_end_of_a_training_is_hidden_until_its_run_is_closed(monkeypatch):
    job = Job(monkeypatch, OSError("no space left"))
    job.end()
    for _ in range(3):
        assert job.error_after(HIDDEN_SECONDS) is None
        assert job.runner.is_running()
    ended_with = job.close()
    assert "no space left" in str(job.error_after(0))
    assert ended_with == [job.error_after(0)]
    assert not job.runner.is_running()
