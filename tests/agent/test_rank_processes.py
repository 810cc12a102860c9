import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from rankscope.agent.hang_report import ProcessState
from rankscope.agent.rank_processes import ProcessWatch, busy_seconds_of, stacks_of
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


# Odd places in which an agent starts ------------------------------------------------------------

SRC = Path(__file__).resolve().parents[2] / "src"

GREET = """
import json, os, select, sys, time
sys.path[:0] = sys.argv[1:]
os.makedirs("gone"), os.chdir("gone"), os.rmdir("../gone")
os.environ["TMPDIR"] = os.environ["HOME"] = "/proc/1"
os.environ["PYTHONHOME"] = "/nowhere"
from rankscope.agent.frames import FrameKind, pack
from rankscope.agent.link import Link, connect, listen, start_agent

listening, address = listen()
numbers = listening.fileno()
started = start_agent(listening, "password", thread=False)
hello = pack(FrameKind.HELLO, json.dumps({"rank": 0, "secret": "password"}).encode(), rank=0)
link = Link(lambda: connect(address), hello)
frames = link.wait(30.0)
assert [frame.kind for frame in frames] == [FrameKind.WELCOME], frames
assert int(frames[0].payload) == started.pid, frames
assert os.getsid(started.pid) == started.pid  # Ctrl-C in the terminal does not reach it
print(numbers, open(f"/proc/{started.pid}/environ").read().count("VISIBLE_DEVICES=\\0"))
link.close()
started.wait(10.0)
assert started._process.poll() is not None
"""


def test_an_agent_starts_wherever_a_training_does(tmp_path):
    """From a zip, beside files that shadow the library, without standard input, home or folder."""
    with zipfile.ZipFile(tmp_path / "rankscope.zip", "w") as archive:
        for path in sorted((SRC / "rankscope").rglob("*")):
            if path.suffix != ".pyc":
                archive.write(path, path.relative_to(SRC))
    shadows = tmp_path / "script"
    shadows.mkdir()
    for name in ("queue", "selectors", "hmac", "random", "numbers", "traceback"):
        (shadows / f"{name}.py").write_text("raise ImportError('shadowed')\n")
    known = "import queue, selectors, hmac, random, traceback, subprocess, socket, tempfile\n"
    (tmp_path / "greet.py").write_text(known + GREET)  # as if the training had them already
    words = [sys.executable, "-I", "greet.py", str(shadows), str(tmp_path / "rankscope.zip")]
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" <&-', "bash", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert not done.returncode, done.stderr
    descriptor, hidden = done.stdout.split()
    assert descriptor == "0"  # that of the socket, where standard input was
    assert hidden == "2"


SPINS = "import os; os.sched_setaffinity(0, {CPU}); print(flush=True)\nwhile True: pass"


def test_a_process_that_waits_for_a_cpu_is_busy_and_one_that_sleeps_is_not(start):
    """Four processes share one CPU: together they are busy for longer than it computes."""
    code = SPINS.replace("CPU", str(min(os.sched_getaffinity(0))))
    asleep, spinning = start(SLEEPER).pid, [start(code).pid for _ in range(4)]
    begun, start_time = [sum(busy_seconds_of(pid)) for pid in spinning], time.monotonic()
    elapsed, busy = [], []

    def has_waited():
        elapsed.append(time.monotonic() - start_time)
        busy[:] = [
            sum(busy_seconds_of(pid)) - was for pid, was in zip(spinning, begun, strict=True)
        ]
        return min(busy) > 0.2

    idle = sum(busy_seconds_of(asleep))
    wait_until(has_waited)
    assert sum(busy) > elapsed[-1]
    assert sum(busy_seconds_of(asleep)) - idle < min(busy)
