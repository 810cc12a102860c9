"""Worker processes that are started once and then run one job after the other."""

import gc
import logging
import multiprocessing as mp
import signal
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .job import PATIENCE_SECONDS, Trial

_PRELOAD = ["torch._dynamo", f"{__package__}.injectors"]
_SECONDS_TO_END = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a trial.

    Attributes:
        directories: The run directories that it left, in order.
        problem: Why it did not end, or what the monitor could not do; empty when all went well.
        seconds: How long it took.
    """

    directories: tuple[Path, ...]
    problem: str
    seconds: float


class WorkerPool:
    """W ranks over gloo, each a process of its own; made anew after a rank died, raised or hung.

    Args:
        num_workers: W.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop(orderly=error is None)

    def run(self, trial: Trial, timeout: float) -> Outcome:
        """Run a trial on all workers.

        Args:
            trial: What to run.
            timeout: Seconds after which it counts as hung.
        """
        if not self._processes:
            self._start()
        began = time.monotonic()
        for pipe in self._pipes:
            pipe.send(trial)
        answers = self._receive(timeout)
        seconds = time.monotonic() - began
        failures = [answer for answer in answers if isinstance(answer, str)]
        if failures:
            self._stop(orderly=False)
            return Outcome((), min(failures, key=_is_echo), seconds)
        said = [line for _, lines in answers for line in lines]
        return Outcome(tuple(answers[0][0]), said[0] if said else "", seconds)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.num_workers):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_work, args=(rank, self.num_workers, store, theirs), daemon=False
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _stop(self, *, orderly: bool) -> None:
        for pipe in self._pipes:
            if orderly:
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join(_SECONDS_TO_END if orderly else 0)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _receive(self, timeout: float) -> list[Any]:
        """Return each rank's answer, or why there is none; once one fails, do not wait long."""
        deadline = time.monotonic() + timeout
        answers: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    answers.append(pipe.recv())
                else:
                    answers.append(f"rank {rank} did not finish within {timeout:.0f} s")
            except (EOFError, OSError):
                answers.append(f"rank {rank} died")
            if isinstance(answers[-1], str):
                deadline = min(deadline, time.monotonic() + 1.0)
        return answers


def _is_echo(failure: str) -> bool:
    """Return whether a failure may follow from another rank's, which has said why."""
    return any(words in failure for words in ("did not finish", "died", "onnection"))


def _work(rank: int, num_workers: int, store: str, pipe: Connection) -> None:
    """Run trials until there are none left."""
    import torch
    import torch.distributed as dist

    from rankscope.agent import link

    link.SILENT_SECONDS = PATIENCE_SECONDS
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench ends its workers itself
    gc.freeze()  # what all workers share needs no look after each trial, which would copy it
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_workers
    )
    while (trial := _next(pipe)) is not None:
        answer = _attempt(trial, rank)
        try:
            pipe.send(answer)
        except OSError:  # the bench has ended meanwhile
            return
        if isinstance(answer, str):
            return
        gc.collect()
    dist.destroy_process_group()


def _next(pipe: Connection) -> Trial | None:
    try:
        trial: Trial | None = pipe.recv()
    except EOFError:
        return None
    return trial


def _attempt(trial: Trial, rank: int) -> tuple[list[Path], list[str]] | str:
    """Run one trial.

    Returns:
        The run directories, and what the monitor warned of; or why the job failed.
    """
    import torch.distributed as dist

    from .injectors import INJECTORS

    log = _HeldBack(rank)
    logger = logging.getLogger("rankscope")
    logger.addHandler(log)
    propagated, logger.propagate = logger.propagate, False
    try:
        directories = INJECTORS[trial.fault](trial, rank).train()
        dist.barrier()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:300]
        return f"rank {rank}: {type(error).__name__}: {text} ({Path(place.filename).name})"
    finally:
        logger.removeHandler(log)
        logger.propagate = propagated
    return directories, log.lines


class _HeldBack(logging.Handler):
    """Keeps the monitor's warnings, but for the one that a resumed run is recorded elsewhere."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.WARNING)
        self.rank = rank
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "already holds a run" not in record.getMessage():
            self.lines.append(f"rank {self.rank}: {record.getMessage()}")
