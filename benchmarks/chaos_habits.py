"""More kinds of accidents: what scripts, shells and machines do around a training without malice.

As in ``chaos_kinds.py``, the promise of each was written before it was tried.
"""

import copy
import gc
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from typing import Any

import torch
from chaos_kinds import HANDED, MONITOR, TRAINING, WHOLE, WRITTEN, kind
from chaos_scene import Scene, read_steps
from chaos_training import NUM_RANKS, STEPS, Loop

# Signals and processes ----------------------------------------------------------------------------


@kind("Ctrl-C reaches the agent alone", MONITOR, WRITTEN)
def interrupt_agent(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.due = scene.written()
    scene.signal_agent(signal.SIGINT)


@kind("the terminal closes on the agent", MONITOR, WRITTEN)
def hang_up_agent(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.due = scene.written()
    scene.signal_agent(signal.SIGHUP)


@kind("the agent is stopped and goes on ten times", MONITOR, WHOLE)
def stop_often(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    for _ in range(10):
        scene.signal_agent(signal.SIGSTOP)
        time.sleep(0.03 * scene.draw.random())
        scene.signal_agent(signal.SIGCONT)
        time.sleep(0.03 * scene.draw.random())


@kind("the machine sleeps for a second", TRAINING, WHOLE, sharded=True)
def sleep_all(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    scene.signal(signal.SIGSTOP)
    if scene.watched:
        scene.signal_agent(signal.SIGSTOP)
    time.sleep(1.0)
    if scene.watched:
        scene.signal_agent(signal.SIGCONT)
    scene.signal(signal.SIGCONT)


@kind("the script ignores the end of its children", MONITOR, WHOLE)
def ignore_children(scene: Scene) -> None:
    scene.start(before=lambda loop: signal.signal(signal.SIGCHLD, signal.SIG_IGN))


@kind("the script reaps all of its children", MONITOR, WHOLE)
def reap_children(scene: Scene) -> None:
    def reap() -> None:
        while True:
            with suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(0.01)

    scene.start(lambda loop: threading.Thread(target=reap, daemon=True).start())


@kind("the script starts programs and forks", MONITOR, WHOLE, sharded=True)
def start_programs(scene: Scene) -> None:
    def act(loop: Loop) -> None:
        for _ in range(3):
            subprocess.run(["true"], check=True)
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)

    scene.moment = min(scene.moment, STEPS - 1)
    scene.start(act)


# Streams, environment and folders -----------------------------------------------------------------


@kind("the script closes its error stream", MONITOR, WHOLE, training={"same_data": True})
def close_stream(scene: Scene) -> None:
    scene.start(lambda loop: sys.stderr.close())


@kind("nobody reads the error stream", MONITOR, WHOLE, training={"same_data": True})
def break_stream(scene: Scene) -> None:
    def act(loop: Loop) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 2)

    scene.start(act)


@kind("the error stream takes only ASCII", MONITOR, WHOLE, training={"same_data": True})
def only_ascii(scene: Scene) -> None:
    def before(loop: Loop) -> None:
        stream: Any = sys.stderr
        stream.reconfigure(encoding="ascii", errors="strict")

    scene.start(before=before, environment={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"})


class _Raises(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("a handler of the script's own")


@kind("a log handler of the script raises", MONITOR, WHOLE, training={"same_data": True})
def raise_in_log(scene: Scene) -> None:
    scene.start(before=lambda loop: logging.getLogger("rankscope").addHandler(_Raises()))


@kind("Python runs with -OO", MONITOR, WHOLE)
def optimise(scene: Scene) -> None:
    scene.start(environment={"PYTHONOPTIMIZE": "2"})


@kind("all warnings are errors", MONITOR, WHOLE)
def warn_by_errors(scene: Scene) -> None:
    def before(loop: Loop) -> None:
        warnings.simplefilter("error")

    scene.start(before=before, environment={"PYTHONWARNINGS": "error"})


@kind("there is no home directory", MONITOR, WHOLE)
def no_home(scene: Scene) -> None:
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), "/nowhere")
    scene.start(environment=nowhere)


@kind("the script clears its environment", MONITOR, WHOLE)
def clear_environment(scene: Scene) -> None:
    scene.start(lambda loop: os.environ.clear())


@kind("the working directory is removed", MONITOR, WHOLE)
def remove_working_directory(scene: Scene) -> None:
    def act(loop: Loop) -> None:
        here = loop.folder / f"here-{loop.rank}"
        here.mkdir()
        os.chdir(here)
        here.rmdir()

    scene.start(act)


@kind("new files are nobody's", MONITOR, WHOLE)
def mask_files(scene: Scene) -> None:
    scene.start(before=lambda loop: os.umask(0o777))


# Threads and the interpreter ----------------------------------------------------------------------


@kind("a thread keeps the interpreter busy", MONITOR, WHOLE, seconds=9.0)
def busy_thread(scene: Scene) -> None:
    def spin() -> None:
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            pass

    scene.start(lambda loop: threading.Thread(target=spin, daemon=True).start())


@kind("threads change turns rarely", MONITOR, WHOLE, seconds=9.0)
def rare_turns(scene: Scene) -> None:
    scene.start(before=lambda loop: sys.setswitchinterval(0.2))


@kind("the garbage collector is off and frozen", MONITOR, WHOLE)
def no_collector(scene: Scene) -> None:
    def before(loop: Loop) -> None:
        gc.freeze()
        gc.disable()

    scene.start(before=before)


@kind("a profiler and a tracer of Python run", MONITOR, WHOLE, seconds=9.0)
def trace(scene: Scene) -> None:
    def nothing(*call: Any) -> None:
        return None

    def act(loop: Loop) -> None:
        sys.setprofile(nothing)
        sys.settrace(nothing)

    scene.start(act)


# What training scripts do -------------------------------------------------------------------------


@kind("the model is copied and pickled", MONITOR, WHOLE, sharded=True)
def copy_model(scene: Scene) -> None:
    def act(loop: Loop) -> None:
        pickle.dumps(loop.module.state_dict())
        if not loop.work.sharded:
            copy.deepcopy(loop.module)
            pickle.dumps(loop.module)

    scene.start(act)


@kind("a checkpoint is saved and loaded", MONITOR, WHOLE, sharded=True)
def load_checkpoint(scene: Scene) -> None:
    def act(loop: Loop) -> None:
        model = {name: value.clone() for name, value in loop.module.state_dict().items()}
        optimizer = copy.deepcopy(loop.optimizer.state_dict())
        loop.module.load_state_dict(model)
        loop.optimizer.load_state_dict(optimizer)

    scene.moment = min(max(scene.moment, 2), STEPS - 1)
    scene.start(act)


@kind("the script evaluates between two steps", MONITOR, WHOLE, sharded=True)
def evaluate(scene: Scene) -> None:
    def act(loop: Loop) -> None:
        loop.model.eval()
        with torch.no_grad():
            for _ in range(3):
                loop.model(loop.batch()[0])
        loop.model.train()

    scene.moment = min(scene.moment, STEPS - 1)
    scene.start(act)


# Readers and sinks --------------------------------------------------------------------------------


@kind("a reader opens the run all the time", MONITOR, WHOLE, sharded=True)
def read_often(scene: Scene) -> None:
    scene.start()
    for _ in range(8):
        scene.wait_until(lambda: False, 0.3)
        read_steps(scene.run_dir)


_LISTENING: list[socket.socket] = []
"""Sockets that accept no connection until the process of their scene ends."""


@kind("a webhook refuses connections", MONITOR, WHOLE, training={"same_data": True}, seconds=9.0)
def refuse(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    scene.start(watched={"sinks": [f"webhook:http://127.0.0.1:{port}/"]})


@kind("a webhook never answers", MONITOR, WHOLE, training={"same_data": True}, seconds=9.0)
def never_answer(scene: Scene) -> None:
    place = socket.create_server(("127.0.0.1", 0))
    _LISTENING.append(place)
    scene.start(watched={"sinks": [f"webhook:http://127.0.0.1:{place.getsockname()[1]}/"]})


@kind("another program writes into the run directory", MONITOR, WHOLE)
def write_beside(scene: Scene) -> None:
    scene.start()
    scene.wait_for_moment()
    with suppress(OSError):
        (scene.run_dir / "notes.json").write_text(json.dumps({"by": "someone else"}))
        (scene.run_dir / "core").write_bytes(b"\0" * 65536)
        (scene.run_dir / "link").symlink_to(scene.run_dir)


@kind("a rank is slow at its end", TRAINING, HANDED)
def end_late(scene: Scene) -> None:
    late = scene.draw.randrange(NUM_RANKS)
    scene.moment = STEPS
    scene.start(lambda loop: time.sleep(2.0 * (loop.rank == late)))
