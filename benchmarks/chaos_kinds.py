"""The kinds of accidents, each with its promise: what was expected before any was tried.

An accident that hits only the monitor leaves the training's bits, its exit code, and its time but
for a bound. One that hits the training ends it as it would have ended unwatched.
"""

import errno
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import torch
import torch.distributed as dist
from chaos_scene import Scene, read_steps
from chaos_surroundings import SURROUNDINGS
from chaos_training import NUM_RANKS, STEPS, Loop


class Hits(StrEnum):
    """What an accident hits."""

    MONITOR = "monitor"
    TRAINING = "training"


class Record(StrEnum):
    """What has to be in the record; ``docs/chaos.md`` explains the words."""

    WHOLE = "all steps"
    HANDED = "handed over"
    WRITTEN = "written"
    SAID = "possible"


@dataclass(frozen=True)
class Kind:
    """A kind of accident and its promise.

    Attributes:
        name: What the table calls it.
        play: Starts ranks, and lets it happen.
        hits: What it hits.
        record: What has to be in the record.
        seconds: How much longer a training may take for it.
        share: Of the number of trials that kinds get.
        needs: What a machine may not have: ``mounts`` of one's own, or a compiled ``library``.
        training: What :class:`chaos_training.Work` takes.
        raises: Whether a traceback on the error stream is meant.
        exits: Exit codes of which each rank may have any, where it depends on who is first; none:
            those of the same training unwatched.
        quick: Whether the quick half has it.
    """

    name: str
    play: Callable[[Scene], None]
    hits: Hits
    record: Record
    seconds: float = 5.0
    share: float = 1.0
    needs: tuple[str, ...] = ()
    training: dict[str, Any] = field(default_factory=dict)
    raises: bool = False
    exits: tuple[int, ...] = ()
    quick: bool = False


KINDS: list[Kind] = []
"""All kinds, in the order of the table."""

_Play = Callable[[Scene], None]


def kind(
    name: str, hits: Hits, record: Record, *, sharded: bool = False, **more: Any
) -> Callable[[_Play], _Play]:
    """Make a function a kind of accident; one more under FSDP2 if ``sharded``."""

    def register(play: _Play) -> _Play:
        made = Kind(name, play, hits, record, **more)
        KINDS.append(made)
        if sharded:
            training = {**made.training, "sharded": True}
            KINDS.append(replace(made, name=f"{name}, FSDP2", training=training, quick=False))
        return play

    return register


MONITOR, TRAINING = Hits.MONITOR, Hits.TRAINING
WHOLE, HANDED, WRITTEN, SAID = Record.WHOLE, Record.HANDED, Record.WRITTEN, Record.SAID

# Processes are killed, stopped and interrupted --------------------------------------------------


@kind("kill -9 of a rank", TRAINING, HANDED, sharded=True, exits=(-9, 1, -6))
def kill_rank(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.signal(signal.SIGKILL, scene.draw.randrange(NUM_RANKS))


@kind("kill -9 of all ranks", TRAINING, HANDED, quick=True)
def kill_ranks(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.signal(signal.SIGKILL)


@kind("kill -9 of the agent", MONITOR, WRITTEN, sharded=True, quick=True)
def kill_agent(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.freeze_agent()
    scene.signal_agent(signal.SIGKILL)


@kind("kill -9 of the agent and of all ranks", TRAINING, WRITTEN)
def kill_all(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.signal(signal.SIGSTOP)
    scene.freeze_agent()
    scene.signal_agent(signal.SIGKILL)
    scene.signal(signal.SIGKILL)


@kind("kill -9 of a rank inside of watch()", TRAINING, SAID, share=0.4, seconds=25.0, exits=(-9, 1))
def kill_rank_in_watch(scene: Scene) -> None:
    """The other one waits for it as long as the training's process group lets it."""
    victim, seconds = scene.draw.randrange(NUM_RANKS), 0.05 * scene.draw.random()

    def before(loop: Loop) -> None:
        if loop.rank == victim:
            Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    scene.settles = False  # watch() itself waits, nearly as long as a training may take
    scene.start(before=before)


@kind("SIGTERM of the agent", MONITOR, WRITTEN)
def terminate_agent(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.due = scene.written()
    scene.signal_agent(signal.SIGTERM)


@kind("the agent is stopped for half a second", MONITOR, WHOLE)
def pause_agent(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.signal_agent(signal.SIGSTOP)
    time.sleep(0.5)
    scene.signal_agent(signal.SIGCONT)


@kind("the agent is stopped for ever", MONITOR, WHOLE, quick=True)
def stop_agent(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.signal_agent(signal.SIGSTOP)


@kind("all ranks are killed while the agent is stopped", TRAINING, HANDED)
def kill_ranks_of_stopped(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.signal_agent(signal.SIGSTOP)
    time.sleep(0.2 * scene.draw.random())
    scene.signal(signal.SIGKILL)
    time.sleep(0.2)
    scene.signal_agent(signal.SIGCONT)


@kind("a rank is stopped for half a second", TRAINING, WHOLE)
def pause_rank(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    rank = scene.draw.randrange(NUM_RANKS)
    scene.signal(signal.SIGSTOP, rank)
    time.sleep(0.5)
    scene.signal(signal.SIGCONT, rank)


@kind("Ctrl-C", TRAINING, HANDED, sharded=True, exits=(130, 1, 0), raises=True)
def interrupt(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.signal(signal.SIGINT)


@kind("Ctrl-C twice", TRAINING, HANDED, exits=(130, 1, 0), raises=True)
def interrupt_twice(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.signal(signal.SIGINT)
    time.sleep(0.3 * scene.draw.random())
    scene.signal(signal.SIGINT)


@kind("SIGTERM of all ranks", TRAINING, HANDED)
def terminate_ranks(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.signal(signal.SIGTERM)


@kind("a signal every millisecond", MONITOR, WHOLE)
def flood_of_signals(scene: Scene) -> None:
    def act(loop: Loop) -> None:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)

    scene.start(act)


# The script ends in ways of its own ---------------------------------------------------------------


def _fail(*_: Any) -> None:
    raise RuntimeError("the script's own")


@kind("an exception in a step", TRAINING, HANDED, raises=True, exits=(1, -6), quick=True)
def raise_in_step(scene: Scene) -> None:
    victims = scene.draw.choice([(0,), (1,), (0, 1)])
    scene.start(lambda loop: _fail() if loop.rank in victims else None)


@kind("an exception in backward", TRAINING, HANDED, sharded=True, raises=True, exits=(1, -6))
def raise_in_backward(scene: Scene) -> None:
    victim = scene.draw.randrange(NUM_RANKS)

    def act(loop: Loop) -> None:
        if loop.rank == victim:
            weight: Any = next(loop.module.parameters())
            weight.register_hook(_fail)

    scene.start(act)


@kind("an exception in a forward hook", TRAINING, HANDED, raises=True, exits=(1, -6))
def raise_in_hook(scene: Scene) -> None:
    victim = scene.draw.randrange(NUM_RANKS)

    def act(loop: Loop) -> None:
        if loop.rank == victim:
            loop.module[scene.draw.randrange(3)].register_forward_hook(_fail)

    scene.start(act)


@kind("an exception in a step that is caught", MONITOR, WHOLE)
def raise_and_catch(scene: Scene) -> None:
    """The forward pass of all ranks fails half-way, and the step is tried again."""

    def act(loop: Loop) -> None:
        if loop.step < STEPS:
            handle = loop.module[1].register_forward_hook(_fail)
            with suppress(RuntimeError):
                loop.model(loop.batch()[0])
            handle.remove()

    scene.start(act)


@kind("sys.exit in the middle", TRAINING, HANDED)
def leave(scene: Scene) -> None:
    scene.start(lambda loop: sys.exit(7))


@kind("os._exit in the middle", TRAINING, HANDED, exits=(9, 1))
def leave_at_once(scene: Scene) -> None:
    scene.start(lambda loop: os._exit(9))


@kind("the scope is never closed", MONITOR, WHOLE)
def never_close(scene: Scene) -> None:
    scene.start(closes=False)


@kind("close() in another thread, in the middle", MONITOR, HANDED)
def close_elsewhere(scene: Scene) -> None:
    def act(loop: Loop) -> None:
        if loop.scope is not None:
            loop.thread = Thread(target=loop.scope.close)  # type: ignore[attr-defined]
            loop.thread.start()  # type: ignore[attr-defined]

    scene.due = max(scene.moment - 1, 0)
    scene.start(act)


@kind("the process group is destroyed before close()", TRAINING, WHOLE)
def destroy_group(scene: Scene) -> None:
    scene.moment = STEPS
    scene.start(lambda loop: dist.destroy_process_group())


@kind("a forked child ends by sys.exit", MONITOR, WHOLE)
def fork_and_leave(scene: Scene) -> None:
    def act(loop: Loop) -> None:
        child = os.fork()
        if not child:
            sys.exit(0)
        os.waitpid(child, 0)

    scene.start(act)


@kind("a forked child trains and closes", MONITOR, WHOLE)
def fork_and_train(scene: Scene) -> None:
    def act(loop: Loop) -> None:
        child = os.fork()
        if not child:
            loop.module(torch.ones(4, 16)).sum().backward()
            if loop.scope is not None:
                loop.scope.close()
            os._exit(0)
        os.waitpid(child, 0)

    scene.start(act)


@kind("on_finding raises", MONITOR, WHOLE, training={"same_data": True}, raises=True)
def raise_on_finding(scene: Scene) -> None:
    scene.start(watched={"on_finding": _fail})


@kind("on_finding takes its time", MONITOR, WHOLE, training={"same_data": True}, seconds=9.0)
def block_on_finding(scene: Scene) -> None:
    scene.start(watched={"on_finding": lambda finding: time.sleep(0.3)})


@kind("the forward call stands inside of something", TRAINING, WHOLE, sharded=True, share=2.0,
      seconds=20.0)  # fmt: skip
def surround(scene: Scene) -> None:
    """Canaries come due in it as soon as they can, and reference steps; they may be declined."""
    name = scene.draw.choice(list(SURROUNDINGS))
    every, verified = scene.draw.randint(1, 9), scene.draw.sample(range(STEPS), 3)

    def calls_in_time(loop: Loop, inputs: Any) -> Any:
        """Let the agent keep up: a canary that is announced too late would be none."""
        if loop.scope is not None:
            until = time.monotonic() + 5.0
            while loop.scope.latest is None or loop.scope.latest.step < loop.step - 2:
                if time.monotonic() > until or loop.step < 2:
                    break
                time.sleep(0.005)
        if loop.step == 0:
            print(f"inside of {name}", flush=True)
        return SURROUNDINGS[name](loop, inputs)

    options: dict[str, Any] = {"verify_at": verified, "overhead_budget": None}
    if not scene.training.get("sharded"):  # no worker holds a whole model
        options["canary_every"] = every
    scene.start(watched=options, calls=calls_in_time)


# Files and disks ----------------------------------------------------------------------------------


@kind("the run directory is removed", MONITOR, SAID)
def remove_run(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    shutil.rmtree(scene.run_dir, ignore_errors=True)


@kind("the run directory is moved", MONITOR, SAID)
def move_run(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.run_dir = scene.run_dir.rename(scene.folder / "moved")


@contextmanager
def _on_small_disk(scene: Scene, kilobytes: int) -> Iterator[Path]:
    """Start a training whose run is on a small disk, and come to the moment."""
    disk = scene.disk("disk", kilobytes)
    scene.run_dir = disk / "run"
    scene.start()
    scene.wait_for_moment()
    yield disk


def _fill(disk: Path) -> Path:
    filling = disk / "filling"
    with suppress(OSError), filling.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filling


@kind("the disk is full", MONITOR, SAID, needs=("mounts",))
def fill_disk(scene: Scene) -> None:
    with _on_small_disk(scene, 2048) as disk:
        scene.due = scene.written()
        _fill(disk)


@kind("the disk is full for a while", MONITOR, SAID, needs=("mounts",))
def fill_disk_for_a_while(scene: Scene) -> None:
    with _on_small_disk(scene, 2048) as disk:
        scene.due = scene.written()
        filling = _fill(disk)
        time.sleep(0.3 * scene.draw.random())
        filling.unlink()


@kind("the disk becomes read-only", MONITOR, SAID, needs=("mounts",))
def protect_disk(scene: Scene) -> None:
    with _on_small_disk(scene, 2048) as disk:
        scene.due = scene.written()
        scene.make_read_only(disk)


@kind("the agent may write only short files", MONITOR, SAID)
def limit_files(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.due = scene.written()
    scene.limit_agent(resource.RLIMIT_FSIZE, scene.draw.randint(0, 20_000))


@kind("the agent can open no file", MONITOR, SAID)
def limit_descriptors(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.due = scene.written()
    scene.limit_agent(resource.RLIMIT_NOFILE, scene.draw.choice([0, 3, 8]))


@kind("one call on a file of the run fails", MONITOR, SAID, needs=("library",), share=6)
def fail_on_file(scene: Scene) -> None:
    error = scene.draw.choice([errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EINTR, errno.ESTALE])
    scene.start(environment=scene.failing("file", error, nth=scene.draw_call("file")))


@kind("all calls on files of the run fail from then on", MONITOR, SAID, needs=("library",), share=2)
def fail_on_files(scene: Scene) -> None:
    error = scene.draw.choice([errno.EIO, errno.ENOSPC, errno.EROFS])
    nth = scene.draw_call("file")
    scene.start(environment=scene.failing("file", error, nth=nth, times=10**9))


@kind("no place for temporary files and caches", MONITOR, WHOLE, needs=("mounts",))
def protect_temporary(scene: Scene) -> None:
    disk = scene.disk("nowhere", 64, "ro")
    places = dict.fromkeys(("TMPDIR", "XDG_CACHE_HOME", "HOME"), str(disk))
    scene.start(environment=places)


# Sockets, memory, time ----------------------------------------------------------------------------


@kind("the script closes the monitor's descriptors", MONITOR, HANDED)
def close_descriptors(scene: Scene) -> None:
    """And opens others, which get the same numbers."""
    before: set[int] = set()
    victims = scene.draw.choice([(0,), (1,), (0, 1)])

    def act(loop: Loop) -> None:
        if loop.rank in victims:
            for number in _descriptors() - before:
                with suppress(OSError):  # a thread of the monitor was faster
                    os.close(number)
                    os.open(os.devnull, os.O_RDWR)

    scene.due = max(scene.moment - 1, 0)
    scene.start(act, before=lambda loop: before.update(_descriptors()))


def _descriptors() -> set[int]:
    return {number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)}  # noqa: PTH208


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@kind("a rank has no descriptor left", MONITOR, WHOLE)
def use_up_descriptors(scene: Scene) -> None:
    held = []

    def act(loop: Loop) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))

    scene.moment = min(scene.moment, STEPS - 1)
    scene.start(act)


@kind("strangers send noise to the agent's socket", MONITOR, WHOLE)
def send_noise(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    for _ in range(20):
        for place in _sockets_of(scene):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with suppress(OSError), stranger:
                stranger.settimeout(0.2)
                stranger.connect(place)
                stranger.sendall(scene.draw.randbytes(scene.draw.randint(1, 4000)))


@kind("strangers take all of the agent's descriptors", MONITOR, SAID)
def take_descriptors(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.due = scene.written()
    scene.limit_agent(resource.RLIMIT_NOFILE, 48)
    strangers = []
    for place in _sockets_of(scene):
        for _ in range(60):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stranger.setblocking(False)
            strangers.append(stranger)
            with suppress(OSError):
                stranger.connect(place)
    time.sleep(0.3)
    for stranger in strangers:
        stranger.close()


def _sockets_of(scene: Scene) -> list[bytes]:
    """Return the address at which the scene's agent listens."""
    held = set()
    for link in Path(f"/proc/{scene.agent}/fd").iterdir() if scene.agent else ():
        with suppress(OSError):
            held.add(str(link.readlink()))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    places = {
        words[-1]
        for words in lines
        if words[-1].startswith("@rankscope") and f"socket:[{words[6]}]" in held
    }
    return [b"\0" + place[1:].encode() for place in places]


@kind("one call on the agent's sockets fails", MONITOR, SAID, needs=("library",), share=2)
def fail_on_socket(scene: Scene) -> None:
    error = scene.draw.choice([errno.ENOMEM, errno.ENOBUFS, errno.EMFILE, errno.EINTR])
    scene.start(environment=scene.failing("socket", error, nth=scene.draw_call("socket")))


@kind("the agent's memory is used up once", MONITOR, SAID, needs=("library",), share=2)
def fail_on_memory(scene: Scene) -> None:
    nth, times = scene.draw_call("memory"), scene.draw.choice([1, 1, 20])
    scene.start(environment=scene.failing("memory", errno.ENOMEM, nth=nth, times=times))


@kind("the agent's memory is used up for ever", MONITOR, SAID)
def limit_memory(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.due = scene.written()
    scene.limit_agent(resource.RLIMIT_AS, 1 << 20)


@kind("the agent can start no thread", MONITOR, SAID, needs=("library",))
def fail_on_threads(scene: Scene) -> None:
    nth, times = scene.draw_call("thread"), scene.draw.choice([1, 10**9])
    scene.start(environment=scene.failing("thread", errno.EAGAIN, nth=nth, times=times))


@kind("the clock leaps by a day", MONITOR, WHOLE, needs=("library",))
def leap(scene: Scene) -> None:
    leap = scene.draw.choice([-86400, 86400])
    nth = scene.draw_call("clock")
    scene.start(environment=scene.failing("clock", leap, nth=nth, times=10**9))


@kind("the agent gets next to no processor time", MONITOR, WHOLE, seconds=15.0)
def starve_agent(scene: Scene) -> None:
    scene.start()
    agent = scene.agent
    scene.hit &= bool(agent)
    core = max(os.sched_getaffinity(0))
    with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
        for thread in os.listdir(f"/proc/{agent}/task"):  # noqa: PTH208
            os.sched_setaffinity(int(thread), {core})
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(busy.pid, {core})
    scene.wait_until(lambda: False, 6.0)
    busy.kill()
    busy.wait()


# The agent cannot start, and a job starts again ---------------------------------------------------


@kind("the agent's program cannot be run", MONITOR, WHOLE)
def no_program(scene: Scene) -> None:
    scene.start(before=lambda loop: setattr(sys, "executable", "/nowhere/python"))


@kind("the agent ends before it has begun", MONITOR, SAID)
def ends_at_once(scene: Scene) -> None:
    program = shutil.which(scene.draw.choice(["true", "false"]))
    scene.settles = False
    scene.start(before=lambda loop: setattr(sys, "executable", program))


@kind("a sink's command hangs", MONITOR, WHOLE, training={"same_data": True}, seconds=9.0)
def hang_in_command(scene: Scene) -> None:
    scene.start(watched={"sinks": ["command:sleep 1000"]})


class _Hanging:
    """A sink of the user's that never comes back."""

    takes_steps = True

    def open(self, run: Any) -> None:
        pass

    def step(self, step: Any) -> None:
        time.sleep(1000)

    def finding(self, finding: Any) -> None:
        time.sleep(1000)

    def close(self) -> None:
        time.sleep(1000)


@kind("a sink in the training's process hangs", MONITOR, WHOLE, seconds=9.0)
def hang_in_sink(scene: Scene) -> None:
    scene.start(watched=lambda rank: {"sinks": [_Hanging()]})


@kind("all ranks are killed, and the job starts again", TRAINING, WHOLE)
def start_again(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.signal(signal.SIGKILL)
    scene.wait()
    done = scene.board.done
    scene.moment = STEPS + 1
    scene.start()
    scene.wait_until(lambda: False, 60.0)
    if scene.watched:
        _check_first(scene, done)


@kind("torchrun starts a job again whose rank has died", TRAINING, WHOLE, share=0.5, seconds=15.0)
def start_again_by_torchrun(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    words = ["--nproc-per-node", str(NUM_RANKS), "--max-restarts", "1", "--master-port", str(port)]
    script = str(Path(__file__).with_name("chaos_training.py"))
    how, moment = scene.draw.choice(["exit", "kill", "error"]), min(scene.moment, STEPS - 1)
    asked = ["--dies-at", str(moment), "--how", how, *(["--watched"] if scene.watched else [])]
    scene.launch(*words, script, str(scene.folder), *asked)
    scene.wait_until(lambda: False, 120.0)  # six processes import torch
    if scene.watched:
        _check_first(scene, [moment] * NUM_RANKS)


def _check_first(scene: Scene, done: list[int]) -> None:
    """Hold the first of two attempts against what was handed over; the second is judged later."""
    first, status = read_steps(scene.run_dir)
    if first is None or first != list(range(len(first))) or len(first) < min(done) - 1:
        scene.lost.append(f"of the first attempt, {first and len(first)} of {done}: {status}")
    scene.run_dir = scene.run_dir.with_name("run-2")


def moments(kinds: list[Kind], trials: int, seed: int) -> list[tuple[Kind, int]]:
    """Return trials of each kind, with a seed for each, in drawn order: load changes over time."""
    drawn = [
        (each, random.Random(f"{seed} {each.name} {number}").randrange(2**32))
        for each in kinds
        for number in range(max(1, round(each.share * trials)))
    ]
    random.Random(seed).shuffle(drawn)
    return drawn
