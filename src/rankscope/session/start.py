"""``rankscope.watch``: the setup before the first step."""

import contextlib
import logging
import os
import platform
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist

from rankscope.agent.link import IN_THREAD
from rankscope.bus.plan import Plan, Tier
from rankscope.bus.probe import Channel
from rankscope.bus.words import make_printable
from rankscope.errors import UsageError
from rankscope.evidence import EVIDENCE
from rankscope.files import to_plain
from rankscope.record.stores import Store
from rankscope.session.inbox import OnFinding
from rankscope.session.instruments import choose_instruments, job_of
from rankscope.session.meetings import (
    LATER_SECONDS,
    WatchedStage,
    begin_apart,
    meet_mesh,
    meet_stages,
)
from rankscope.session.opening import HeldParameters, RunHandle, RunRequest, host_name, open_run
from rankscope.session.options import WatchKeywords, WatchOptions, chosen_tier
from rankscope.session.scope import Scope
from rankscope.sinks import RunInfo, SinkOption, Sinks
from rankscope.wrappers.datasets import data_facts
from rankscope.wrappers.facts import (
    compilation,
    environment_facts,
    training_facts,
    vocabulary_digest,
)
from rankscope.wrappers.find import find_parts, find_wrapper
from rankscope.wrappers.living import live_objects, one_walk
from rankscope.wrappers.optimizers import (
    JointOptimizer,
    all_of,
    check_optimizers,
    held_bits,
    held_names,
    may_train,
    plain_optimizers,
)
from rankscope.wrappers.ranks import ranks_of
from rankscope.wrappers.rendezvous import default_store
from rankscope.wrappers.settings import given_settings
from rankscope.wrappers.wrapped import Wrapped

ALERTS = "RANKSCOPE_ALERTS"  # environment variable: the alerts of a ``watch`` that names none

_log = logging.getLogger("rankscope")


def watch(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    run_dir: str | Path,
    tier: Tier | str = Tier.SKETCH,
    plan: Plan | Mapping[str, Any] | None = None,
    on_finding: OnFinding | None = None,
    sinks: SinkOption = (),
    loader: Any = None,
    config: Mapping[str, Any] | None = None,
    options: WatchOptions | None = None,
    **more: Unpack[WatchKeywords],
) -> Scope:
    """Watch every worker of a data-parallel job from now on.

    Every rank calls it at the same point of the program, after wrapping the model. It changes
    neither model, nor synchronisation, nor optimizer.

    Args:
        model: What the training calls: a model wrapped in DDP, or by ``fully_shard``, or one
            without wrapper whose loop or optimizer reduces gradients, each of them compiled or
            not, a DeepSpeed engine, or Megatron-core's DDP. Or a list of the parts of one training,
            such as the generator and the discriminator of a GAN, each wrapped in DDP: the part
            that the training calls first in a step comes first.
        optimizer: Its optimizer, or a list of several, for the learning rate and the count of
            optimizer steps. An engine brings its own; a model without wrapper needs it, for its
            call ends a step.
        run_dir: Directory that rank 0 writes, or its address in an object store, such as
            ``s3://bucket/runs/sft``. When it already holds a run (a restarted job), a
            numbered sibling is used instead, and logged; with as many workers as before, step
            numbers and detectors go on from the run before. With several data-parallel groups (a
            mesh), each group's first rank writes one: the group of global rank 0 ``run_dir``, any
            other its sibling ``<name>-from-rank-<first rank>``.
        tier: ``"scalars"`` or ``"sketch"``: how much of the gradients is compared, see
            :class:`rankscope.Tier`.
        plan: The intent, where a fault depends on it: a dict with any of
            ``loss_weighting`` (``"token"`` or ``"worker"``), ``learning_rate`` (a number, or one
            per optimizer step), ``random`` (``"same"`` or ``"different"`` on all workers),
            ``repeats`` (True: samples repeat on purpose), ``samples`` (how many the data set
            has, all of which an epoch draws), ``local_buffers`` (True: each worker
            keeps running statistics of its own), ``seed`` (of every rank's sampler),
            ``local_steps`` (optimizer steps from one average of the workers' parameters to the
            next), ``replicated`` (True: all parameters are equal, also those that DDP ignores),
            ``max_norm`` (the norm to which code of the training's own clips all gradients) and
            ``independent`` (True: groups that never meet are trainings of their own).
            See :class:`rankscope.bus.plan.Plan`.
        on_finding: Called with each finding when it opens, gets worse or closes: in the training's
            thread, at the beginning of the same step on every rank, so that it may write a
            checkpoint. An exception is logged; ``SystemExit`` and the like end the training.
        sinks: Where the numbers go besides ``run_dir``: any of ``"tensorboard"``, ``"wandb"``,
            ``"mlflow"``, ``"trackio"``, ``"prometheus:PORT"``, ``"jsonl"``, ``"webhook:URL"`` and
            ``"command:COMMAND"``, or objects with the methods of :class:`rankscope.sinks.Sink`.
            Only those given on rank 0 count. One that is slow or fails never delays the training.
        loader: The training's ``DataLoader``: whether its worker processes draw the same random
            numbers, its sampler's seed, and that it draws with replacement, are only
            visible there. Give it before it is iterated.
        config: JSON values that describe the run; stored in ``run.json``, without anything that
            looks like a secret.
        options: Rarer options, see :class:`rankscope.WatchOptions`.
        **more: Any of them by its name, such as ``every=10`` or ``announce=False``.

    Returns:
        The running scope, also a context manager.

    Raises:
        UnsupportedError: The model goes data parallel in a way that cannot be watched.
        UsageError: An option cannot work, or options differ between ranks.
        MissingExtraError: The package of a sink is not installed.
        RunError: Rank 0 cannot write ``run_dir``, or some rank cannot begin for another reason.
    """
    log_to_stderr()
    options = WatchOptions.of(options, more)
    tier = chosen_tier(tier)
    intended = Plan.of(plan)
    local_steps = intended.local_steps or 0
    for each in model if isinstance(model, list | tuple) else [model]:
        if not isinstance(each, torch.nn.Module):
            raise _expected("a model, or a list of models, and then the optimizer", each)
    given = optimizer
    if isinstance(model, torch.nn.Module):
        models: Sequence[torch.nn.Module] = [model]
        wrapped = find_wrapper(model, options.process_group)
    else:
        models = model
        wrapped = find_parts(models)
        model = models[0]
    optimizers: list[Any] = plain_optimizers(optimizer)
    if len(optimizers) > 1:
        optimizers = [JointOptimizer(optimizers)]
    optimizer = optimizers[0] if optimizers else wrapped.optimizer  # DeepSpeed's wraps it, too
    by_loop = wrapped.kind.by_loop
    if by_loop and optimizer is None:
        raise UsageError(
            "watch() expected the optimizer, or all of them in a list, of a model without wrapper, "
            "whose call ends a step; got none of torch.optim.Optimizer: watch(model, optimizer, …)"
        )
    group = options.process_group or wrapped.group
    alike = not local_steps  # else parameters differ, and with them every result
    reasons = {each.name: each.why_not(wrapped, options, alike=alike) for each in EVIDENCE}
    canary = not reasons["canary"]
    instruments = choose_instruments(wrapped, options, tier)
    described = {
        "tier": tier,
        **options.compared(),
        "groups": list(instruments.groups.names),
        "reduced": instruments.reduced,
        "reduced_in": instruments.reduced_in,
        "local_steps": local_steps,
        "parallel": wrapped.kind.name,
        "plan": intended.to_json(),
        "canary": canary,
        "verify_at": list(map(int, options.verify_at)),
    }

    def describe() -> dict[str, Any]:
        _check_given(given, run_dir, on_finding, config)
        _check_held(optimizer, wrapped)
        return {
            "facts": _facts(model, wrapped, optimizer, config, options.tokenizer, loader),
            "config": dict(config or {}),
            "unmeasured": {name: why for name, why in reasons.items() if why},
            "training": training_facts(wrapped, optimizer, loader, group),
            "sinks": sinks,
            "alerts": options.alerts or os.environ.get(ALERTS, "").split(),
            **_own_directory(run_dir, ranks_of(group)),
        }

    handle = open_run(
        group,
        RunRequest(
            options=described,
            describe=describe,
            layout=instruments.layout,
            flush_seconds=options.flush_seconds,
            hang_seconds=options.hang_seconds,
            in_thread=_in_thread(options.agent),
            held=held_bits(optimizer, wrapped.parameters) if by_loop else "",
            announce=options.announce,
            share=options.share,
        ),
    )
    held = frozenset(held_names(optimizer, wrapped.parameters)) if by_loop else None
    if held is not None and (handle.held is not HeldParameters.ALL or not held):
        wrapped = replace(wrapped, held=held, in_shares=handle.held is HeldParameters.SHARES)
    stage = WatchedStage(wrapped.wrapper, wrapped.summed)
    channel = Channel(shared_weights=stage.shared)
    if not local_steps and not handle.problem:
        facts = {
            "run": ranks_of(group)[0],
            "host": host_name(),
            "address": handle.address,
            "secret": handle.hello["secret"],
        }
        channel = replace(channel, mesh=meet_mesh(wrapped, facts, compares=options.evidence))
        meet = partial(meet_stages, wrapped, stage, facts, compares=options.evidence)
        if begin_apart():
            later = partial(meet, patience_seconds=LATER_SECONDS)
            channel = replace(channel, meet_stages=later)
        else:
            channel = replace(channel, stages=meet())
    job = job_of(
        wrapped,
        optimizer,
        options,
        handle.first_step,
        local_steps=local_steps,
        loader=loader,
        canary=canary,
        given_dir=str(run_dir),
        channel=channel,
    )
    scope = Scope(
        models,
        job,
        instruments,
        handle,
        on_finding=on_finding,
        sinks=_local_sinks(handle),
        announce_end=options.announce,
    )
    scope.until_closed(stage)
    return scope


def _check_given(optimizer: object, run_dir: object, on_finding: object, config: object) -> None:
    """Check the kinds of what ``watch`` was given on this rank."""
    check_optimizers(optimizer)
    if not isinstance(run_dir, str | os.PathLike):
        raise _expected("run_dir to be a path", run_dir)
    if on_finding is not None and not callable(on_finding):
        raise _expected("on_finding to be a function of a finding", on_finding)
    if config is not None and not isinstance(config, Mapping):
        raise _expected("config to map names to values", config)
    try:
        to_plain(config or {})
    except Exception as error:
        kind = type(error).__name__
        raise UsageError(
            f"watch() expected plain values in config, got some that cannot be read ({kind}), or "
            "that hold themselves"
        ) from None


def _check_held(optimizer: Any, wrapped: Wrapped) -> None:
    parameters = list(wrapped.parameters.values())
    if wrapped.sharded or not wrapped.kind.own_optimizer:
        return
    if may_train(all_of(optimizer), parameters):
        return
    modules: list[torch.nn.Module] = live_objects(torch.nn.Module)[torch.nn.Module]
    known = {id(p) for module in modules for p in module._parameters.values()}
    groups = (group for each in all_of(optimizer) for group in each.param_groups)
    if any(id(p) in known for group in groups for p in group["params"]):  # else its own copies
        raise UsageError(
            "watch() expected the optimizer of this model, got one that holds none of its "
            "parameters; make it from model.parameters(), after all changes of the model"
        )


def _expected(what: str, got: object) -> UsageError:
    kind = f"the class {got.__name__}" if isinstance(got, type) else type(got).__name__
    return UsageError(f"watch() expected {what}, got {kind}")


def log_to_stderr() -> None:
    """Let the logger ``rankscope`` write to the error stream, not through the root logger.

    The root logger may write to the script's output. A logger that was configured by its name (a
    handler of its own, or ``propagate`` switched off) is left as it is, but for control characters
    in its lines.
    """
    _log.addFilter(make_printable)
    if not _log.handlers and _log.propagate:
        _log.addHandler(_OnStderr())
        _log.propagate = False


class _OnStderr(logging.Handler):
    """Writes to the present error stream, until the logger is configured by its name."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether no other handler writes the line."""
        others = any(handler is not self for handler in _log.handlers)
        return not others and not (_log.propagate and logging.getLogger().handlers)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        with contextlib.suppress(Exception):  # the stream is closed
            line = self.format(record)
            name = "" if line.startswith("rankscope") else "rankscope: "
            sys.stderr.write(f"{name}{line}\n")  # in one piece, beside other ranks' lines
            sys.stderr.flush()


def _in_thread(agent: str | None) -> bool:
    """Return whether the agent runs in a thread of this process."""
    given = agent or os.environ.get(IN_THREAD) or "process"
    if given not in ("process", "thread"):
        raise UsageError(f"agent must be 'process' or 'thread', got {given!r}")
    return given == "thread"


def _local_sinks(handle: RunHandle) -> Sinks | None:
    """Start the sinks that must run in this process: objects, and the training's trackers."""
    root = handle.root
    if not root.local_sinks or root.path is None:
        return None
    run = RunInfo(root.path, handle.num_workers, root.info["config"], root.info["options"])
    return Sinks(root.local_sinks, run)


def _own_directory(run_dir: str | Path, ranks: list[int]) -> dict[str, Any]:
    """Return the directory of this data-parallel group, and what its job's groups share."""
    given = Store.of(run_dir) or Path(run_dir)
    own = given
    if 0 not in ranks:
        name = f"{given.name}-from-rank-{ranks[0]}"
        own = given.sibling(name) if isinstance(given, Store) else given.with_name(name)
    if len(ranks) == dist.get_world_size() or dist.get_rank() != ranks[0]:
        return {"run_dir": own}
    name_of_job = default_store().compare_set("rankscope/job", "", secrets.token_hex(8))
    job = {"id": name_of_job.decode(), "base": given.name, "name": own.name, "ranks": ranks}
    return {"run_dir": own, "job": job}


def _facts(
    model: torch.nn.Module,
    wrapped: Wrapped,
    optimizer: Any,
    config: Mapping[str, Any] | None,
    tokenizer: Any,
    loader: Any,
) -> dict[str, Any]:
    device = wrapped.device
    name = torch.get_device_module(device).get_device_name() if device.type != "cpu" else ""
    vocabulary = {} if tokenizer is None else {"vocabulary": vocabulary_digest(tokenizer)}
    with one_walk():
        data = data_facts(loader)
        settings = given_settings(wrapped, optimizer, config)
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        **data,
        "device": str(device),
        "device_name": name or platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "environment": {
            **environment_facts(device),
            "compiled": compilation(model),
            **vocabulary,
        },
        "settings": settings,
    }
