import os
import shutil
import signal

import numpy as np
import pytest

from rankscope.bus.evidence import Table
from rankscope.record import Run
from support.study_command import Done, StudyCommand, has_rows, names, tables, tree

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def study(folder):
    made = StudyCommand(folder)
    yield made
    if made.host and not made.host.closed:
        made.host.close()


LONG = {"reading": "both", "settings": "s1-1", "batch_size": 1, "steps": 120}


@pytest.fixture(scope="module")
def stopped(study, folder):
    """Ctrl-C, twice, in the second of two trainings."""
    path = folder / "stopped"
    begun = study.begin(path, **LONG)
    begun.wait_until(lambda: has_rows(path / "runs" / "replicated-s1-1"))
    begun.interrupt()
    begun.interrupt()
    return Done(path, begun.finish())


def says_how_to_go_on(done):
    line = (
        f"rankscope: Interrupted. What was measured is in {done.path}; to go on, give the same "
        "command again, with --resume."
    )
    return done.err.splitlines()[-1] == line


def test_ctrl_c_ends_in_one_line(stopped):
    assert stopped.code == 130
    assert says_how_to_go_on(stopped), stopped.err
    assert [line.split(":")[0] for line in stopped.err.splitlines()] == [
        "Preparing data and model, which may take a minute; then 2 trainings of 120 steps on "
        "2 workers.",
        "sharded-s1-1",
        "rankscope",
    ]


def test_what_was_measured_is_readable(stopped):
    steps, losses_TW = Run.open(stopped.path / "runs" / "replicated-s1-1").per_worker("loss")
    assert 0 < len(steps) < 120
    assert list(steps) == list(range(len(steps)))
    assert np.isfinite(losses_TW).all()
    assert not (stopped.path / "summary.json").exists()


@pytest.fixture(scope="module")
def resumed(study, stopped, folder):
    path = folder / "resumed"
    shutil.copytree(stopped.path, path)
    (path / "models" / ".sharded-s1-1.partial-1").mkdir()
    before = tree(path)
    return Done(path, study.begin(path, **LONG, resume=True).finish()), before


def test_resume_does_what_is_left(resumed):
    done, before = resumed
    assert done.code == 0, done.err
    after = tree(done.path)
    kept = [name for name in before if name.startswith(("runs/sharded", "models/sharded"))]
    kept = [name for name in kept if not name.endswith("README.md")]  # written at the end
    assert len(kept) > 8
    assert all(after[name] == before[name] for name in kept)
    assert [entry["steps"] for entry in done.summary()] == [120, 120]
    assert [line.split(":")[0] for line in done.err.splitlines()] == [
        "Preparing data and model, which may take a minute; then 1 training of 120 steps on "
        "2 workers.",
        "replicated-s1-1",
    ]
    assert names(done.path / "models") == ["sharded-s1-1"]


def test_resumed_and_uninterrupted_measure_the_same(resumed, stopped):
    whole = tables(resumed[0].path / "runs" / "replicated-s1-1")[Table.WORKERS]
    part = tables(stopped.path / "runs" / "replicated-s1-1")[Table.WORKERS]
    assert part.num_rows > 0
    # A canary runs in the step after its batches have come back from the agent.
    compared = [name for name in whole.column_names if not name.startswith("canary_")]
    whole, part = whole.select(compared), part.select(compared)
    whole, ended = whole.slice(0, part.num_rows), part.num_rows - 2
    assert whole.slice(0, ended).equals(part.slice(0, ended))
    # In the last step, a worker may have been interrupted wherever it was.
    for name in whole.column_names[: whole.column_names.index("batch_digest") + 1]:
        pairs = zip(whole[name].to_pylist(), part[name].to_pylist(), strict=True)
        assert all(interrupted in (None, value) for value, interrupted in pairs), name


def test_a_killed_worker_ends_the_study(study, folder):
    path = folder / "killed"
    begun = study.begin(path, **LONG)
    begun.wait_until(lambda: has_rows(path / "runs" / "sharded-s1-1"))
    os.kill(Run.open(path / "runs" / "sharded-s1-1").info["ranks"][1]["pid"], signal.SIGKILL)
    done = Done(path, begun.finish())
    assert done.code == 3
    assert "rankscope: worker 1 failed: Signal 9 (SIGKILL)" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err
    assert Run.open(path / "runs" / "sharded-s1-1").table(Table.STEPS).num_rows > 0


def test_a_signal_to_the_launcher_alone(study, folder):
    path = folder / "terminated"
    begun = study.begin(path, **LONG)
    begun.wait_until(lambda: has_rows(path / "runs" / "sharded-s1-1"))
    begun.terminate()
    done = Done(path, begun.finish())
    assert done.code == 130
    assert says_how_to_go_on(done), done.err
    assert study.host.close() == (0, done.err)  # nor does anything follow as its process ends
    assert len(done.err.splitlines()) == 2
    assert Run.open(path / "runs" / "sharded-s1-1").table(Table.STEPS).num_rows > 0
