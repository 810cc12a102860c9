"""How a run begins on all ranks or on none: what they agree on, and what rank 0 opens.

What one rank alone cannot do is told to all of them. If it just raised, the others would wait for
it in the next exchange, up to half an hour.
"""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from rankscope import errors
from rankscope.core.plan import Plan
from rankscope.core.signals import schema_hash
from rankscope.diagnose.diagnosis import Diagnosis, has_comm_hook
from rankscope.diagnose.restart import state_after
from rankscope.errors import RankscopeError, RunError, UsageError
from rankscope.exchange import Channel, Hello
from rankscope.record import Run, RunTakenError, RunWriter
from rankscope.record.states import pack_state, unpack_state
from rankscope.sinks import PlannedSink, RunInfo, Sinks, plan_sinks

_log = logging.getLogger("rankscope")


def open_run(
    channel: Channel,
    options: dict[str, Any],
    describe: Callable[[], dict[str, Any]],
    flush: float,
) -> tuple[RunWriter | None, Diagnosis, Sinks | None]:
    """Agree on options with all ranks, and open the run's directory and sinks on rank 0.

    Args:
        channel: Where the ranks meet; all of them call this at the same point of the program.
        options: What must be equal on all ranks, as plain values.
        describe: Returns what this rank says of itself: ``facts``, ``config``, ``training``,
            ``sinks``, and ``run_dir``, the directory that rank 0 writes.
        flush: Longest time in seconds that measured values stay in memory.

    Returns:
        The writer, on rank 0, the diagnosis, which may go on from the run before, and the sinks.

    Raises:
        RankscopeError: Some rank cannot begin; of the same kind on all of them.
    """
    info: dict[str, Any] = {}
    problem, rank = None, channel.rank
    try:
        info = describe()
    except Exception as error:
        problem = _problem_of(error, f"rank {rank} cannot begin to watch")
    facts = info.pop("facts", {})
    hellos = _meet(channel, {"schema": schema_hash(), **options}, facts, problem)
    for other, hello in enumerate(hellos):
        if hello.agreement != hellos[0].agreement:
            raise UsageError(
                f"watch() expected the same options on every rank, got {hello.agreement} on rank "
                f"{other} and {hellos[0].agreement} on rank 0; pass equal options"
            )
    run_dir, sinks = info.pop("run_dir"), info.pop("sinks")
    hosts = tuple(str(hello.facts["host"]) for hello in hellos)
    diagnosis = Diagnosis(
        channel.num_workers,
        hosts,
        [hello.facts["environment"] for hello in hellos],
        Plan.of(options["plan"]),
        reduced_in=options["reduced_in"],
        comm_hook=has_comm_hook(info),
        sampler_seeds=[hello.facts["sampler_seed"] for hello in hellos],
        with_replacement=all(hello.facts["with_replacement"] for hello in hellos),
    )
    record = _Record()
    if rank == 0:
        info = {
            "num_workers": channel.num_workers,
            "world_size": dist.get_world_size(),
            "ranks": [{"rank": rank, **hello.facts} for rank, hello in enumerate(hellos)],
            "options": options,
            **info,
        }
        try:
            record = _begin_record(run_dir, diagnosis, plan_sinks(sinks), info, flush)
        except Exception as error:
            problem = _problem_of(error, f"rank 0 cannot begin the run in {run_dir}")
    hello = _meet(channel, {}, {"start_bytes": len(record.start)}, problem)[0]
    message = np.zeros(hello.facts["start_bytes"], np.uint8)
    message[: len(record.start)] = np.frombuffer(record.start, np.uint8)
    if len(message):
        message = channel.broadcast(message)
        if rank != 0:
            diagnosis.restore(unpack_state(message.tobytes()))
    return record.writer, diagnosis, _start_sinks(record, diagnosis, info, options)


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    """What rank 0 alone has of a run.

    Attributes:
        writer: Writes it.
        planned: Where its numbers go besides.
        start: What the detectors go on from, packed; empty when they start anew.
    """

    writer: RunWriter | None = None
    planned: tuple[PlannedSink, ...] = ()
    start: bytes = b""


def _begin_record(
    run_dir: Path,
    diagnosis: Diagnosis,
    planned: tuple[PlannedSink, ...],
    info: dict[str, Any],
    flush: float,
) -> _Record:
    """Open the run's directory; the diagnosis goes on from the run before, if there is one."""
    while True:
        try:
            writer, packed = _begin_writer(run_dir, info, flush)
            break
        except RunTakenError:  # by a job that begins at the same time: the next sibling is ours
            continue
    if packed:
        diagnosis.restore(unpack_state(packed))
    writer.add_findings(diagnosis.findings)
    return _Record(writer, planned, packed)


def _begin_writer(run_dir: Path, info: dict[str, Any], flush: float) -> tuple[RunWriter, bytes]:
    """Return the writer of a new run, and what its detectors go on from, see ``_Record``.

    Raises:
        RunTakenError: Another job was faster.
    """
    options = info["options"]
    previous, path = _free_directory(run_dir)
    start = None
    if previous is not None and options["resume"]:
        hosts = [str(rank["host"]) for rank in info["ranks"]]
        start = state_after(previous, info["num_workers"], hosts, options["groups"])
    if previous is not None and start is not None:
        info = {**info, "continues": previous.name, "first_step": start["step"] + 1}
    packed = b"" if start is None else pack_state(start)
    return RunWriter(path, info, flush_seconds=flush, start=start), packed


def _start_sinks(
    record: _Record, diagnosis: Diagnosis, info: dict[str, Any], options: dict[str, Any]
) -> Sinks | None:
    if record.writer is None or not record.planned:
        return None
    if dist.get_rank() != 0:  # one tracker, one port, one webhook for the job
        _log.info("sinks show the data-parallel group of global rank 0; this is another")
        return None
    known = tuple(diagnosis.findings)
    run = RunInfo(record.writer.path, info["num_workers"], info["config"], options, known)
    return Sinks(record.planned, run)


def _problem_of(error: Exception, sentence: str) -> RankscopeError:
    """Return why this rank cannot begin: an error of ours as it is, of any other a sentence."""
    if isinstance(error, RankscopeError):
        return error
    problem = RunError(f"{sentence} ({type(error).__name__}: {error})")
    problem.__cause__ = error
    return problem


def _meet(
    channel: Channel,
    agreement: dict[str, Any],
    facts: dict[str, Any],
    problem: RankscopeError | None,
) -> list[Hello]:
    """Gather one greeting per rank, or end on all ranks when one has a problem.

    Raises:
        RankscopeError: This rank's problem, or else the first that another rank has, of its kind.
    """
    own = Hello(agreement, facts)
    if problem is not None:
        own = Hello(agreement, facts, str(problem), type(problem).__name__)
    hellos = channel.gather_hellos(own)
    if problem is not None:
        raise problem
    for hello in hellos:
        if hello.problem:
            kind = getattr(errors, hello.kind, RunError)
            raise kind.__new__(kind, hello.problem)  # it is whole; __init__ would add to it
    return hellos


def _free_directory(run_dir: Path) -> tuple[Path | None, Path]:
    """Return the run before, if ``run_dir`` holds one already, and where to record this one.

    Siblings count without a gap: ``exp-2024`` beside ``exp`` is another experiment.
    """
    previous, candidate, number = None, run_dir, 1
    while Run.is_run(candidate):
        number += 1
        previous, candidate = candidate, run_dir.with_name(f"{run_dir.name}-{number}")
    if previous is not None:
        _log.warning("%s already holds a run; this one is recorded in %s", run_dir, candidate)
    return previous, candidate
