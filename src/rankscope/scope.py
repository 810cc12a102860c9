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
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rankscope.capture import DDPTap, HostCopy, LossMeter, SampleMeter, Sketcher
from rankscope.core.finding import Finding
from rankscope.core.step import GatheredStep, StepReport
from rankscope.core.summarize import summarize
from rankscope.diagnose.diagnosis import Diagnosis
from rankscope.exchange import Channel, Courier, Goodbye, Layout, LocalStep
from rankscope.record import RunWriter

_log = logging.getLogger("rankscope")

OnFinding = Callable[[Finding], None]

CLOSE_SECONDS = 10.0
"""How long ``close`` waits for the other workers' last step: they close at about the same time."""


class Scope:
    """A running monitor; made by :func:`rankscope.watch`.

    Args:
        model: The DDP model.
        optimizer: Its optimizer, if known.
        sketcher: Measures gradients.
        channel: Gathers steps.
        writer: Records the run; None on all ranks but 0.
        every: Gradients are measured in steps that are multiples of this.
        on_finding: Called with each finding that opens or changes.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | None,
        sketcher: Sketcher,
        channel: Channel,
        *,
        writer: RunWriter | None,
        every: int,
        on_finding: OnFinding | None,
    ) -> None:
        self._writer = writer
        self._every = every
        self._on_finding = on_finding
        self._off = False
        self._closed = False
        self._paused = False
        self._step = 0
        self._overhead = 0.0
        self._last_step_time = time.perf_counter()
        self._optimizer_steps = float("nan") if optimizer is None else 0.0
        self._lr = float("nan")
        self._latest: StepReport | None = None
        self._channel = channel
        self._losses = LossMeter(shifted="CausalLM" in type(model.module).__name__)
        self._samples = SampleMeter()
        self._diagnosis = Diagnosis(channel.num_workers)
        self._courier = Courier(
            channel,
            Layout(sketcher.width),
            every=every,
            deliver=self._on_step,
            idle=self._on_idle,
            ended=self._on_end,
        )
        self._tap = DDPTap(model, sketcher, self._guarded)
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
        self._guarded(partial(self._losses.give, value, weight))

    def batch(self, samples: Sequence[int | str] | Tensor | Mapping[str, Any]) -> None:
        """Give the identity of the local batch's samples, in place of a digest of the inputs.

        Call it before the forward pass of the batch.

        Args:
            samples: One id per sample (integers or strings), or the tensors of the batch.
        """
        self._guarded(partial(self._give_batch, samples))

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
        self._guarded(self._finish_step)
        self._closed = True
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
            self._guarded(partial(self._begin_micro_batch, args, kwargs))

    def _after_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._guarded(partial(self._losses.see, output, kwargs))

    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._guarded(partial(self._count_optimizer_step, optimizer))

    def _give_batch(self, samples: Any) -> None:
        self._finish_step()
        self._samples.give(samples)

    def _begin_micro_batch(self, args: Any, kwargs: Any) -> None:
        self._finish_step()
        self._tap.begin_forward(measure=not self._paused and self._step % self._every == 0)
        self._samples.see(args, kwargs)

    def _count_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer_steps += 1
        lr = optimizer.param_groups[0]["lr"]
        self._lr = float(lr) if not isinstance(lr, Tensor) or lr.device.type == "cpu" else self._lr

    def _finish_step(self) -> None:
        """Close the books of a step, once its synchronising backward pass has run."""
        if not self._tap.complete:
            return
        now = time.perf_counter()
        named = self._samples.named
        gradient = self._tap.collect()
        local = LocalStep(
            step=self._step,
            sketch=None if gradient is None else HostCopy(gradient.sketch),
            squared_norm=None if gradient is None else HostCopy(gradient.squared_norm),
            losses=self._losses.collect(),
            samples=self._samples.collect(),
            values={
                "lr": self._lr,
                "optimizer_steps": self._optimizer_steps,
                "samples_named": named,
                "step_seconds": now - self._last_step_time,
                "overhead_seconds": self._overhead,
            },
        )
        self._step += 1
        self._overhead = 0.0
        self._optimizer_steps *= 0  # stays NaN when no optimizer is known
        self._last_step_time = now
        self._courier.send(local.to_message)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the training thread: timed, and unable to raise into the training."""
        if self._off or self._closed:
            return
        start = time.perf_counter()
        try:
            work()
        except Exception as error:
            self._fail(error)
            self._courier.leave()
        self._overhead += time.perf_counter() - start

    # What the courier calls, in the monitor's thread ---------------------------------------

    def _on_step(self, gathered: GatheredStep) -> None:
        report = summarize(gathered)
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

    def _fail(self, error: Exception) -> None:
        if self._off:
            return
        self._off = True
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
