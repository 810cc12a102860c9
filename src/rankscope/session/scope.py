"""The :class:`Scope`: the monitor in a training process, for one watched job.

It collects this worker's steps, sends them to the agent of its host without waiting, and reads the
agent's frames at the beginning of each step. Its first rule: it never raises into the training
loop, never blocks it, and leaves every bit of the training as it was. A failure of its own switches
it off with one warning.
"""

import atexit
import contextlib
import json
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from rankscope.agent.frames import FrameKind
from rankscope.agent.link import AgentEndedError, Traffic
from rankscope.agent.rank_processes import ProgressMark
from rankscope.agent.step_message import tag
from rankscope.bus.evidence import Table
from rankscope.bus.finding import Finding
from rankscope.bus.pace import PACE
from rankscope.bus.probe import Content, Job
from rankscope.bus.step import StepReport
from rankscope.bus.words import name_ranks
from rankscope.errors import RankscopeError
from rankscope.record.tables import step_range
from rankscope.session.collector import StepCollector
from rankscope.session.inbox import (
    Inbox,
    OnFinding,
    WatchedPart,
    announce,
    crash_line,
    last_line,
    place_of,
)
from rankscope.session.instruments import Instruments
from rankscope.session.opening import RunHandle, start_recorder_thread
from rankscope.session.outbox import LocalStep, Outbox
from rankscope.sinks import Sinks
from rankscope.wrappers.backward_loss import BackwardLoss
from rankscope.wrappers.calls import ForeignHook, ModuleHook
from rankscope.wrappers.find import is_training, log_if_rewrapped
from rankscope.wrappers.guard import Guard, clock_of
from rankscope.wrappers.labels import problem_of
from rankscope.wrappers.optimizers import all_of, has_closure
from rankscope.wrappers.part_calls import PartCalls
from rankscope.wrappers.passes import in_backward
from rankscope.wrappers.surroundings import traced
from rankscope.wrappers.wrapped import is_compiled, takes_hooks

_log = logging.getLogger("rankscope")

CLOSE_SECONDS = 10.0  # seconds that ``close`` waits for the last step of the other workers
CLOSE_SECONDS_AFTER_ERROR = 3.0  # the same when the training raised: the others may never come

_BUSY_SECONDS = 60.0  # that the training waits for a silent agent that computes, or would
_BUSY_SHARE = 0.02  # of a CPU that such an agent takes at least; one that waits takes less
_READY_SHARE = 0.5  # of the time in which an agent that gets no CPU is ready to run
_AGENT_SECONDS = 2.0  # that an agent may take to end after its last frame


class _Monitor(Enum):
    """Whether the monitor runs: from RUNNING, a failure or a fork leads to OFF for good.

    ``close`` leads from both to CLOSING, and at its end to CLOSED.
    """

    RUNNING = auto()
    OFF = auto()
    CLOSING = auto()  # waits for the agent
    CLOSED = auto()


class _Forward(Enum):
    """The forward pass that runs; one that raises leaves its mark until the next one."""

    NONE = auto()
    OUTER = auto()  # of the model that the training calls
    BYPASSING = auto()  # in training, of the module inside the wrapper, past the wrapper


class Scope:
    """A running monitor; made by :func:`rankscope.watch`."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],  # wrapped or compiled; the training calls the first
        job: Job,  # its channel's other fields are filled in here
        instruments: Instruments,
        handle: RunHandle,
        *,
        on_finding: OnFinding | None,  # takes each finding that opens, gets worse or closes
        sinks: Sinks | None = None,  # that live in this process
        announce_end: bool = False,  # rank 0 prints the run's place at the end
    ) -> None:
        model = models[0]
        self._handle = handle
        self._announces_end = announce_end
        self._agent_seconds = (0.0, 0.0)
        self._monitor = _Monitor.RUNNING
        self._off_after: int | None = None  # the last step before the monitor was switched off
        self._forward = _Forward.NONE
        self._declined_loss = False  # a call of ``loss``
        self._training = False  # the last forward pass of the model counts
        self._pid = os.getpid()
        self._guard = Guard(self._fail, clock_of(job.wrapped.device))
        channel = replace(
            job.channel,
            send=self._send_evidence,
            has_room=lambda: self._link.has_room,
            meeting=handle.meeting,
        )
        job = replace(job, channel=channel)
        self._collector = StepCollector(instruments, job, self._guard, self._send)
        self._mark = _new_mark()
        self._recorder_thread = start_recorder_thread()
        numbers = None if self._recorder_thread is None else self._recorder_thread.numbers
        self._link = handle.connect(self._collector.reduced_copies, self._mark, numbers)
        self._outbox = Outbox(self._link, handle.rank, partial(self._collector.call, "on_message"))
        self._inbox = Inbox(self._link, handle, self._collector, on_finding, sinks)
        self._hooks: list[Any] = [ModuleHook(model, self._before_forward, self._after_forward)]
        self._model = model
        self._inner = inner = job.wrapped.module
        self._hooks_inside = self._may_hook_inside(model)
        if self._hooks_inside:
            self._hooks.append(
                ModuleHook(inner, self._before_inner_forward, self._after_inner_forward)
            )
        for each in all_of(job.optimizer):
            before = ForeignHook(self._before_optimizer_step, compiled=True)
            after = ForeignHook(self._after_optimizer_step, compiled=True)
            self._hooks.append(each.register_step_pre_hook(before))
            self._hooks.append(each.register_step_post_hook(after))
            with contextlib.suppress(AttributeError):  # torchtitan's container has no such hooks
                self._hooks.append(each.register_state_dict_pre_hook(self._before_state_dict))
        stops = self._collector.listen(self._before_engine_step)
        self._hooks += [SimpleNamespace(remove=stop) for stop in stops]
        self._losses = BackwardLoss(self, models, self._take_seen_loss)
        self._hooks.append(self._losses)
        self._losses.install()
        self._parts: PartCalls | None = None  # once the training has done without forward passes
        self._may_see_parts = job.wrapped.kind.begins_in_parts
        _scopes.add(self)
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    # Calls of the user ---------------------------------------------------------------------

    @property
    def run_dir(self) -> Path | None:
        """The run's directory; None on all ranks but 0."""
        return self._handle.root.path

    @property
    def latest(self) -> StepReport | None:
        """The latest judged step of all workers; None before the first.

        The first access requests reports from the agent from then on.
        """
        if self._monitor is _Monitor.RUNNING:
            self._guard(self._inbox.subscribe)
        return self._inbox.latest

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings so far, each in its latest state."""
        if self._monitor is _Monitor.RUNNING:
            self._guard(self._inbox.read)
        return tuple(self._inbox.findings.values())

    @property
    def training(self) -> bool:
        """Whether the last forward pass of the model counts as one of the training."""
        return self._training

    @property
    def present_step(self) -> int:
        """The number of the step that this worker is in."""
        return self._collector.step

    @property
    def repeating(self) -> bool:
        """Whether the present forward pass is none of the training's own."""
        return self._collector.repeating

    @property
    def traffic(self) -> Traffic:
        """Bytes that this worker has exchanged with its agent so far."""
        return self._link.traffic

    def loss(
        self,
        value: Tensor | float,
        weight: Tensor | float | None = None,
        *,
        factor: Tensor | float | None = None,
        constant: Tensor | float | None = None,
        summed: tuple[Tensor | float, Tensor | float] | None = None,
        spare: bool = False,
    ) -> None:
        """Give the local loss of a micro-batch, in place of the one that ``backward`` shows.

        Without it, that is the model's ``.loss`` or the scalar on which ``backward`` is called.
        From the first call on, the latter does not count. What is no loss is declined in one line
        of the log, and the latter counts on.

        Args:
            value: The loss per label token before any averaging over workers: a scalar, or one
                per sample ``[B]`` (from which the dispersion by sampling alone follows).
            weight: Number of label tokens behind it, of the same shape; None: that of which a
                scalar ``value`` is the mean, if autograd shows it before the backward pass.
            factor: What ``value`` is over the loss per label token, where the training has scaled
                it already: ``W·n/N`` for a sum over n tokens that was divided by the N tokens of
                all W workers and multiplied by W.
            constant: For a loss of unknown make, the constant in ``factor`` (NaN: all of it), which
                is only taken out if it is one over the number of micro-batches. None: ``factor``
                is certain.
            summed: Number of label tokens that ``value`` sums over, and what the sum was divided
                by: the mean over tokens is recorded if that counts those of all workers, or of
                this one.
            spare: Whether this loss only counts when the backward pass does not go through the
                ``.loss`` of the model's output.
        """
        if in_backward() and not spare:  # inside a checkpoint's recomputation
            return
        more = {"factor": factor, "constant": constant, "summed": summed, "spare": spare}
        if not self._collector.repeating:
            self._guard(partial(self._take_given_loss, **more), value, weight)

    def _take_given_loss(self, value: Any, weight: Any, **more: Any) -> None:
        problem = problem_of(value, weight, factor=more["factor"], constant=more["constant"])
        if problem:
            if not self._declined_loss:
                self._declined_loss = True
                _log.warning("%s; what backward shows is recorded in its place", problem)
            return
        self._losses.remove()
        self._collector.give_loss(value, weight, **more)

    def _take_seen_loss(self, value: Any, weight: Any = None, **more: Any) -> None:
        if not self._collector.repeating:
            self._guard(partial(self._collector.give_loss, spare=True, **more), value, weight)

    def batch(self, samples: Sequence[Any] | Tensor | Mapping[str, Any]) -> None:
        """Give the identity of the local batch's samples, in place of a digest of the inputs.

        Call it before the forward pass of the batch.

        Args:
            samples: One id per sample (integers, strings, or other plain values: bytes, tuples,
                UUIDs), by which all ranks tell the samples of the whole data set apart, or the
                tensors of the batch. Anything else is declined in one line of the log.
        """
        self._guard(self._collector.give_samples, samples)

    def rollout(
        self, trainer_logps: Tensor, rollout_logps: Tensor, mask: Tensor | None = None
    ) -> None:
        """Give the log-probabilities of trainer and rollout for the same tokens.

        Their mean absolute difference is recorded as ``rollout_gap`` and compared between workers.
        Call it before the backward pass of the micro-batch, once for each batch of rollouts: later
        passes over it show how far the policy has moved since. Nothing waits for a device.

        Args:
            trainer_logps: Log-probabilities of the tokens that were drawn, by the trainer, in
                nats, of any shape such as ``[B, n]``.
            rollout_logps: The same by the engine that drew them, on the same device. Tokens
                without a finite value do not count.
            mask: Which tokens count, of the same shape; None for all. Values that cannot be
                compared are declined in one line of the log.
        """
        if not (self._collector.repeating or in_backward()):
            self._guard(self._collector.give_rollout, trainer_logps, rollout_logps, mask)

    def canary(self) -> None:
        """Request a canary, on all ranks in the same step.

        Some steps later all workers run the same two batches of the training, forward and
        backward, and their results are compared. Training goes on as it would have, bit for bit.
        """
        if not self._collector.ask("canary"):
            _log.warning("scope.canary() does nothing in this run: canaries are off, see the log")

    def verify(self) -> None:
        """Request a reference step, on all ranks in the same step.

        The gradient of the next step that begins is computed again before the optimizer is called,
        one micro-batch at a time and without the wrapper, and compared with the optimizer's
        gradient; a finding ``verify.…`` has the result. So is the optimizer's update of some whole
        parameters, with a finding ``update.…``. Training goes on as it would have, bit for bit.
        """
        self._collector.ask("reference")
        self._collector.ask("update")

    def pause(self) -> None:
        """Stop measuring gradients; losses and samples are still recorded."""
        self._collector.paused = True

    def resume(self) -> None:
        """Measure gradients again, from the next step on."""
        self._collector.paused = False

    @property
    def _closed(self) -> bool:
        return self._monitor in (_Monitor.CLOSING, _Monitor.CLOSED)

    def until_closed(self, *hooks: Any) -> None:
        """Call ``remove()`` of hooks, or of replaced parts of a framework, at the end."""
        self._hooks.extend(hooks)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Send all steps, wait until the run is written, and remove all hooks.

        Args:
            timeout: Seconds to wait for the other workers' last step, and for a run directory that
                does not answer; longer only while the agent works. Sinks in this process have
                another 5 s.
        """
        self._close(timeout)

    def _close(self, timeout: float, cause: BaseException | None = None) -> None:
        """Close the scope; ``cause`` is what has interrupted the training."""
        interrupted = cause is not None
        if self._closed or os.getpid() != self._pid:  # not in a forked process
            return
        if not interrupted:
            self._guard(self._collector.call, "see_saved")
        self._guard(partial(self._collector.close_step, interrupted=interrupted, last=True))
        self._monitor = _Monitor.CLOSING
        settled = self._guard.open
        self._guard.open = False
        crashed = _crashed(cause) and self._outbox.num_sent > 0
        self._announce_place(crash_line if crashed else None)  # a launcher may kill it now
        try:
            for hook in self._hooks:
                hook.remove()
            self._collector.remove()
            if settled:
                self._finish(timeout, cause)
        except RankscopeError as error:
            self._off_after = self._collector.step - 1
            self._warn(error)
        finally:  # Ctrl-C ends the wait; sent frames are not lost
            self._monitor = _Monitor.CLOSED
            atexit.unregister(self._at_exit)
            self._link.close()
            if self._mark is not None:
                self._mark.close()
            if self._recorder_thread is not None:
                self._recorder_thread.close()
            self._inbox.close_sinks()
            ends = self._inbox.done or self._off_after is not None
            if self._handle.agent is not None and ends:
                self._handle.agent.wait(_AGENT_SECONDS)
        self._announce_place(None if crashed and self._inbox.recorded else self._last_line)
        self._inbox.notify(None)

    def _last_line(self, place: str) -> str:
        begun = self._outbox.num_sent > 0
        return last_line(place, self._inbox.done, self._inbox.recorded, begun, self._watched_part())

    def _watched_part(self) -> WatchedPart | None:
        """Return what was watched before the monitor switched itself off; None if it did not."""
        if self._off_after is None or self._handle.root.path is None:
            return None
        steps = None
        with contextlib.suppress(Exception):  # the record may be unreadable
            steps = step_range(self._handle.root.path, Table.STEPS)
        return WatchedPart(self._off_after, -1 if steps is None else steps[1])

    def _announce_place(self, line: Callable[[str], str] | None) -> None:
        """Print a line on the place of the run, on the rank that ends it."""
        if line is not None and self._announces_end and self._handle.root.path is not None:
            place = place_of(self._handle.root.path, self._handle.root.store)
            job = self._handle.root.info.get("job")  # where others of its groups have runs, too
            where = f"{name_ranks(job['ranks'], of_job=True)}: " if job else ""
            announce(logging.INFO, f"{where}{line(place)}")

    def _finish(self, timeout: float, cause: BaseException | None) -> None:
        """Send the remaining steps, wait for the last frame; LinkError if the agent has ended."""
        self._outbox.flush()
        self._send_bye(complete=cause is None, why=_how_it_ended(cause))
        until = time.monotonic() + timeout
        latest = time.monotonic() + _BUSY_SECONDS
        is_busy = partial(self._agent_is_busy, timeout)
        is_busy()
        self._link.drain(timeout)
        while not self._inbox.done:
            if time.monotonic() >= until:
                if timeout <= CLOSE_SECONDS_AFTER_ERROR or until >= latest or not is_busy():
                    break
                until = min(until + timeout, latest)
            if self._inbox.wait(min(until - time.monotonic(), 0.5)):
                until = time.monotonic() + timeout  # the agent is still busy
                latest = until + _BUSY_SECONDS
            else:
                self._link.drain(0.0)  # it may have been stopped only now
        if not self._inbox.done and cause is None:
            warns = self._handle.agent is not None and timeout >= CLOSE_SECONDS_AFTER_ERROR
            level = logging.WARNING if warns else logging.INFO
            _log.log(
                level,
                "the monitor's agent still works or waits for other ranks or hosts; the training "
                "need not wait, and the agent closes the record by itself, later",
            )

    def _agent_is_busy(self, seconds: float) -> bool:
        """Return whether the agent that this rank has started was busy since the last call.

        ``seconds`` have passed since. On a busy machine it may wait for a CPU, or still start: it
        gives way to all others.
        """
        agent = self._handle.agent
        before = self._agent_seconds
        self._agent_seconds = now = (0.0, 0.0) if agent is None else agent.busy_seconds()
        computed, waited = now[0] - before[0], now[1] - before[1]
        return computed >= _BUSY_SHARE * seconds or computed + waited >= _READY_SHARE * seconds

    def _send_bye(self, *, complete: bool, why: str) -> None:
        bye = {
            "complete": complete, "why": why, "without_room": self._outbox.num_without_room
        }  # fmt: skip
        self._link.send(FrameKind.BYE, json.dumps(bye).encode(), rank=self._handle.rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close(CLOSE_SECONDS_AFTER_ERROR, error)

    # Hooks of torch, in the training thread -----------------------------------------------

    def _before_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        if self._collector.repeating:
            return
        self._forward = _Forward.OUTER
        self._hooks_inside = self._may_hook_inside(model)
        self._training = self._collector.trains(model)
        if self._training:
            if PACE.lead is not None:
                self._guard(self._keep_pace, self._collector.step + 1 - PACE.lead)
            self._guard(self._begin_forward, model, args, kwargs)
            self._beat("forward")
            if self._monitor is _Monitor.RUNNING:
                self._inbox.notify(self._collector.step)

    def _may_hook_inside(self, model: Any) -> bool:
        """Return whether the model that is called holds another one, of which we see the calls."""
        inner = self._inner
        whole = is_compiled(model) or is_compiled(inner) or not takes_hooks(inner)
        return inner is not self._model and not whole

    def _begin_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        self._inbox.read()
        self._collector.begin_forward(model, args, kwargs)
        if not self._hooks_inside:
            self._collector.call("on_module_inputs", args, kwargs)

    def _keep_pace(self, step: int) -> None:
        """Wait until the root has judged a step, so that its decisions come in time."""
        start = time.perf_counter()
        if step >= self._handle.first_step:
            self._outbox.flush()
            self._inbox.await_report(step)
        self._guard.leave_out(time.perf_counter() - start)

    def _before_inner_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        """Run a canary that is due; detect a forward pass that bypasses the wrapper."""
        if self._collector.repeating:
            return
        if self._forward is _Forward.OUTER:
            if not self._hooks_inside:
                return
            self._guard(self._collector.call, "enter_module")
            self._guard(self._collector.call, "on_module_inputs", args, kwargs)
            if self._collector.run_due:
                self._guard(self._collector.let_run_model, self._model)
            return
        self._forward = _Forward.NONE
        if not is_training(model):
            self._guard(self._collector.call, "before_apart")
            return
        if log_if_rewrapped(model, self._model):
            self._close(CLOSE_SECONDS)
        else:
            self._forward = _Forward.BYPASSING
            self._guard(partial(self._collector.begin_micro_batch, args, kwargs, bypassed=True))
            self._guard(self._collector.call, "on_module_inputs", args, kwargs)

    def _after_inner_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self._collector.repeating:
            return
        bypassing = self._forward is _Forward.BYPASSING
        if bypassing or self._hooks_inside:
            self._guard(self._collector.call, "on_module_output", output)
        if bypassing:
            self._forward = _Forward.NONE
            self._guard(self._collector.see_output, output, kwargs)

    def _after_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self._collector.repeating:
            return
        self._forward = _Forward.NONE
        if not self._hooks_inside:
            self._guard(self._collector.call, "on_module_output", output)
        self._guard(self._collector.end_forward, model, args, kwargs, output)
        if self._training:
            self._beat("backward")

    def _before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not has_closure(args, kwargs) and not traced():
            self._guard(self._collector.begin_optimizer_step, optimizer)
            if self._collector.recompute_due:
                self._guard(self._collector.recompute)

    def see_other_update(self, optimizer: Any) -> None:
        """Notice a call of an optimizer that may be none of the run's."""
        if not (self._closed or traced()):
            self._guard(self._collector.call, "see_other_update", optimizer)

    def _before_engine_step(self, *args: Any, **kwargs: Any) -> None:
        if self._collector.recompute_due:
            self._guard(self._collector.recompute)

    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if traced():
            return
        if has_closure(args, kwargs):
            self._guard(self._collector.begin_optimizer_step, optimizer)
        self._guard(self._collector.count_optimizer_step, optimizer)
        if self._collector.unseen and self._may_see_parts:
            self._guard(self._see_parts)
        self._beat("step")
        if self._collector.by_backward:  # no forward pass comes in which the inbox is read
            self._guard(self._inbox.read)
            if self._monitor is _Monitor.RUNNING:
                self._inbox.notify(self._collector.step)

    def _see_parts(self) -> None:
        """See the calls of the model's parts from now on, or let go of those that do not matter."""
        if self._parts is not None:
            self._parts.end_step()
            return
        guard = self._guard
        collector = self._collector
        self._parts = PartCalls(
            self._inner,
            lambda: self._forward is _Forward.NONE and not (collector.repeating or in_backward()),
            lambda: collector.wants_all_parts,
            partial(guard, collector.begin_part),
            partial(guard, collector.call, "after_part"),
        )
        self._hooks.append(self._parts)

    def _before_state_dict(self, optimizer: Any) -> None:
        self._guard(self._collector.call, "see_saved")

    def _beat(self, phase: str) -> None:
        """Write the place of the training into memory that the agent reads in a hang."""
        if self._mark is not None and self._guard.open:
            self._mark.beat(self._collector.step, phase)

    def _send(self, step: LocalStep) -> None:
        self._outbox.send(step)

    def _send_evidence(self, name: str, step: int, content: Content) -> None:
        self._link.send(FrameKind.EVIDENCE, tag(name, content), rank=self._handle.rank, step=step)

    # Failures ------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        if self._monitor is _Monitor.RUNNING:
            self._monitor = _Monitor.OFF
            self._off_after = self._collector.step - 1
            self._guard.open = False
            self._warn(error)
            with contextlib.suppress(Exception):  # the link itself may have failed
                self._send_bye(complete=False, why="its monitor has switched itself off")
            self._link.close()

    def _warn(self, error: Exception) -> None:
        foreseen = isinstance(error, RankscopeError)  # its message needs no traceback
        ended = isinstance(error, AgentEndedError)  # each host's first rank warns
        _log.log(
            logging.INFO if ended and self._handle.agent is None else logging.WARNING,
            "rankscope has switched itself off on rank %d after step %d; training goes on: %s",
            self._handle.rank,
            self._collector.step - 1,
            error if foreseen else f"{type(error).__name__}: {error}",
            exc_info=None if foreseen else error,
        )
        if ended:
            with contextlib.suppress(Exception):
                self._handle.note_end_of_agent()

    def _leave_to_parent(self) -> None:
        """Switch off in a process that was forked from the training's."""
        if not self._closed:
            self._monitor = _Monitor.OFF
        self._guard.open = False


def _new_mark() -> ProgressMark | None:
    try:
        return ProgressMark()
    except OSError as error:
        _log.debug("hangs will be reported without the places of the ranks: %s", error)
        return None


_scopes: "weakref.WeakSet[Scope]" = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for scope in tuple(_scopes):
        scope._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _crashed(cause: BaseException | None) -> bool:
    """Return whether an error ended a training; one that nobody raised has no traceback."""
    return isinstance(cause, Exception) and cause.__traceback__ is not None


def _how_it_ended(cause: BaseException | None) -> str:
    if cause is None:
        return "it closed its scope"
    if _crashed(cause) or (isinstance(cause, SystemExit) and type(cause) is not SystemExit):
        return f"its training raised {type(cause).__name__}"
    return "its training was interrupted"


def _close_at_exit(reference: "weakref.ref[Scope]") -> None:
    """Close the scope of a script that never called ``close``.

    By then, ``sys.last_value`` holds the exception that ended the script.
    """
    scope = reference()
    if scope is not None:
        scope._close(1.0, getattr(sys, "last_value", None))
