"""What scripts do to their own process beside the monitor: forks, closed files, clocks, Ctrl-C."""

import contextlib
import os

import pytest

from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.bus.finding import Severity
from support.loops import Loop
from support.models import make_batch
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 12


def recorded(path):
    run = Run.open(path)
    assert run.status == "complete"
    assert [f.cause for f in run.findings() if f.severity > Severity.NOTE] == []
    return run.columns(Table.STEPS, "step")["step"].tolist()


def bits_alone(rank, steps):
    loop = Loop(rank, None)
    for step in range(steps):
        loop.step(step)
    return loop.bits()


# Forks ----------------------------------------------------------------------------------------


def fork_and_train(rank, run_dir):
    """A child trains a model of the parent's, closes its scope, and ends as a script does."""
    loop = Loop(rank, run_dir, agent="process")
    codes = []
    for step in range(STEPS):
        if step == 5:
            child = os.fork()
            if child == 0:
                code = 1
                with contextlib.suppress(BaseException):
                    for other in range(20):
                        loop.model(**make_batch(rank, other))["loss"].backward()
                        loop.optimizer.step()
                    loop.scope.close()
                    code = 0
                os._exit(code)
            codes.append(os.waitpid(child, 0)[1])
        loop.step(step)
    loop.close()
    return codes, loop.warnings, loop.bits() == bits_alone(rank, STEPS)


def test_a_forked_child_that_trains_is_no_part_of_the_run(tmp_path):
    assert run_ranks(fork_and_train, 2, str(tmp_path / "run")) == [([0], [], True)] * 2
    assert recorded(tmp_path / "run") == list(range(STEPS))


# Closed files -------------------------------------------------------------------------------------


def open_files():
    return {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208


def close_all_files(rank, run_dir):
    """Close all but torch's files and the test's, and open files of one's own in their place."""
    torchs = open_files()
    loop = Loop(rank, run_dir, agent="process")
    mine = []
    for step in range(STEPS):
        if step == 5:
            for number in sorted(open_files() - torchs):
                os.closerange(number, number + 1)
            mine = [os.open(os.devnull, os.O_RDWR) for _ in range(100)]
        loop.step(step)
    loop.close()
    still = [os.fstat(number).st_rdev == os.fstat(mine[-1]).st_rdev for number in mine]
    return loop.bits(), loop.warnings, all(still)


def alone(rank):
    return bits_alone(rank, STEPS)


def test_a_script_that_closes_all_files_trains_on_and_keeps_its_own(tmp_path):
    ((bits, warnings, still),) = run_ranks(close_all_files, 1, str(tmp_path / "run"))
    assert bits == run_ranks(alone, 1)[0]
    assert still
    (warning,) = warnings
    assert "was closed in this process" in warning
    steps = Run.open(tmp_path / "run").columns(Table.STEPS, "step")["step"].tolist()
    assert steps == list(range(len(steps)))


# Clocks -------------------------------------------------------------------------------------------


# Ctrl-C -------------------------------------------------------------------------------------------
