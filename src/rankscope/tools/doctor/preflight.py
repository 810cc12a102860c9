"""The preflight: the place of this rank, where all meet, and the order of the stages."""

import os
import sys
import threading
from collections.abc import Callable, Sequence

from rankscope.errors import UsageError
from rankscope.tools.doctor import (
    collectives,
    determinism,
    environment,
    functions,
    loader,
    model,
    speed,
    topology,
)
from rankscope.tools.doctor.examination import Examination
from rankscope.tools.doctor.functions import split_name
from rankscope.tools.doctor.meeting import Meeting, choose_device, find_place, inside, open_stores
from rankscope.tools.doctor.stage import Bench, CheckResult, Options, Stage


def run_preflight(options: Options, report: Callable[[Sequence[CheckResult]], int]) -> int:
    """Check everything, as one of the ranks that a launcher started, or alone.

    Every rank calls it. Standard output of the user's functions goes to standard error on rank 0,
    and nowhere on other ranks. When a rank hangs, this process ends without returning.

    Args:
        options: What to check.
        report: Prints the results and returns the exit code; called on rank 0 alone.

    Returns:
        The exit code of this process; 0 on all ranks but rank 0.

    Raises:
        UsageError: An option or a variable of the launcher cannot work; on rank 0 alone where the
            ranks could meet.
    """
    place = find_place(os.environ)
    try:
        _check(options)
    except UsageError:
        if place.rank == 0:
            raise
        return 0  # rank 0 reports it for all
    quiet = QuietOutput(place.rank)

    def report_restored(results: Sequence[CheckResult]) -> int:
        quiet.restore()
        return report(results)

    try:
        first, second = open_stores(place, options.seconds)
        bench = Bench(place, options, inside(first, "group"), choose_device(place))
        meetings = (
            Meeting(first, place.rank, place.num_ranks),
            Meeting(second, place.rank, place.num_ranks),
        )
        return Examination(stages(options), bench, meetings, report_restored).run()
    finally:
        quiet.restore()


def stages(options: Options) -> list[Stage]:
    """Return the stages in order: the user's own functions last, since they may hang."""
    return [
        topology.STAGE,
        environment.STAGE,
        *functions.stages(options),
        topology.GROUP_STAGE,
        collectives.STAGE,
        collectives.REPEATED_STAGE,
        speed.STAGE,
        model.STAGE if options.model else functions.not_given("model"),
        loader.STAGE if options.loader else functions.not_given("loader"),
        determinism.stage(options),
    ]


def _check(options: Options) -> None:
    for option in ("model", "optimizer", "loader"):
        name = getattr(options, option)
        if name is not None:
            split_name(f"--{option}", name)
    if options.optimizer and not options.model:
        raise UsageError("--optimizer needs --model: the optimizer's function gets the model")
    if options.batches < 1:
        raise UsageError(f"--batches must be at least 1, got {options.batches}")
    if not options.seconds > 0:
        raise UsageError(f"--seconds must be positive, got {options.seconds:g}")


class QuietOutput:
    """Redirects standard output, also of libraries in C, until :meth:`restore`.

    Rank 0's goes to its standard error, so that standard output holds the command's own lines
    alone; the other ranks print nothing.
    """

    def __init__(self, rank: int) -> None:
        self._lock = threading.Lock()
        self._saved: dict[int, int] = {}
        self._stdout = sys.stdout
        _flush()
        if rank == 0:
            sys.stdout = sys.stderr
            self._saved[1] = os.dup(1)
            os.dup2(2, 1)
        else:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for number in (1, 2):
                self._saved[number] = os.dup(number)
                os.dup2(nowhere, number)
            os.close(nowhere)

    def restore(self) -> None:
        """Print as before; further calls do nothing."""
        with self._lock:
            saved = self._saved
            self._saved = {}
        if saved:
            _flush()
            sys.stdout = self._stdout
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
