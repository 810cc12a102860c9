"""Real processes that end, are stopped, or are stuck, seen from outside."""

import os
import signal
import subprocess
import sys

import pytest

from rankscope.agent.hang_report import ProcessState
from rankscope.agent.rank_processes import ProcessWatch, stacks_of
from rankscope.errors import install_command
from support.accidents import wait_until

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
    wait_until(lambda: seen.state() == ProcessState.STOPPED)
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: seen.state() == ProcessState.RUNNING)
    process.kill()
    wait_until(lambda: seen.state() == ProcessState.ENDED)  # a zombie: nobody has waited for it
    process.wait()
    assert seen.state() == ProcessState.ENDED


# Stacks ---------------------------------------------------------------------------------------


def names(stack):
    return [frame.partition(" ")[0] for frame in stack["frames"]]


def test_a_stopped_process_shows_its_stack_and_stays_stopped(start):
    process = start(STUCK + "train()")
    seen = ProcessWatch(process.pid)
    wait_until(lambda: "take_twice" in names(stacks_of({process.pid: 0})[process.pid]))
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: seen.state() == ProcessState.STOPPED)
    assert names(stacks_of({process.pid: 0})[process.pid])[0] == "take_twice"
    assert seen.state() == ProcessState.STOPPED
    seen.close()


def test_without_py_spy_a_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    stack = stacks_of({1: 0})[1]
    assert stack["frames"] == []
    assert install_command("hangs") in stack["missing"]
