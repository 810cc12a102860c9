"""Where an accident happens: a process with mounts of its own, which sees what ranks leave behind.

Whatever a rank starts, and leaves, becomes a child of the scene's process. Its disks, its
``/dev/shm`` and its directory for temporary files are nobody else's, where the system lets it.
"""

import contextlib
import ctypes
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from chaos_training import NUM_RANKS, PATIENCE, STEPS, Board, Loop, Work, be_rank

from rankscope import Run
from rankscope.bus.evidence import Table

HANGS_SECONDS = 30.0 * PATIENCE
"""A training that takes so long hangs."""

LEFT_SECONDS = 10.0 * PATIENCE
"""How long what a training has started may outlive it."""

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 1, 32, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass
class Outcome:
    """How ranks have ended, and what they have left.

    Attributes:
        exits: Exit codes, negative for signals; None where a rank had to be killed.
        bits: Digest of what each rank has trained; empty where it did not come to the end.
        done: Steps that each rank has ended.
        seconds: From the first step to the end of the last rank, without the wait for the agent.
        said: What all ranks have written to both streams.
        left: What was still there some seconds later.
        steps: Numbers of the recorded steps; None without a record that can be read.
        status: What the record says of its end, or why it cannot be read.
    """

    exits: list[int | None]
    bits: list[str]
    done: list[int]
    seconds: float
    said: str
    left: list[str] = field(default_factory=list)
    steps: list[int] | None = None
    status: str = ""


class Scene:
    """Two ranks, their agent, and what is done to them.

    Args:
        folder: An empty directory.
        draw: Draws moments and all else that is left to chance.
        watched: Whether the ranks are watched.
        training: What :class:`chaos_training.Work` takes in each of its trainings.
        library: The compiled ``chaos_calls.c``; None without a compiler.
        counts: How many calls of each kind an agent makes that nothing happens to.

    Attributes:
        run_dir: Where the last run is.
        moment: The step at whose beginning the accident happens; STEPS is the end.
        due: How many steps have to be in the record; None: all that were handed over.
        lost: What an accident itself has found missing.
        hit: Whether there was still something that it could happen to.
    """

    def __init__(
        self,
        folder: Path,
        draw: random.Random,
        *,
        watched: bool,
        training: dict[str, Any] | None = None,
        library: Path | None = None,
        counts: dict[str, int] | None = None,
    ) -> None:
        self.folder, self.draw, self.watched = folder, draw, watched
        self.training = training or {}
        self.library, self.counts = library, counts or {}
        self.moment = draw.randint(1, STEPS)
        self.settles = draw.random() < 0.7
        self.run_dir = folder / "run"
        self.due: int | None = None
        self.lost: list[str] = []
        self.hit = True
        self._ranks: dict[int, int] = {}
        self._exits: dict[int, int | None] = {}
        self._killed: set[int] = set()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._ended = 0.0
        self._fails = False
        folder.mkdir(exist_ok=True)
        self.board = Board(folder / "board")

    # Beginning -----------------------------------------------------------------------------------

    def start(
        self, act: Callable[[Loop], None] = lambda loop: None, *, watched: Any = None, **work: Any
    ) -> None:
        """Start the ranks.

        Args:
            act: Called on each rank with its loop at the beginning of the step ``moment``.
            watched: Options of ``rankscope.watch``, or a function of the rank that returns them.
            work: What else :class:`chaos_training.Work` takes.
        """

        def act_in_time(loop: Loop) -> None:
            if loop.step == self.moment:
                act(loop)

        (self.folder / "store").unlink(missing_ok=True)
        work = {**self.training, **work}
        for rank in range(NUM_RANKS):
            options = watched(rank) if callable(watched) else watched or {}
            given = Work(
                watched=options if self.watched else None,
                run_dir=self.run_dir,
                act=act_in_time,
                settles=self.settles,
            )
            be = partial(be_rank, rank, self.folder, replace(given, **work))
            self._ranks[rank] = forked(be)

    def launch(self, *words: str) -> None:
        """Start the ranks by ``torchrun``, with these words for it and for the training."""
        with (self.folder / "rank-0.log").open("ab") as log:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )

    # What can be done ----------------------------------------------------------------------------

    def wait_for_moment(self) -> None:
        """Wait until all ranks have come to the step, and for a drawn part of one more."""
        self.wait_until(lambda: min(self.board.done) >= min(self.moment, STEPS - 1))
        time.sleep(0.02 * self.draw.random())
        self.hit = self._alive()

    def wait_until(self, true: Callable[[], Any], seconds: float = 20.0 * PATIENCE) -> None:
        """Wait until something is true, or the ranks have ended, or for so long."""
        until = time.monotonic() + seconds
        while not true() and self._alive() and time.monotonic() < until:
            time.sleep(0.002)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to ranks that have not ended; to all of them if none is named."""
        self.hit &= self._alive()
        for rank in ranks or range(NUM_RANKS):
            if rank not in self._exits:
                os.kill(self._ranks[rank], number)
                self._killed |= {self._ranks[rank]} if number == signal.SIGKILL else set()

    @property
    def agent(self) -> int:
        """The agent's process, once it is there; 0 without one, as in a plain training."""
        if self.watched:
            self.wait_until(_agents, 5.0 * PATIENCE)
        return next(iter(_agents()), 0)

    def signal_agent(self, number: int) -> None:
        """Send a signal to the agent, if there is one."""
        agent = self.agent
        self.hit &= bool(agent) or not self.watched
        with contextlib.suppress(ProcessLookupError):
            if agent:
                os.kill(agent, number)

    def freeze_agent(self) -> None:
        """Stop the agent, and let what it has written so far be due."""
        self.signal_agent(signal.SIGSTOP)
        self.due = self.written() if self.watched else 0

    def limit_agent(self, what: int, limit: int) -> None:
        """Set one of the agent's limits."""
        agent = self.agent
        self.hit &= bool(agent)
        with contextlib.suppress(ProcessLookupError):
            if agent:
                hard = resource.prlimit(agent, what)[1]
                resource.prlimit(agent, what, (limit, hard))

    def written(self) -> int:
        """Return how many steps are in the record now."""
        steps, _ = read_steps(self.run_dir)
        return len(steps or ())

    def failing(self, call: str, error: int, *, nth: int, times: int = 1) -> dict[str, str]:
        """Return the environment in which calls of the agent fail, see ``chaos_calls.c``."""
        self._fails = True
        return {
            "LD_PRELOAD": str(self.library),
            "CHAOS_CALL": call,
            "CHAOS_NTH": str(nth),
            "CHAOS_TIMES": str(times),
            "CHAOS_ERROR": str(error),
            "CHAOS_PLACE": str(self.folder),
            "CHAOS_MARK": str(self.folder / "failed"),
        }

    def draw_call(self, kind: str) -> int:
        """Draw one of the calls of a kind that an agent makes."""
        return self.draw.randint(1, max(self.counts.get(kind, 0), 1))

    def disk(self, name: str, kilobytes: int, options: str = "") -> Path:
        """Return a directory of the scene on a small disk of its own."""
        path = self.folder / name
        path.mkdir(exist_ok=True)
        settings = ",".join(filter(None, (f"size={kilobytes}k", options)))
        _call("mount", b"tmpfs", bytes(path), b"tmpfs", 0, settings.encode())
        return path

    def make_read_only(self, disk: Path, *, on: bool = True) -> None:
        """Let nothing be written to a disk, or let it again."""
        flags = _MS_REMOUNT | (_MS_RDONLY if on else 0)
        until = time.monotonic() + 5.0
        while True:
            try:
                return _call("mount", b"tmpfs", bytes(disk), b"tmpfs", flags, b"")
            except OSError as error:  # a file is open for writing
                if error.errno != errno.EBUSY or time.monotonic() > until:
                    raise
                time.sleep(0.0005)

    # The end -------------------------------------------------------------------------------------

    def wait(self) -> list[int | None]:
        """Wait for the ranks; return their exit codes."""
        until = time.monotonic() + HANGS_SECONDS
        while self._alive() and time.monotonic() < until:
            time.sleep(0.005)
        for rank, pid in self._ranks.items():
            if rank not in self._exits:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._exits[rank] = None
        killed = [rank for rank, pid in self._ranks.items() if pid in self._killed]
        self.hit &= all(self._exits[rank] in (None, -signal.SIGKILL) for rank in killed)
        exits: list[int | None] = [self._exits.pop(rank) for rank in sorted(self._ranks)]
        if self._launcher is not None:
            exits = [self._launcher.poll()]
        self._ranks = {}
        return exits

    def finish(self) -> Outcome:
        """Wait for the ranks, and for all that they have started; return what is left."""
        exits = self.wait()
        self.hit &= not self._fails or (self.folder / "failed").exists()
        began, settled = self.board.began, self.board.settled
        outcome = Outcome(
            exits=exits,
            bits=[self._bits(rank) for rank in range(NUM_RANKS)],
            done=self.board.done,
            seconds=self._ended - began - settled if began else 0.0,
            said="".join(path.read_text() for path in sorted(self.folder.glob("rank-*.log"))),
            left=self._wait_for_rest(),
        )
        if self.watched:
            outcome.steps, outcome.status = read_steps(self.run_dir)
        return outcome

    def _bits(self, rank: int) -> str:
        path = self.folder / f"bits-{rank}"
        return path.read_text() if path.exists() else ""

    def _alive(self) -> bool:
        for rank, pid in self._ranks.items():
            if rank not in self._exits:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._exits[rank] = os.waitstatus_to_exitcode(status)
        running = len(self._exits) < len(self._ranks)
        running |= self._launcher is not None and self._launcher.poll() is None
        if running:
            self._ended = time.monotonic()
        return running

    def _wait_for_rest(self) -> list[str]:
        """Wait for what the ranks have left behind; return what does not go away."""
        until = time.monotonic() + LEFT_SECONDS
        while True:
            _reap()
            left = [*self._processes(), *self._files()]
            if not left or time.monotonic() > until:
                break
            time.sleep(0.02)
        kill_descendants()
        return left

    def _processes(self) -> Iterator[str]:
        for pid in descendants():
            yield f"process {_command(pid).decode(errors='replace')}"

    def _files(self) -> Iterator[str]:
        for folder in (Path("/dev/shm"), self.folder / "tmp"):
            if folder == self.folder / "tmp" or (self.folder / "mounts").exists():
                with contextlib.suppress(OSError):
                    for path in folder.iterdir():
                        if "torch" not in path.name:  # torchrun's logs, for instance
                            yield str(path)
        if self.run_dir.is_dir():
            yield from (str(path) for path in self.run_dir.rglob(".*.tmp"))


def read_steps(run_dir: Path) -> tuple[list[int] | None, str]:
    """Return the recorded steps of a run and its status; None and the reason if it has none."""
    try:
        run = Run.open(run_dir)
        return run.columns(Table.STEPS, "step")["step"].tolist(), run.status
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


# Processes ---------------------------------------------------------------------------------------


def forked(work: Callable[[], int]) -> int:
    """Return the number of a new process that does something, and ends with this one."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            code = work()
    except KeyboardInterrupt:  # a second one, while the first is told
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code & 255)


def take_children() -> None:
    """Become the parent of what the children of this process leave behind."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def take_mounts(folder: Path) -> bool:
    """Give this process mounts of its own, below a directory; return whether the system lets it."""
    users, groups = os.getuid(), os.getgid()
    try:
        try:
            _call("unshare", _CLONE_NEWNS)
        except PermissionError:
            _call("unshare", _CLONE_NEWNS | _CLONE_NEWUSER)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {users} 1")
            Path("/proc/self/gid_map").write_text(f"0 {groups} 1")
        _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        for place in (Path("/dev/shm"), folder):
            _call("mount", b"tmpfs", bytes(place), b"tmpfs", 0, b"size=256m")
    except OSError:
        return False
    return True


def _call(name: str, *given: Any) -> None:
    """Call a function of the system.

    Raises:
        OSError: It has failed.
    """
    if getattr(_libc, name)(*given):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def descendants(pid: int = 0) -> list[int]:
    """Return all processes below one, by default this one."""
    found = []
    for children in Path(f"/proc/{pid or os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


def kill_descendants() -> None:
    """Kill all processes below this one, and forget them."""
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _reap()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _agents() -> Sequence[int]:
    return [pid for pid in descendants() if b"rankscope.agent" in _command(pid).split(b"\0")]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
