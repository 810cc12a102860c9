"""Starts a study's workers on this machine, or joins those that an outer ``torchrun`` started."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    record,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rankscope import RankscopeError
from rankscope.lab.study.quiet import quiet

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a study: Ctrl-C, a scheduler, a closed terminal."""


class StudyInterrupted(RankscopeError):  # noqa: N818 - an event, not a failure
    """The study was stopped by a signal; its measurements are on disk."""


class WorkerFailedError(RankscopeError):
    """A worker of the study failed."""


def inside_torchrun() -> bool:
    """Return whether an outer launcher started this process as one of several ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def launch(
    work: Callable[..., None],
    num_workers: int,
    *args: Any,
    error_log: Path,
    preloaded: Sequence[str],
) -> None:
    """Run ``work(*args)`` in ``num_workers`` processes under torch's elastic launcher.

    ``work`` is a function of a module, which finds the launcher's variables in its environment; its
    arguments are pickled. Modules that are ``preloaded`` are loaded once, in the process that all
    workers are forked from. WorkerFailedError when a worker raised or died, with its traceback in
    ``error_log``; KeyboardInterrupt when a signal came, under :func:`stopping_once`.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_workers,
        run_id=f"rankscope-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="forkserver",  # eight imports of torch would take longer than a short training
        signals_to_handle="",  # ours stay: a second Ctrl-C must not cut the workers' end short
    )
    try:
        own_errors = quiet("torch.distributed", "torch.multiprocessing")  # shown in one line here
        with _environment(num_workers), own_errors, _signals_kept_from_children():
            multiprocessing.set_forkserver_preload(list(preloaded))
            elastic_launch(config, _begin)(work, *args)
    except ChildFailedError as error:
        raise WorkerFailedError(_describe(error, error_log)) from error


def _begin(work: Callable[..., None], *args: Any) -> None:
    """Run ``work(*args)`` in a started process; one of our errors ends it without a traceback."""
    gc.freeze()  # nothing then looks through, and so copies, what all workers share
    try:
        _heed_signals()
        record(work)(*args)
    except (RankscopeError, KeyboardInterrupt):
        sys.exit(1)
    finally:
        _ignore_signals()


@contextmanager
def stopping_once() -> Iterator[None]:
    """Let the first stop signal raise KeyboardInterrupt, and ignore further ones.

    The end of a study (workers write their measurements, files are removed) is then not
    interrupted in its turn. Does nothing outside the main thread, where signals never arrive.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, interrupt_once)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def interrupt_once(number: int, frame: FrameType | None) -> Any:
    """Handle a signal: raise KeyboardInterrupt, and ignore all further ones."""
    _ignore_signals()
    raise KeyboardInterrupt


def _ignore(number: int, frame: FrameType | None) -> Any:
    """Do nothing. Python reports a signal that turns to SIG_IGN while it is being delivered."""


def _heed_signals() -> None:
    """Begin to heed signals in a process that :func:`launch` started, also those that waited."""
    for number in STOP_SIGNALS:
        signal.signal(number, interrupt_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _ignore_signals() -> None:
    """Ignore stop signals, in a process that is about to end."""
    for number in STOP_SIGNALS:
        signal.signal(number, _ignore)


@contextmanager
def _signals_kept_from_children() -> Iterator[None]:
    """Start processes that heed no signal before they are ready: imports end in no traceback.

    A child inherits the thread's mask. This process still gets its signals, through a thread of
    its own that does not block them; Python handles them in the main thread in any case.
    """
    over = threading.Event()
    receiver = threading.Thread(target=over.wait, name="rankscope-signals", daemon=True)
    receiver.start()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        over.set()


@contextmanager
def _environment(num_workers: int) -> Iterator[None]:
    """Give each worker its share of the cores, and silence the launcher's own messages."""
    threads = max(1, (os.cpu_count() or 1) // num_workers)
    wanted = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def is_echo(message: str) -> bool:
    """Return whether an error only means that another worker has gone."""
    return "onnection" in message


def _describe(error: ChildFailedError, error_log: Path) -> str:
    """Return one line on the first failure that is no mere echo of another worker's."""
    failures = sorted(
        error.failures.items(), key=lambda item: (is_echo(_text(item[1])), item[1].timestamp)
    )
    rank, failure = failures[0]
    line = f"worker {rank} failed: {_text(failure) or f'exit code {failure.exitcode}'}"
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict):
        return line
    error_log.write_text(message["extraInfo"]["py_callstack"], encoding="utf-8")
    return f"{line} (traceback in {error_log})"


def _text(failure: ProcessFailure) -> str:
    message: Any = failure.message
    while isinstance(message, dict):
        message = message.get("message", "")
    lines = str(message).strip().splitlines()
    return lines[0] if lines else ""
