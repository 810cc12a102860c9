import errno
import os
import shutil
import signal
import subprocess
import threading

import numpy as np
import pytest
import torch.distributed as dist

from rankscope import Run, files
from rankscope.agent import recorder
from rankscope.agent.recorder import Recorder
from rankscope.bus.evidence import Table
from rankscope.errors import RunError
from rankscope.record import RunWriter
from rankscope.verdict.assessment import assess
from record.run_files import make_finding
from record.step_reports import make_report
from support.accidents import wait_until
from support.loops import Loop
from support.ranks import run_ranks

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int fsync(int descriptor) {
    const char *place = getenv("STORE_SAYS");
    for (;;) {
        FILE *file = place ? fopen(place, "r") : NULL;
        int said = 0;
        if (file == NULL) break;
        if (fscanf(file, "%d", &said) != 1) said = 0;
        fclose(file);
        if (said == 0) break;
        if (said > 0) { errno = said; return -1; }
        usleep(10000);
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(descriptor);
}
"""

HANGS = -1


class Store:
    """What processes that are started inside of ``with store.preloaded()`` write to."""

    def __init__(self, folder):
        self._library, self._says = folder / "store.so", folder / "store-says"
        self._preload = {"LD_PRELOAD": str(self._library), "STORE_SAYS": str(self._says)}
        if not self._library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "store.c").write_text(_SOURCE)
            hidden = folder / f"store-{os.getpid()}.so"
            build = ["cc", "-shared", "-fPIC", "-o", hidden, folder / "store.c", "-ldl"]
            subprocess.run(build, check=True)
            hidden.rename(self._library)

    def load(self):
        os.environ |= self._preload

    def fail(self, number):
        """Fail with an error of the system, or stand still with ``HANGS``."""
        hidden = self._says.with_suffix(f".{os.getpid()}")
        hidden.write_text(str(number))
        hidden.rename(self._says)

    def heal(self):
        self._says.unlink(missing_ok=True)


# A run directory whose file system fails, or stands still, under the agent's process ------------

STEPS, HIT, HEALED = 40, 10, 25


def train(rank, folder, number, heals):
    """Train next to a store that fails in between; return the warnings."""
    store = Store(folder)
    store.heal()
    store.load()
    loop = Loop(rank, str(folder / "run"), agent="process", flush_seconds=0.05)
    for step in range(STEPS):
        if rank == 0 and step == HIT:
            wait_until(lambda: Run.open(folder / "run").table(Table.STEPS).num_rows > 5)
            store.fail(number)
        if rank == 0 and step == HIT + 5 and number != HANGS:
            wait_until(lambda: (loop.scope.findings, len(loop.warnings))[1] > 0)
        if rank == 0 and step == HEALED and heals:
            store.heal()
            if number != HANGS:
                wait_until(lambda: (loop.scope.findings, len(loop.warnings))[1] > 1)
        loop.step(step)
    loop.scope.close(timeout=3.0)
    if rank == 0:
        store.heal()  # not before close has come back
    return loop.warnings


@pytest.fixture(scope="module", params=[errno.EMFILE, errno.ENOSPC, HANGS])
def healed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    return request.param, folder / "run", run_ranks(train, 2, folder, request.param, True)


def test_a_store_that_heals_costs_no_step(healed):
    number, path, (warnings, silent) = healed
    run = Run.open(path)
    assert run.status == "complete"
    np.testing.assert_array_equal(run.columns(Table.STEPS, "step")["step"], np.arange(STEPS))
    assert silent == []
    if number == HANGS:
        assert warnings == []
    else:
        assert run.info["failed_writes"] > 0
        assert len(warnings) == 2
        assert "cannot write" in warnings[0]
        assert "is kept, and written later" in warnings[0]
        assert "written again" in warnings[1]
        assert "nothing is missing" in warnings[1]


def test_a_store_that_stands_still_holds_up_no_exit(tmp_path):
    """It goes on only once the training has closed."""
    warnings, _ = run_ranks(train, 2, tmp_path, HANGS, False)
    assert len(warnings) == 1
    assert "the agent closes the record by itself" in warnings[0]
    wait_until(lambda: Run.open(tmp_path / "run").status == "complete")
    assert Run.open(tmp_path / "run").table(Table.STEPS).num_rows == STEPS


def train_on(rank, folder):
    loop = Loop(rank, str(folder / "run"), agent="process", flush_seconds=0.05)
    wait_until(lambda: loop.scope.findings == () and loop.scope.traffic.received > 0)
    dist.barrier()  # both ranks know the agent before it ends
    over, waits = threading.Event(), []
    if rank == 0:
        files.os.fsync = lambda _: waits.append(over.wait(30.0))
        os.kill(loop.scope._handle.agent.pid, signal.SIGKILL)
        wait_until(lambda: (loop.scope.findings, loop.warnings)[1])  # it has noticed
    for step in range(5):
        loop.step(step)
    loop.close()
    over.set()
    wait_until(lambda: rank == 1 or waits)
    return waits


def test_a_training_does_not_wait_for_a_store_to_say_that_its_agent_was_killed(tmp_path):
    assert run_ranks(train_on, 2, tmp_path) == [[True], []]


# One that stays away ------------------------------------------------------------------------------


def test_a_record_that_cannot_be_written_to_its_end_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "_LAST_PAUSES", ())
    for whole in (0, 2):
        path = tmp_path / str(whole)
        record = Recorder(RunWriter(path, {"num_workers": 4}))
        record.add_many([make_report(step) for step in range(whole)])
        assert record.flush()
        if whole:
            (path / "workers").rename(tmp_path / "kept")
        (path / "workers").write_text("in its place")
        record.add_many([make_report(step) for step in range(whole, 5)])
        with pytest.raises(RunError, match="cannot write"):
            record.close("complete")
        run = Run.open(path)
        missing = {"first_step": whole, "steps": 5 - whole, "why": "File exists"}
        assert (run.status, run.info["unwritten"]) == ("incomplete", missing)
        assert "could not be written (File exists)" in assess(run).headline


@pytest.mark.parametrize("taken", [False, True])
def test_a_run_whose_directory_is_gone_is_not_written_into_another_run(tmp_path, taken):
    record = Recorder(RunWriter(tmp_path / "run", {}))
    record.add_many([make_report(0)])
    assert record.flush()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    if taken:
        RunWriter(tmp_path / "run", {"name": "another"})
    record.add_many([make_report(1)])
    assert record.flush() is not taken
    assert (tmp_path / "run" / "steps").exists() is not taken


@pytest.mark.parametrize("limit", ["MOST_KEPT_BYTES", "GIVE_UP_SECONDS"])
def test_a_store_that_stays_away_ends_the_record_and_says_what_is_missing(
    tmp_path, monkeypatch, caplog, limit
):
    """Its directory is elsewhere, and cannot be followed, as on systems without ``/proc``."""
    monkeypatch.setattr("rankscope.record.place._opened", lambda path: None)
    record = Recorder(RunWriter(tmp_path / "run", {}, flush_seconds=0.0))
    monkeypatch.setattr(recorder, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(recorder, "_LAST_PAUSES", ())
    (tmp_path / "run").rename(tmp_path / "kept")
    record.add_many([make_report(0), make_report(1)])
    record.add_findings([make_finding("a")])
    assert not record.flush()
    monkeypatch.setattr(recorder, limit, -1)
    for step in (2, 3):
        record.add_many([make_report(step)])
    (tmp_path / "kept").rename(tmp_path / "run")
    assert record.flush()
    record.add_many([make_report(4)])
    record.close("complete")
    run = Run.open(tmp_path / "run")
    assert run.columns(Table.STEPS, "step")["step"].tolist() == [0, 1]
    assert run.status == "incomplete"
    assert run.info["unwritten"] == {"first_step": 2, "steps": 3}
    assert run.info["failed_writes"] == 2
    assert [finding.id for finding in run.findings()] == ["a"]
    said = [record.getMessage() for record in caplog.records]
    assert [("ends before step 2" in line, "ends early" in line) for line in said] == [
        (False, False), (True, False), (False, True)
    ]  # fmt: skip
