"""Starts a host's agent: the first local rank binds a socket, and starts the process behind it.

The socket listens before the agent runs: connections and steps wait in the kernel. On Linux it is
abstract: no directory must be writable, no path can be too long, and no file is left behind. Any
process in the network namespace can open it; the agent rejects those without the run's secret.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.agent.hang_report import ProcessState
from rankscope.agent.processes import ProcessWatch, cpu_seconds_of, ending_of

if TYPE_CHECKING:
    from rankscope.agent.process import Agent

_log = logging.getLogger("rankscope")

_BACKLOG = 1024
_LEFT_OUT = frozenset(
    {
        "PYTHONSTARTUP",
        "PYTHONINSPECT",
        "PYTHONPROFILEIMPORTTIME",
        "PYTHONWARNINGS",
        "RANKSCOPE_RUN",
        "RANKSCOPE_RUN_PID",
    }
)
_processes: "list[subprocess.Popen[bytes]]" = []  # until they have ended, so that none is a zombie

IN_THREAD = "RANKSCOPE_AGENT"
"""Environment variable for where agents run: ``process`` or ``thread``."""

LOG_FILE = "RANKSCOPE_AGENT_LOG"
"""Environment variable with a file for the error output of an agent's process."""


def listen() -> tuple[socket.socket, str]:
    """Return a listening socket, and its address for local ranks."""
    place = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if sys.platform == "linux":
        address = f"@rankscope-{secrets.token_hex(12)}"
    else:
        address = str(Path(tempfile.mkdtemp(prefix="rs-")) / "s")
    place.bind(_for_system(address))
    place.listen(_BACKLOG)
    return place, address


def connect(address: str, problem: str = "") -> socket.socket:
    """Return a connection to the agent; an OSError without one, for the reason in ``problem``."""
    if not address:
        raise OSError(0, problem or "none could be started")
    place = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        place.connect(_for_system(address))
    except OSError:
        place.close()
        raise
    return place


def start(listening: socket.socket, secret: str, *, thread: bool) -> "Started":
    """Start the agent behind a socket, which then belongs to the agent."""
    problem: OSError | None = None
    if not thread:
        try:
            return Started(process=_start_process(listening, secret))
        except OSError as error:
            problem = error
    from rankscope.agent.process import serve_in_thread

    agent, in_thread = serve_in_thread(listening, secret)
    if problem is not None:
        _log.warning(
            "the monitor's agent runs in a thread of this process, since no other can be "
            "started (%s)",
            problem.strerror or problem,
        )
    return Started(thread=in_thread, agent=agent)


class Started:
    """An agent that this process has started: in a process, or in a thread with ``agent``."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes] | None" = None,
        thread: threading.Thread | None = None,
        agent: "Agent | None" = None,
    ) -> None:
        self._process = process
        self._thread = thread
        self.agent = agent
        self._pid = os.getpid()

    @property
    def pid(self) -> int | None:
        """Its process id; None in a thread."""
        return None if self._process is None else self._process.pid

    def wake(self) -> None:
        """Continue its process if it was stopped."""
        process = self._process
        if process is None or os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):
            if process.poll() is None:
                watch = ProcessWatch(process.pid)
                if watch.state() is ProcessState.STOPPED:
                    process.send_signal(signal.SIGCONT)
                watch.close()

    def ending(self, seconds: float) -> str:
        """Wait up to so long, and return how its process ended; empty if it has not."""
        if self._process is None or os.getpid() != self._pid:
            return ""
        self.wait(seconds)
        code = self._process.poll()
        return "" if code is None else ending_of(code)

    def cpu_seconds(self) -> float:
        """Return the CPU time that its process has taken; 0 where that is unknown."""
        if self._process is None or os.getpid() != self._pid:
            return 0.0
        return cpu_seconds_of(self._process.pid)

    def wait(self, seconds: float) -> None:
        """Wait up to so long for its end."""
        if os.getpid() != self._pid:
            return
        if self._thread is not None:
            self._thread.join(seconds)
        elif self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)


def _start_process(listening: socket.socket, secret: str) -> "subprocess.Popen[bytes]":
    if not sys.executable or getattr(sys, "frozen", False):  # then it is the training's program
        raise OSError(0, "this Python does not know where it lies")
    # As 0, 1 or 2, where the training has closed its own, it would not reach the process.
    descriptor = fcntl.fcntl(listening, fcntl.F_DUPFD_CLOEXEC, 3)
    reading, writing = os.pipe()
    try:
        os.write(writing, secret.encode() + b"\n")  # before there is a reader that may end
        os.close(writing)
        with Path(os.environ.get(LOG_FILE) or os.devnull).open("a") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "rankscope.agent"),
                    *(str(descriptor), str(os.getpid())),
                ],
                stdin=reading,
                stdout=log,
                stderr=log,
                pass_fds=(descriptor,),
                start_new_session=True,
                env=_environment(),
            )
    finally:
        os.close(reading)
        os.close(descriptor)
    listening.close()
    _processes[:] = [each for each in (*_processes, process) if each.poll() is None]
    return process


def _environment() -> dict[str, str]:
    """Return an environment with this process's import path and no accelerator.

    The standard library comes first: a script's ``queue.py`` must not shadow it.
    """
    here = str(Path(__file__).resolve().parents[2])
    library: set[str | None] = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    script, *others = sys.path or [""]
    library |= {f"{place}/lib-dynload" for place in library}
    own = [place for place in others if place in library]
    places = [*own, here, *others, script]
    paths = [str(Path(place).absolute()) for place in places if place]
    environment = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    if sys.flags.ignore_environment:
        environment = {k: v for k, v in environment.items() if not k.startswith("PYTHON")}
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment["CUDA_VISIBLE_DEVICES"] = environment["HIP_VISIBLE_DEVICES"] = ""
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Larger blocks return to the system when freed; else glibc would keep ever more memory.
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(256 << 10))
    return environment


def _for_system(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address
