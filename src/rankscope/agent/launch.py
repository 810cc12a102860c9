"""How a host gets its agent: the first local rank binds a socket, and starts the process behind it.

The socket listens before the agent runs: connections and steps wait in the kernel. On Linux it has
no place in any file system, so that no directory must be writable, no path can be too long, and
nothing is left behind; whoever shares the network namespace can open it, and only who knows the
run's secret is heard.
"""

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

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
_processes: "list[subprocess.Popen[str]]" = []  # until they have ended, so that none is a zombie

IN_THREAD = "RANKSCOPE_AGENT"
"""Environment variable that says where agents run: ``process`` or ``thread``."""

LOG_FILE = "RANKSCOPE_AGENT_LOG"
"""Environment variable that names a file for what an agent's process prints before it fails."""


def listen() -> tuple[socket.socket, str]:
    """Return a socket that listens, and the address by which local ranks find it."""
    place = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if sys.platform == "linux":
        address = f"@rankscope-{secrets.token_hex(12)}"
    else:
        address = str(Path(tempfile.mkdtemp(prefix="rs-")) / "s")
    place.bind(_for_system(address))
    place.listen(_BACKLOG)
    return place, address


def connect(address: str) -> socket.socket:
    """Return a connection to the agent at an address.

    Raises:
        OSError: Nobody listens there.
    """
    place = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        place.connect(_for_system(address))
    except OSError:
        place.close()
        raise
    return place


def start(listening: socket.socket, secret: str, *, thread: bool) -> "Started":
    """Start the agent behind a socket, and give the socket away.

    Args:
        listening: The socket.
        secret: What ranks prove themselves by.
        thread: Whether it shall live in this process, in a thread.
    """
    if not thread:
        try:
            return Started(process=_start_process(listening, secret))
        except OSError as error:
            _log.warning(
                "the monitor's agent runs in a thread of this process, since no other can be "
                "started (%s)",
                error.strerror or error,
            )
    from rankscope.agent.process import serve_in_thread

    agent, in_thread = serve_in_thread(listening, secret)
    return Started(thread=in_thread, agent=agent)


class Started:
    """An agent that this process has started.

    Args:
        process: Its process, or
        thread: its thread.
        agent: The agent itself, in a thread.
    """

    def __init__(
        self,
        process: "subprocess.Popen[str] | None" = None,
        thread: threading.Thread | None = None,
        agent: "Agent | None" = None,
    ) -> None:
        self._process, self._thread, self.agent = process, thread, agent
        self._pid = os.getpid()

    @property
    def pid(self) -> int | None:
        """Number of its process, None in a thread."""
        return None if self._process is None else self._process.pid

    def wait(self, seconds: float) -> None:
        """Wait for its end, no longer than that."""
        if os.getpid() != self._pid:
            return
        if self._thread is not None:
            self._thread.join(seconds)
        elif self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)


def _start_process(listening: socket.socket, secret: str) -> "subprocess.Popen[str]":
    if not sys.executable:
        raise OSError(0, "this Python does not know where it lies")
    descriptor = listening.fileno()
    with Path(os.environ.get(LOG_FILE) or os.devnull).open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rankscope.agent", str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(descriptor,),
            start_new_session=True,
            env=_environment(),
            text=True,
        )
    listening.close()
    _processes[:] = [each for each in (*_processes, process) if each.poll() is None]
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(secret + "\n")
        process.stdin.close()
    return process


def _environment() -> dict[str, str]:
    """Return an environment in which Python finds what it finds here, and no accelerator."""
    here = str(Path(__file__).resolve().parents[2])
    script, *others = sys.path or [""]
    places = [here, *others, script]
    paths = [str(Path(place).absolute()) for place in places if place]
    environment = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment["CUDA_VISIBLE_DEVICES"] = environment["HIP_VISIBLE_DEVICES"] = ""
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    return environment


def _for_system(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address
