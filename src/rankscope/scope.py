"""The :class:`Scope`: capture → exchange → core → diagnose → record, for one watched job.

The scope holds the state of a watched job and no mathematics. Its rule above all others: it never
raises into the training loop, never blocks it, and leaves every bit of the training as it was. A
failure of its own switches it off with one warning.
"""

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from rankscope.books import StepBooks
from rankscope.canary import LiveCanary
from rankscope.capture.foreign import ForeignHook
from rankscope.capture.guard import Guard
from rankscope.core.finding import Finding
from rankscope.core.step import StepReport
from rankscope.core.summarize import summarize
from rankscope.diagnose.diagnosis import Diagnosis
from rankscope.errors import RankscopeError, RunError
from rankscope.exchange import Channel, Courier, LocalStep, Outcome, Traffic, choose_gathering
from rankscope.exchange.heartbeat import Heartbeat, Phase
from rankscope.instruments import Instruments
from rankscope.record import RunWriter
from rankscope.sinks import Sinks
from rankscope.wrapping import has_closure, is_compiled, tell_if_wrapped_anew

_log = logging.getLogger("rankscope")

OnFinding = Callable[[Finding], None]

CLOSE_SECONDS = 10.0
"""How long ``close`` waits for the other workers' last step: they close at about the same time."""

CLOSE_SECONDS_AFTER_ERROR = 3.0
"""The same when the training raised: the others may never come."""


class Scope:
    """A running monitor; made by :func:`rankscope.watch`.

    Args:
        model: What the training calls: the wrapped model, or the compiled wrapper.
        optimizer: Its optimizer, if known.
        instruments: What measures the model's gradients, and how.
        channel: Gathers steps.
        writer: Records the run; None on all ranks but 0.
        diagnosis: What watches the steps; it knows the number of the first one.
        on_finding: Called with each finding that opens or changes.
        heartbeat: Tells the other ranks where this one is; None without.
        canary: Replays batches on all workers; None without.
        sinks: Where the numbers go besides the record; None on all ranks but 0.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        instruments: Instruments,
        channel: Channel,
        *,
        writer: RunWriter | None,
        diagnosis: Diagnosis,
        on_finding: OnFinding | None,
        heartbeat: Heartbeat | None = None,
        canary: LiveCanary | None = None,
        sinks: Sinks | None = None,
    ) -> None:
        self._writer = writer
        self._sinks = sinks
        self._on_finding = on_finding
        self._off = self._closed = self._close_asked = self._inside = self._bypassing = False
        self._pid = os.getpid()
        self._latest: StepReport | None = None
        self._channel = channel
        self._heartbeat = heartbeat
        self._canary = canary
        self._governor = instruments.governor
        self._diagnosis = diagnosis
        self._saves_state = True
        self._guard = Guard(self._fail_and_leave)
        first, send, take_turn = diagnosis.next_step, self._send, self._take_turn
        self._books = StepBooks(instruments, optimizer, self._guard, send, take_turn, first, canary)
        self._courier = Courier(
            choose_gathering(channel, self._books.layout),
            interval_at=self._governor.interval_at,
            deliver=self._on_step,
            idle=self._on_idle,
            ended=self._on_end,
            first_step=first,
        )
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(ForeignHook(self._before_forward), with_kwargs=True),
            model.register_forward_hook(ForeignHook(self._after_forward), with_kwargs=True),
        ]
        self._model, inner = model, instruments.module
        if inner is not model and not is_compiled(model) and not is_compiled(inner):
            hook = partial(ForeignHook, compiled=False)
            before, after = hook(self._before_inner_forward), hook(self._after_inner_forward)
            self._hooks.append(inner.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.append(inner.register_forward_hook(after, with_kwargs=True))
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_optimizer_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_optimizer_step))
        atexit.register(_close_at_exit, weakref.ref(self))

    # What the user calls -------------------------------------------------------------------

    @property
    def run_dir(self) -> Path | None:
        """The run's directory; None on all ranks but 0."""
        return None if self._writer is None else self._writer.path

    @property
    def latest(self) -> StepReport | None:
        """The last step that was gathered from all workers; None before the first."""
        return self._latest

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings so far, each in its latest state."""
        return tuple(self._diagnosis.findings)

    @property
    def traffic(self) -> Traffic:
        """Bytes that this worker has sent and received on the side channel so far."""
        return self._channel.traffic

    def loss(
        self,
        value: Tensor | float,
        weight: Tensor | float | None = None,
        *,
        factor: Tensor | float | None = None,
        spare: bool = False,
    ) -> None:
        """Give the local loss of a micro-batch, when the model's output has no ``.loss``.

        Args:
            value: The loss per label token before any averaging over workers: a scalar, or one
                per sample ``[B]`` (which tells how much dispersion sampling alone would give).
            weight: Number of label tokens behind it, of the same shape.
            factor: What ``value`` is over the loss per label token, where the training has scaled
                it already: ``W·n/N`` for a sum over n tokens that was divided by the N tokens of
                all W workers and multiplied by W.
            spare: Whether this loss only counts when the backward pass does not go through the
                ``.loss`` of the model's output.
        """
        give = partial(self._books.give_loss, factor=factor, spare=spare)
        self._guard(partial(give, value, weight))

    def batch(self, samples: Sequence[Any] | Tensor | Mapping[str, Any]) -> None:
        """Give the identity of the local batch's samples, in place of a digest of the inputs.

        Call it before the forward pass of the batch.

        Args:
            samples: One id per sample (integers, strings, or what else stands for itself: bytes,
                tuples, UUIDs), or the tensors of the batch. What cannot be an id is declined in
                one line of the log.
        """
        self._guard(partial(self._books.give_samples, samples))

    def canary(self) -> None:
        """Ask for a canary, on all ranks in the same step.

        Some steps later all workers run the same two batches of the training, forward and
        backward, and their results are compared. Training goes on as it would have, bit for bit.
        """
        if self._canary is None:
            _log.warning("scope.canary() does nothing in this run: canaries are off, see the log")
        else:
            self._canary.ask()

    def pause(self) -> None:
        """Stop measuring gradients; losses and samples are still recorded."""
        self._books.paused = True

    def resume(self) -> None:
        """Measure gradients again, from the next step on."""
        self._books.paused = False

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Deliver what was measured, finish the run's directory, and take all hooks out.

        In ``on_finding`` it only asks for it: the scope closes at the next forward pass.

        Args:
            timeout: Seconds to wait for the other workers' last step.
        """
        self._close(timeout)

    def _close(self, timeout: float, *, interrupted: bool = False) -> None:
        if self._closed or os.getpid() != self._pid:  # what a forked process ends is its own
            return
        if self._courier.is_current:  # it cannot wait for itself
            if not self._close_asked:
                _log.info("on_finding has closed the scope, which ends at the next forward pass")
            self._close_asked = True
            return
        self._guard(partial(self._books.close_step, interrupted=interrupted))
        self._closed = True
        delivered = self._guard.open = False
        try:
            for hook in self._hooks:
                hook.remove()
            self._books.remove()
            self._courier.leave()
            delivered = self._courier.join(timeout)
            if self._heartbeat is not None:
                self._heartbeat.stop()
            if delivered:
                self._channel.close()
        finally:  # Ctrl-C cuts the wait short, and loses nothing that was delivered
            settled = delivered and not self._off
            whole = settled and not interrupted
            self._finish_run("complete" if whole else "incomplete", settled=settled)
            self._off = True

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
            self._close(CLOSE_SECONDS_AFTER_ERROR, interrupted=True)

    # What torch calls, in the training thread ----------------------------------------------

    def _before_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        if self._close_asked:
            self._close(CLOSE_SECONDS)
        self._inside = True
        if self._books.trains(model):
            self._guard(partial(self._books.begin_forward, model, args, kwargs))
            self._beat("forward")

    def _before_inner_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        """Run a canary that is due; notice a forward pass past the wrapper, which reduces none."""
        self._bypassing = not self._inside and model.training and torch.is_grad_enabled()
        if self._bypassing and tell_if_wrapped_anew(model, self._model):
            self._bypassing = False
            self._close(CLOSE_SECONDS)
        elif self._bypassing:
            self._guard(partial(self._books.begin_micro_batch, args, kwargs, bypassed=True))
        elif self._inside:
            self._guard(partial(self._books.run_canary, self._model))

    def _after_inner_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self._bypassing:
            self._bypassing = False
            self._guard(partial(self._books.see_output, output, kwargs))

    def _after_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        self._inside = False
        self._guard(partial(self._books.end_forward, model, args, kwargs, output))
        if self._books.trains(model):
            self._beat("backward")

    def _before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not has_closure(args, kwargs):
            self._guard(self._books.begin_optimizer_step)

    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if has_closure(args, kwargs):
            self._guard(self._books.begin_optimizer_step)
        self._guard(partial(self._books.count_optimizer_step, optimizer))
        self._beat("step")

    def _beat(self, phase: Phase) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat(self._books.step, phase)

    def _send(self, local: LocalStep) -> None:
        self._courier.send(local.to_message)

    def _take_turn(self) -> None:
        self._courier.take_turn()

    # What the courier calls, in the monitor's thread ---------------------------------------

    def _on_step(self, outcome: Outcome) -> None:
        decision = self._governor.observe(
            outcome.step, outcome.observed, outcome.overhead_seconds, outcome.step_seconds
        )
        if decision is not None and self._channel.rank == 0:
            _log.info("%s", decision)
        if outcome.gathered is None:
            return
        report = summarize(outcome.gathered)
        findings = self._diagnosis.observe(report, self._courier.give_way)
        if self._canary is not None:
            self._canary.on_step(report.gathered, findings, lambda: self._diagnosis.findings)
        self._latest = report
        if self._writer is not None:
            self._courier.give_way()
            self._writer.add(report)
            self._writer.add_findings(findings)
        if self._sinks is not None:
            self._sinks.step(report, findings)
        self._tell(findings)

    def _on_idle(self) -> None:
        if self._writer is not None and self._writer.flush_if_due():
            self._save_state(self._writer)

    def _on_end(self, error: BaseException) -> None:
        self._fail(error)
        self._finish_run("incomplete", settled=False)

    def _tell(self, findings: Sequence[Finding]) -> None:
        if self._on_finding is None:
            return
        for finding in findings:
            try:
                self._on_finding(finding)
            except BaseException:  # sys.exit() would only end this thread
                _log.exception("on_finding raised for %s; training and monitor go on", finding.id)

    def _fail_and_leave(self, error: Exception) -> None:
        self._fail(error)
        self._courier.leave()

    def _fail(self, error: BaseException) -> None:
        if self._off:
            return
        self._off = True
        self._guard.open = False
        if self._heartbeat is not None:  # steps are no longer counted: each would seem to hang
            self._heartbeat.stop(0.0)
        foreseen = isinstance(error, RankscopeError)  # such a message says it all
        _log.warning(
            "rankscope has switched itself off on rank %d after step %d; training goes on. %s",
            self._channel.rank,
            self._books.step - 1,
            error if foreseen else f"{type(error).__name__}: {error}",
            exc_info=None if foreseen else error,
        )

    def _finish_run(self, status: str, *, settled: bool) -> None:
        """Close the run; what detectors remember is only saved when no step is under way."""
        try:
            last = self._diagnosis.close()  # on every rank, so that all know the same findings
            if self._writer is None:
                return
            self._writer.add_findings(last)
            if self._sinks is not None:
                self._sinks.findings(last)
            self._writer.flush()
            if settled:
                self._save_state(self._writer, at_end=True)
            self._writer.close(status, overhead=self._governor.summary())
        except Exception as error:
            self._fail(error)
        finally:
            if self._sinks is not None:
                self._sinks.close()

    def _save_state(self, writer: RunWriter, *, at_end: bool = False) -> None:
        """Write what the detectors remember; if it cannot be told, the run goes on all the same.

        Raises:
            RunError: It cannot be written, as the tables cannot be either.
        """
        if not self._saves_state:
            return
        try:
            writer.save_state(self._diagnosis.state, at_end=at_end)
        except RunError:
            raise
        except Exception as error:
            self._saves_state = False
            _log.warning("a restarted job cannot go on from %s: %s", writer.path, error)


def _close_at_exit(reference: "weakref.ref[Scope]") -> None:
    """Write what a script leaves behind that never called ``close``; waits for nobody.

    Python has noted the exception that ends a script before it comes here.
    """
    scope = reference()
    if scope is not None:
        scope._close(1.0, interrupted=getattr(sys, "last_value", None) is not None)
        scope._channel.abandon()
