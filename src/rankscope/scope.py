"""The :class:`Scope`: capture → exchange → core → diagnose → record, for one watched job.

The scope holds the state of a watched job and no mathematics. Its rule above all others: it never
raises into the training loop, never blocks it, and leaves every bit of the training as it was. A
failure of its own switches it off with one warning.
"""

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from rankscope.capture import GradientHandover, LossMeter, OptimizerMeter, SampleMeter
from rankscope.capture.guard import Guard
from rankscope.core.finding import Finding
from rankscope.core.step import StepReport
from rankscope.core.summarize import summarize
from rankscope.diagnose.diagnosis import Diagnosis
from rankscope.exchange import Channel, Courier, Goodbye, LocalStep, Outcome, choose_gathering
from rankscope.instruments import Instruments
from rankscope.record import RunWriter

_log = logging.getLogger("rankscope")

OnFinding = Callable[[Finding], None]

CLOSE_SECONDS = 10.0
"""How long ``close`` waits for the other workers' last step: they close at about the same time."""


class Scope:
    """A running monitor; made by :func:`rankscope.watch`.

    Args:
        model: What the training calls: the wrapped model, or the compiled wrapper.
        optimizer: Its optimizer, if known.
        instruments: What measures the model's gradients, and how.
        channel: Gathers steps.
        writer: Records the run; None on all ranks but 0.
        on_finding: Called with each finding that opens or changes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        instruments: Instruments,
        channel: Channel,
        *,
        writer: RunWriter | None,
        on_finding: OnFinding | None,
    ) -> None:
        self._writer = writer
        self._on_finding = on_finding
        self._off = self._closed = self._paused = False
        self._step = 0
        self._last_step_time = time.perf_counter()
        self._latest: StepReport | None = None
        self._channel = channel
        self._governor = instruments.governor
        self._losses = LossMeter(shifted=instruments.shifted_labels)
        self._samples = SampleMeter()
        self._optimizer = OptimizerMeter(optimizer)
        self._diagnosis = Diagnosis(channel.num_workers)
        self._guard = Guard(self._fail_and_leave)
        self._exact = instruments.exact
        self._tap = instruments.make_tap(self._guard, self._shadow_step)
        self._layout = replace(instruments.layout, reduced_copies=self._tap.reduced_copies)
        self._courier = Courier(
            choose_gathering(channel, self._layout),
            interval_at=self._governor.interval_at,
            deliver=self._on_step,
            idle=self._on_idle,
            ended=self._on_end,
        )
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]
        if optimizer is not None:
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

    def loss(self, value: Tensor | float, weight: Tensor | float | None = None) -> None:
        """Give the local loss of a micro-batch, when the model's output has no ``.loss``.

        Args:
            value: The loss per label token before any averaging over workers: a scalar, or one
                per sample ``[B]`` (which tells how much dispersion sampling alone would give).
            weight: Number of label tokens behind it, of the same shape.
        """
        self._guard(partial(self._losses.give, value, weight))

    def batch(self, samples: Sequence[int | str] | Tensor | Mapping[str, Any]) -> None:
        """Give the identity of the local batch's samples, in place of a digest of the inputs.

        Call it before the forward pass of the batch.

        Args:
            samples: One id per sample (integers or strings), or the tensors of the batch.
        """
        self._guard(partial(self._give_batch, samples))

    def pause(self) -> None:
        """Stop measuring gradients; losses and samples are still recorded."""
        self._paused = True

    def resume(self) -> None:
        """Measure gradients again, from the next step on."""
        self._paused = False

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Deliver what was measured, finish the run's directory, and take all hooks out.

        Args:
            timeout: Seconds to wait for the other workers' last step.
        """
        self._close(timeout, "complete")

    def _close(self, timeout: float, status: str) -> None:
        if self._closed:
            return
        self._guard(self._finish_step)
        self._closed = True
        self._guard.open = False
        for hook in self._hooks:
            hook.remove()
        self._tap.remove()
        self._courier.leave()
        delivered = self._courier.join(timeout)
        if delivered:
            self._channel.close()
        self._finish_run(status if delivered and not self._off else "incomplete")
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
            self._close(timeout=1.0, status="incomplete")

    # What torch calls, in the training thread ----------------------------------------------

    def _before_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._guard(partial(self._begin_micro_batch, args, kwargs))

    def _after_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._guard(partial(self._losses.see, output, kwargs))

    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._guard(partial(self._optimizer.count, optimizer))

    def _give_batch(self, samples: Any) -> None:
        self._finish_step()
        self._samples.give(samples)

    def _begin_micro_batch(self, args: Any, kwargs: Any) -> None:
        self._finish_step()
        due = self._step % self._governor.interval_at(self._step) == 0
        self._tap.begin_forward(measure=due and not self._paused)
        self._samples.see(args, kwargs)

    def _finish_step(self) -> None:
        """Close the books of a step, once its synchronising backward pass has ended."""
        if self._tap.complete:
            self._send_step()
        elif self._tap.aborted:  # the training caught what its backward pass raised
            self._tap.collect()
            self._losses.collect()
            self._samples.collect()

    def _shadow_step(self) -> None:
        """Take part in a step of the others, in ``join()`` after this rank's last batch."""
        self._guard(self._finish_step)
        self._guard(self._send_step)

    def _send_step(self) -> None:
        now = time.perf_counter()
        named = self._samples.named
        losses, grad_scale = self._losses.collect()
        local = LocalStep(
            step=self._step,
            gradient=self._collect_gradient(),
            losses=losses,
            grad_scale=grad_scale,
            samples=self._samples.collect(),
            values={
                **self._optimizer.collect(),
                "samples_named": named,
                "step_seconds": now - self._last_step_time,
                "overhead_seconds": self._guard.take_seconds(),
            },
        )
        self._step += 1
        self._last_step_time = now
        self._courier.send(local.to_message)

    def _collect_gradient(self) -> GradientHandover | None:
        measured = self._tap.collect()
        gram = None if self._exact is None else self._exact.take_gram()
        if measured is None:
            return None
        layout = self._layout
        return GradientHandover(
            measured,
            sketch_width=layout.sketch_width,
            group_width=layout.group_width,
            reduced_width=layout.reduced_width,
            gram=gram,
        )

    # What the courier calls, in the monitor's thread ---------------------------------------

    def _on_step(self, outcome: Outcome) -> None:
        self._governor.observe(
            outcome.step, outcome.observed, outcome.overhead_seconds, outcome.step_seconds
        )
        if outcome.gathered is None:
            return
        report = summarize(outcome.gathered)
        findings = self._diagnosis.observe(report)
        self._latest = report
        if self._writer is not None:
            self._writer.add(report)
            self._writer.add_findings(findings)
        self._tell(findings)

    def _on_idle(self) -> None:
        if self._writer is not None:
            self._writer.flush_if_due()

    def _on_end(self, error: Exception) -> None:
        self._fail(error)
        self._finish_run("incomplete")

    def _tell(self, findings: Sequence[Finding]) -> None:
        if self._on_finding is None:
            return
        for finding in findings:
            try:
                self._on_finding(finding)
            except Exception:
                _log.exception("on_finding raised for %s; training and monitor go on", finding.id)

    def _fail_and_leave(self, error: Exception) -> None:
        self._fail(error)
        self._courier.leave()

    def _fail(self, error: Exception) -> None:
        if self._off:
            return
        self._off = True
        self._guard.open = False
        reason = str(error) if isinstance(error, Goodbye) else f"{type(error).__name__}: {error}"
        _log.warning(
            "rankscope has switched itself off on rank %d after step %d; training goes on. %s",
            self._channel.rank,
            self._step - 1,
            reason,
            exc_info=None if isinstance(error, Goodbye) else error,
        )

    def _finish_run(self, status: str) -> None:
        if self._writer is None:
            return
        try:
            self._writer.add_findings(self._diagnosis.close())
            self._writer.close(status)
        except Exception as error:
            self._fail(error)


def _close_at_exit(reference: "weakref.ref[Scope]") -> None:
    """Write what a script leaves behind that never called ``close``; waits for nobody."""
    scope = reference()
    if scope is not None:
        scope.close(timeout=1.0)
