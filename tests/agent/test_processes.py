"""Real processes that end, are stopped, or are stuck, seen from outside."""

import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from rankscope.agent import ranks
from rankscope.agent.hang_report import CodePlace, ProcessState
from rankscope.agent.processes import (
    ProcessWatch,
    ProgressMark,
    lower_priority,
    open_mark,
    permit_inspection,
    read_mark,
)
from rankscope.agent.ranks import StackTaker, stacks_of
from rankscope.errors import install_command

PATIENCE = 60.0
SLEEPER = "print('ready', flush=True); import time; time.sleep(600)"
STUCK = """
import threading

def take_twice(lock):
    lock.acquire()

def train():
    lock = threading.Lock()
    lock.acquire()
    print(threading.get_native_id(), flush=True)
    take_twice(lock)

"""
KNOWS_EXIT_CODES = tuple(map(int, platform.release().split(".")[:2])) >= (6, 15)


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def start():
    """Start Python programs, of which each has said a word; they are gone at the end."""
    started = []

    def run(code):
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        process.word = process.stdout.readline().strip()
        return process

    yield run
    for process in started:
        process.kill()
        process.stdout.close()
        process.wait()


@pytest.fixture(params=["pidfd", "proc"])
def watch(request, monkeypatch):
    """Watch processes with a pidfd, and as on a system that has none."""
    if request.param == "proc":

        def refuse(pid):
            raise OSError

        monkeypatch.setattr(os, "pidfd_open", refuse)
    watches = []

    def begin(pid):
        watches.append(ProcessWatch(pid))
        return watches[-1]

    yield begin
    for one in watches:
        one.close()


def test_a_process_that_runs_is_stopped_goes_on_and_is_killed(start, watch):
    process = start(SLEEPER)
    seen = watch(process.pid)
    assert seen.state() == ProcessState.RUNNING
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: seen.state() == ProcessState.STOPPED)
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: seen.state() == ProcessState.RUNNING)
    process.kill()
    wait_for(lambda: seen.state() == ProcessState.ENDED)  # a zombie: nobody has waited for it
    process.wait()
    assert seen.state() == ProcessState.ENDED


def test_a_process_that_ended_before_has_ended(start):
    process = start("print()")
    process.wait()
    assert ProcessWatch(process.pid).state() == ProcessState.ENDED


def test_without_a_pidfd_another_process_with_the_number_is_not_the_one(start, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    seen = ProcessWatch(start(SLEEPER).pid)
    letter, started = seen._read()
    assert seen.state() == ProcessState.RUNNING
    monkeypatch.setattr(seen, "_read", lambda: (letter, started + 1))
    assert seen.state() == ProcessState.ENDED


def test_a_pidfd_is_given_back(start):
    process = start(SLEEPER)
    seen = ProcessWatch(process.pid)
    process.kill()
    assert select.select([seen], [], [], PATIENCE)[0] == [seen]
    assert seen.state() == ProcessState.ENDED
    seen.close()
    assert seen.fileno() == -1
    assert seen.state() == ProcessState.ENDED
    assert seen.ending() == ""


@pytest.mark.parametrize(
    ("number", "ending"),
    [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGTERM, "exited with code 3")],
)
def test_how_it_ended_is_told_where_the_system_tells_and_not_made_up(start, number, ending):
    leave = "import os, signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(3))\n"
    process = start(leave + SLEEPER)
    seen = ProcessWatch(process.pid)
    assert seen.ending() == ""
    process.send_signal(number)
    process.wait()
    assert seen.ending() == (ending if KNOWS_EXIT_CODES else "")
    seen.close()
    assert ProcessWatch(process.pid).ending() == ""  # too late to get hold of it


def test_the_other_end_of_a_socket_is_watched():
    here, there = socket.socketpair(socket.AF_UNIX)
    seen = ProcessWatch.of_peer(here)
    assert seen.pid == os.getpid()
    assert seen.state() == ProcessState.RUNNING
    for end in (here, there, seen):
        end.close()


def test_nothing_is_said_where_the_system_says_nothing(start, watch, monkeypatch):
    monkeypatch.setattr(ProcessWatch, "_read", lambda self: ("", 0))  # /proc hides it
    assert watch(start(SLEEPER).pid).state() == ProcessState.UNKNOWN


def _priorities():
    lower_priority()
    lower_priority()
    return os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)


def test_the_agent_gives_way():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        nice, policy = pool.submit(_priorities).result(PATIENCE)
    assert nice >= 10
    assert policy == os.SCHED_BATCH


def test_permission_never_raises(monkeypatch):
    permit_inspection(os.getppid())
    permit_inspection(0)
    monkeypatch.setattr("ctypes.CDLL", None)
    permit_inspection(1)


# Progress -------------------------------------------------------------------------------------


def test_a_mark_can_be_read_inside_of_a_step_and_after_its_writer_has_closed_it():
    mark = ProgressMark()
    read_by = open_mark(os.getpid(), mark.fileno())
    assert read_mark(read_by) is None
    mark.beat(0, "forward")
    assert read_mark(read_by) == CodePlace(0, 1, "forward")
    mark.beat(0, "backward")
    mark.beat(0, "forward")
    assert read_mark(read_by) == CodePlace(0, 3, "forward")
    mark.beat(2**40, "step")
    assert read_mark(read_by) == CodePlace(2**40, 1, "step")
    mark.close()
    mark.close()
    mark.beat(7, "backward")
    assert read_mark(read_by) == CodePlace(7, 1, "backward")
    os.close(read_by)
    assert read_mark(read_by) is None


def test_the_mark_of_a_process_is_read_after_its_death(start):
    process = start(
        "from rankscope.agent.processes import ProgressMark; mark = ProgressMark(); "
        "mark.beat(7, 'forward'); print(mark.fileno(), flush=True); import time; time.sleep(600)"
    )
    read_by = open_mark(process.pid, int(process.word))
    process.kill()
    process.wait()
    assert read_mark(read_by) == CodePlace(7, 1, "forward")
    os.close(read_by)
    assert open_mark(process.pid, int(process.word)) is None


def test_what_is_no_mark_is_not_read(tmp_path):
    with (tmp_path / "file").open("w") as file:
        file.write("something else")
        file.flush()
        assert open_mark(os.getpid(), file.fileno()) is None
    assert open_mark(os.getpid(), 10**6) is None


def test_a_mark_of_too_many_passes_stays_in_its_step():
    mark = ProgressMark()
    mark._step, mark._passes = 5, 2**20
    mark.beat(5, "forward")
    assert read_mark(mark.fileno()) == CodePlace(5, 2**20 - 1, "forward")
    mark.close()


# Stacks ---------------------------------------------------------------------------------------


def names(stack):
    return [frame.partition(" ")[0] for frame in stack["frames"]]


def test_the_stack_of_a_stuck_process_shows_the_function(start):
    process = start(STUCK + "train()")
    wait_for(lambda: names(stacks_of({process.pid: 0})[process.pid])[0] == "take_twice")
    stack = stacks_of({process.pid: 0})[process.pid]
    assert stack["missing"] == ""
    assert stack["thread"] == "MainThread"
    assert names(stack) == ["take_twice", "train", "<module>"]


def test_a_stopped_process_shows_its_stack_and_stays_stopped(start):
    process = start(STUCK + "train()")
    seen = ProcessWatch(process.pid)
    wait_for(lambda: "take_twice" in names(stacks_of({process.pid: 0})[process.pid]))
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: seen.state() == ProcessState.STOPPED)
    assert names(stacks_of({process.pid: 0})[process.pid])[0] == "take_twice"
    assert seen.state() == ProcessState.STOPPED
    seen.close()


def test_the_thread_that_trains_is_shown(start):
    process = start(STUCK + "threading.Thread(target=train, name='trainer').start()")
    number = int(process.word)
    wait_for(lambda: names(stacks_of({process.pid: number})[process.pid])[0] == "take_twice")
    assert stacks_of({process.pid: number})[process.pid]["thread"] == "trainer"
    assert stacks_of({process.pid: 0})[process.pid]["thread"] == "MainThread"


def test_deep_stacks_are_cut(start):
    deep = (
        "def dive(n):\n    take_twice(n) if isinstance(n, str) else dive(n - 1) if n else train()\n"
    )
    process = start(STUCK + deep + "dive(50)")
    wait_for(lambda: "take_twice" in names(stacks_of({process.pid: 0})[process.pid]))
    assert len(stacks_of({process.pid: 0})[process.pid]["frames"]) == 12


def test_without_py_spy_a_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    stack = stacks_of({1: 0})[1]
    assert stack["frames"] == []
    assert install_command("hangs") in stack["missing"]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Put a shell script in the place of py-spy."""

    def write(lines):
        program = tmp_path / "py-spy"
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    return write


def test_without_permission_a_sentence_says_what_to_change(fake):
    fake("echo 'Permission Denied: Try running again with sudo' >&2; exit 1")
    missing = stacks_of({1: 0})[1]["missing"]
    assert "ptrace_scope" in missing
    assert "SYS_PTRACE" in missing


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        ("echo 'Error: no' >&2; echo Stack backtrace: >&2; exit 1", "py-spy: Error: no"),
        ("exit 1", "py-spy: failed without a word"),
        ("echo '[]'", "py-spy's answer cannot be read; rankscope knows version 0.4"),
        ("echo nonsense", "py-spy's answer cannot be read; rankscope knows version 0.4"),
        ("exec sleep 60", "py-spy did not answer within 0.2 s"),
    ],
)
def test_a_py_spy_that_fails_is_quoted(fake, lines, missing):
    fake(lines)
    assert stacks_of({1: 0}, seconds=0.2)[1]["missing"] == missing


def test_a_process_that_is_gone_has_no_stack(start):
    process = start("print()")
    process.wait()
    assert "py-spy: Error" in stacks_of({process.pid: 0})[process.pid]["missing"]


def test_stacks_are_taken_beside_the_agents_loop(monkeypatch):
    may_go_on = threading.Event()

    def slow(threads, seconds):
        may_go_on.wait(PATIENCE)
        return dict.fromkeys(threads, "stack")

    monkeypatch.setattr(ranks, "stacks_of", slow)
    taker = StackTaker({7: 0})
    assert taker.result() is None
    may_go_on.set()
    wait_for(lambda: taker.result() == {7: "stack"})


def test_a_thread_that_cannot_start_or_fails_is_a_reason(monkeypatch):
    def fail(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ranks, "stacks_of", fail)
    taker = StackTaker({7: 0})
    wait_for(taker.result)
    assert taker.result()[7]["missing"] == "can't start new thread"
    monkeypatch.setattr(threading.Thread, "start", fail)
    assert StackTaker({7: 0}).result()[7]["missing"] == "can't start new thread"
