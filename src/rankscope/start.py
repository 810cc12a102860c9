"""``rankscope.watch``: what happens once, before the first step."""

import dataclasses
import logging
import os
import platform
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rankscope import errors
from rankscope.canary import LiveCanary, check_canary
from rankscope.capture import ReadReduced
from rankscope.capture.environment import environment_facts, vocabulary_digest
from rankscope.capture.training_facts import sampler_seed, training_facts
from rankscope.core.groups import GroupsOption
from rankscope.core.hang import HangReport
from rankscope.core.plan import Plan
from rankscope.core.signals import schema_hash
from rankscope.core.tiers import Tier
from rankscope.diagnose.diagnosis import Diagnosis
from rankscope.diagnose.restart import state_after
from rankscope.errors import RankscopeError, RunError, UsageError
from rankscope.exchange import Channel, GlooChannel, Hello
from rankscope.exchange.heartbeat import Heartbeat, default_store
from rankscope.instruments import Options, choice, choose_instruments
from rankscope.record import Run, RunWriter
from rankscope.record.states import pack_state, unpack_state
from rankscope.scope import OnFinding, Scope
from rankscope.sinks import PlannedSink, RunInfo, SinkOption, Sinks, plan_sinks
from rankscope.wrapping import Wrapped, find_wrapper, plain_optimizer

_log = logging.getLogger("rankscope")


def watch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    run_dir: str | Path,
    tier: Tier | str = Tier.SKETCH,
    every: int = 1,
    sketch_width: int = 4093,
    groups: GroupsOption = "blocks",
    reduced: ReadReduced | str = ReadReduced.NORM,
    overhead_budget: float | None = 0.01,
    evidence: bool = True,
    seed: int = 0,
    on_finding: OnFinding | None = None,
    process_group: dist.ProcessGroup | None = None,
    config: Mapping[str, Any] | None = None,
    flush_seconds: float = 10.0,
    hang_seconds: float | None = 120.0,
    resume: bool = True,
    plan: Plan | Mapping[str, Any] | None = None,
    loader: Any = None,
    tokenizer: Any = None,
    canary: bool = True,
    canary_every: int | None = None,
    trace: bool = False,
    sinks: SinkOption = (),
) -> Scope:
    """Watch every worker of a data-parallel job from now on.

    Every rank calls it at the same point of the program, after wrapping the model. It changes
    neither model, nor synchronisation (but for the exact tier), nor optimizer.

    Args:
        model: What the training calls: a model wrapped in DDP, or by ``fully_shard``, either of
            them compiled or not, or a DeepSpeed engine.
        optimizer: Its optimizer, for the learning rate and the count of optimizer steps. An
            engine brings its own.
        run_dir: Directory that rank 0 writes. When it already holds a run (a restarted job), a
            numbered sibling is used instead, and said; with as many workers as before, step
            numbers and detectors go on from the run before. With several data-parallel groups (a
            mesh), each group's first rank writes one: the group of global rank 0 ``run_dir``, any
            other its sibling ``<name>-from-rank-<first rank>``.
        tier: ``"scalars"``, ``"sketch"`` or ``"exact"``: how much of the gradients is compared,
            see :class:`rankscope.Tier`.
        every: Gradients are measured in steps that are multiples of this; losses and samples in
            all steps.
        sketch_width: Prime width of the gradient sketch; a pairwise cosine errs by about
            ``1/sqrt(sketch_width)`` at most.
        groups: ``"blocks"`` (a transformer block, the embedding, the head), ``"none"``, a
            function from parameter name to group, or a mapping from name prefix to group.
        reduced: What is read of the reduced gradient: ``"off"``, ``"norm"`` or ``"sketch"``.
        overhead_budget: Share of the step time that the monitor may take; to stay under it,
            gradients are measured less often, on all workers alike. None: never less often.
        evidence: Whether what should be equal on all workers is compared exactly: parameters,
            buffers, optimizer state, reduced gradients, random generators, precision. Samples,
            settings and the environment always are.
        seed: Seed of the sketch's signs. It touches no random generator of the training.
        on_finding: Called with each finding when it opens or changes, in the monitor's thread: on
            every rank up to 64 workers, beyond on rank 0.
        process_group: The data-parallel group; by default the model's own.
        config: Anything JSON that describes the run; stored in ``run.json``.
        flush_seconds: Longest time that measured values stay in memory.
        hang_seconds: A step that takes longer (and 20 times as long as others) is a hang: the log
            then names the ranks that the others wait for. None: no heartbeat.
        resume: Whether a run that ``run_dir`` already holds goes on: its findings stay known, and
            its detectors go on where they stood. False: a new attempt that begins with nothing.
        plan: What is meant, where only intent can tell a fault: a dict with any of
            ``loss_weighting`` (``"token"`` or ``"worker"``), ``learning_rate`` (a number, or one
            per optimizer step), ``random`` (``"same"`` or ``"different"`` on all workers),
            ``repeats`` (True: samples repeat on purpose), ``local_buffers`` (True: each worker
            keeps running statistics of its own) and ``seed`` (of every rank's sampler). See
            :class:`rankscope.core.plan.Plan`.
        loader: The training's ``DataLoader``: whether its worker processes draw the same random
            numbers, and its sampler's seed, can only be seen there. Give it before it is iterated.
        tokenizer: The training's tokenizer (with ``get_vocab()``): its vocabulary is compared.
        canary: Whether all workers replay a batch when a worker differs from the others, which
            tells its data from its parameters and its hardware. Under DDP, up to 64 workers.
        canary_every: Steps from one such replay to the next, whatever the findings. None: none.
        trace: Whether rank 0 records digest, norm and a short sketch of every parameter and every
            reduced gradient, in steps that are multiples of ``every``, for ``rankscope diff``.
            Under DDP; outside of ``overhead_budget``.
        sinks: Where the numbers go besides ``run_dir``: any of ``"tensorboard"``, ``"wandb"``,
            ``"mlflow"``, ``"prometheus:PORT"``, ``"jsonl"``, ``"webhook:URL"`` and
            ``"command:COMMAND"``, or objects with the methods of :class:`rankscope.sinks.Sink`.
            Only those given on rank 0 count. One that is slow or fails never delays the training.

    Returns:
        The running scope, also a context manager.

    Raises:
        UnsupportedError: The model goes data parallel in a way that cannot be watched.
        UsageError: An option cannot work, or options differ between ranks.
        MissingExtraError: The package of a sink is not installed.
        RunError: Rank 0 cannot write ``run_dir``.
    """
    options = Options(
        tier=choice(Tier, "tier", tier),
        every=every,
        sketch_width=sketch_width,
        groups=groups,
        reduced=choice(ReadReduced, "reduced", reduced),
        overhead_budget=overhead_budget,
        seed=seed,
        evidence=bool(evidence),
        trace=bool(trace),
    )
    wrapped = find_wrapper(model)
    optimizer = plain_optimizer(optimizer) or wrapped.optimizer  # DeepSpeed's is a wrapper, too
    instruments = choose_instruments(wrapped, options, loader)
    intended = Plan.of(plan)
    group = process_group or wrapped.group
    canary = check_canary(wrapped, wanted=canary, every=canary_every)
    channel = GlooChannel(group)
    described = {
        **dataclasses.asdict(options),
        "groups": list(instruments.groups.names),
        "reduced_in": instruments.reduced_in,
        "parallel": wrapped.kind,
        "resume": resume,
        "plan": intended.to_json(),
        "canary": canary,
        "canary_every": canary_every,
    }
    facts = _facts(instruments.device, tokenizer, loader)
    training = training_facts(wrapped.wrapper, wrapped.module, optimizer, loader, group)
    info = {"facts": facts, "config": dict(config or {}), "training": training, "sinks": sinks}
    directory = _own_directory(Path(run_dir), dist.get_process_group_ranks(group))
    writer, diagnosis, feeders = _open_run(channel, directory, described, info, flush_seconds)
    if channel.rank != 0:
        instruments = dataclasses.replace(instruments, make_trace_meter=None)
    return Scope(
        model,
        optimizer,
        instruments,
        channel,
        writer=writer,
        diagnosis=diagnosis,
        on_finding=on_finding,
        heartbeat=_heartbeat(channel, group, hang_seconds),
        canary=_live_canary(wrapped, channel, canary_every, writer) if canary else None,
        sinks=feeders,
    )


def _live_canary(
    wrapped: Wrapped, channel: Channel, every: int | None, writer: RunWriter | None
) -> LiveCanary:
    run_dir = None if writer is None else writer.path
    return LiveCanary(wrapped, channel, every=every, run_dir=run_dir)


def _heartbeat(
    channel: Channel, group: dist.ProcessGroup, hang_seconds: float | None
) -> Heartbeat | None:
    store = default_store(str(dist.get_process_group_ranks(group)[0])) if hang_seconds else None
    if store is None or not hang_seconds:
        return None
    return Heartbeat(
        store,
        channel.rank,
        channel.num_workers,
        hang_seconds=hang_seconds,
        on_hang=partial(_tell_of_hang, channel.rank),
    )


def _tell_of_hang(rank: int, report: HangReport) -> None:
    """Log a hang; a long pause of all ranks together (evaluation, checkpoint) is no warning."""
    level = logging.WARNING if report.suspects else logging.INFO
    _log.log(level, "rankscope, rank %d: %s", rank, report)


def _open_run(
    channel: Channel, run_dir: Path, options: dict[str, Any], info: dict[str, Any], flush: float
) -> tuple[RunWriter | None, Diagnosis, Sinks | None]:
    """Agree on options with all ranks, and open the run's directory and sinks on rank 0.

    Returns:
        The writer, on rank 0, the diagnosis, which may go on from the run before, and the sinks.
    """
    facts, sinks = info.pop("facts"), info.pop("sinks")
    hellos = channel.gather_hellos(Hello({"schema": schema_hash(), **options}, facts))
    for rank, hello in enumerate(hellos):
        if hello.agreement != hellos[0].agreement:
            raise UsageError(
                f"watch() expected the same options on every rank, got {hello.agreement} on rank "
                f"{rank} and {hellos[0].agreement} on rank 0; pass equal options"
            )
    hosts = tuple(str(hello.facts["host"]) for hello in hellos)
    writer, problem, start = None, None, None
    planned: tuple[PlannedSink, ...] = ()
    if channel.rank == 0:
        ranks = [{"rank": rank, **hello.facts} for rank, hello in enumerate(hellos)]
        info = {
            "num_workers": channel.num_workers,
            "world_size": dist.get_world_size(),
            "ranks": ranks,
            "options": options,
            **info,
        }
        try:
            planned = plan_sinks(sinks)
            previous, path = _free_directory(run_dir)
            if previous is not None and options["resume"]:
                start = state_after(previous, channel.num_workers, hosts, options["groups"])
            if previous is not None and start is not None:
                info |= {"continues": previous.name, "first_step": start["step"] + 1}
            writer = RunWriter(path, info, flush_seconds=flush, start=start)
        except RankscopeError as error:
            problem = error
    environments = [hello.facts["environment"] for hello in hellos]
    diagnosis = Diagnosis(
        channel.num_workers,
        hosts,
        environments,
        Plan.of(options["plan"]),
        reduced_in=options["reduced_in"],
        sampler_seeds=[hello.facts["sampler_seed"] for hello in hellos],
    )
    _share_start(channel, diagnosis, b"" if start is None else pack_state(start), problem)
    if writer is not None:
        writer.add_findings(diagnosis.findings)
    return writer, diagnosis, _start_sinks(planned, writer, diagnosis, info, options)


def _start_sinks(
    planned: tuple[PlannedSink, ...],
    writer: RunWriter | None,
    diagnosis: Diagnosis,
    info: dict[str, Any],
    options: dict[str, Any],
) -> Sinks | None:
    if writer is None or not planned:
        return None
    if dist.get_rank() != 0:  # one tracker, one port, one webhook for the job
        _log.info("sinks show the data-parallel group of global rank 0; this is another")
        return None
    known = tuple(diagnosis.findings)
    run = RunInfo(writer.path, info["num_workers"], info["config"], options, known)
    return Sinks(planned, run)


def _share_start(
    channel: Channel, diagnosis: Diagnosis, packed: bytes, problem: RankscopeError | None
) -> None:
    """Tell all ranks what rank 0 could not do, or else let all begin with its state.

    Raises:
        RankscopeError: Rank 0 has a problem; of its kind, on all ranks.
    """
    facts = {"state_bytes": len(packed), "kind": type(problem).__name__}
    answer = channel.gather_hellos(Hello({}, facts, str(problem or "")))[0]
    if answer.problem:
        kind = getattr(errors, answer.facts["kind"], RunError)
        raise kind.__new__(kind, answer.problem)  # the sentence is whole; __init__ would add to it
    if answer.facts["state_bytes"]:
        message = np.zeros(answer.facts["state_bytes"], np.uint8)
        message[: len(packed)] = np.frombuffer(packed, np.uint8)
        diagnosis.restore(unpack_state(channel.broadcast(message).tobytes()))


def _own_directory(run_dir: Path, ranks: list[int]) -> Path:
    """Return the directory of one data-parallel group, so that no two groups write the same."""
    if 0 in ranks:
        return run_dir
    return run_dir.with_name(f"{run_dir.name}-from-rank-{ranks[0]}")


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


def _facts(device: torch.device, tokenizer: Any, loader: Any) -> dict[str, Any]:
    name = torch.get_device_module(device).get_device_name() if device.type != "cpu" else ""
    vocabulary = {} if tokenizer is None else {"vocabulary": vocabulary_digest(tokenizer)}
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "sampler_seed": sampler_seed(loader),
        "device": str(device),
        "device_name": name or platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "environment": {**environment_facts(device), **vocabulary},
    }
