"""Puts the preflight together: who is here, where all meet, and what is checked in which order."""

import os
from collections.abc import Callable, Sequence

from rankscope.doctor import (
    collectives,
    determinism,
    environment,
    functions,
    group,
    loader,
    model,
    repeatability,
    speed,
    topology,
)
from rankscope.doctor.examination import Examination
from rankscope.doctor.launcher import choose_device, find_place, inside, open_stores
from rankscope.doctor.meeting import Meeting
from rankscope.doctor.quiet import QuietOutput
from rankscope.doctor.result import CheckResult
from rankscope.doctor.stage import Bench, Options, Stage
from rankscope.doctor.user_code import split_name
from rankscope.errors import UsageError


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
        return 0  # rank 0 says it for all
    quiet = QuietOutput(place.rank)

    def tell(results: Sequence[CheckResult]) -> int:
        quiet.restore()
        return report(results)

    try:
        first, second = open_stores(place, options.seconds)
        bench = Bench(place, options, inside(first, "group"), choose_device(place))
        meetings = (
            Meeting(first, place.rank, place.num_ranks),
            Meeting(second, place.rank, place.num_ranks),
        )
        return Examination(stages(options), bench, meetings, tell).run()
    finally:
        quiet.restore()


def stages(options: Options) -> list[Stage]:
    """Return what is checked, in order: the user's own functions last, since they may hang."""
    return [
        topology.STAGE,
        environment.STAGE,
        *functions.stages(options),
        group.STAGE,
        collectives.STAGE,
        repeatability.STAGE,
        speed.STAGE,
        model.STAGE if options.model else functions.not_asked("model", "Model and optimizer"),
        loader.STAGE if options.loader else functions.not_asked("loader", "Data"),
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
