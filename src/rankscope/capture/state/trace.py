"""A trace of a training: every parameter after each step, every gradient after its reduction.

``rankscope diff`` compares the traces of two runs tensor by tensor. See
:mod:`rankscope.capture.state.trace_reading` for what is read of a tensor.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.capture.names import canonical_name
from rankscope.capture.state.leaves import digest_optimizer
from rankscope.capture.state.plan import Place, Slice
from rankscope.capture.state.trace_reading import UNREADABLE, PendingRow, PendingRows, TraceReader
from rankscope.core.replicas import TRACE_WIDTH, StateKind, Trace


@dataclass(frozen=True, slots=True)
class PendingTrace:
    """A step's trace on its way to the host.

    Attributes:
        rows: In the order in which they were read.
        initial: What the model held before the step, in the first one.
    """

    rows: tuple[PendingRows, ...]
    initial: PendingRows | None = None

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        initial = self.initial is None or self.initial.ready
        return initial and all(rows.ready for rows in self.rows)

    def read(self) -> Trace:
        """Wait for the device."""
        initial = None if self.initial is None else self.initial.read()
        return replace(_joined([rows.read() for rows in self.rows]), initial=initial)


class TraceMeter:
    """Traces a training on one rank; all calls come on the training thread, none waits.

    Args:
        module: The model, without what wraps it for data parallelism.
        parameters: The parameters that are trained, by canonical name, whole on this rank.
        device: Where they live.
        optimizer: The optimizer, if known: what it remembers at the start is digested.
        every: Steps that are multiples of this are traced.
        leave_out: Takes the seconds that were spent, for they are no part of the budget.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, Tensor],
        device: torch.device,
        optimizer: torch.optim.Optimizer | None,
        *,
        every: int,
        leave_out: Callable[[float], None],
    ) -> None:
        self._module = module
        self._parameters = parameters
        self._optimizer = optimizer
        self._every = every
        self._leave_out = leave_out
        self._reader = TraceReader(device)
        self._step = -1
        self._due = False
        self._begun = False  # the model as it was at the start has been read
        self._initial: PendingRows | None = None
        self._reduced: PendingRows | None = None
        self._since_reduced = 0.0
        self.busy_seconds = 0.0
        """What tracing took between the last two reductions: it kept this rank, and no other."""

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Begin a step, unless it has begun already; before its first forward pass."""
        if self._step == step:
            return
        self._step = step
        self._due = step % self._every == 0 and not paused
        if not self._begun:
            self._begun = True
            start = time.perf_counter()
            self._initial = self._reader.read(self._state(), self._remembered())
            self._leave_out(self._spent(start))

    def see_reduced(self) -> None:
        """Read the gradients right after the reduction; the last call in a step counts."""
        self.busy_seconds, self._since_reduced = self._since_reduced, 0.0
        if not self._due:
            return
        start = time.perf_counter()
        gradients = (
            (StateKind.REDUCED, name, parameter.grad)
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        )
        self._reduced = self._reader.read(gradients)
        self._leave_out(self._spent(start))

    def collect(self) -> tuple[PendingTrace | None, float]:
        """Read the parameters after the step.

        Returns:
            The step's trace, None of one that is not traced, and the seconds that reading took.
        """
        start = time.perf_counter()
        rows = []
        if self._due and self._reduced is not None:
            trained = ((StateKind.PARAMETER, *each) for each in self._parameters.items())
            rows = [self._reduced, self._reader.read(trained)]
        trace = PendingTrace(tuple(rows), self._initial) if rows or self._initial else None
        self._initial = None
        self.abort()
        return trace, self._spent(start)

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._reduced = None
        self._step, self._due = -1, False

    def _spent(self, start: float) -> float:
        seconds = time.perf_counter() - start
        self._since_reduced += seconds
        return seconds

    def _state(self) -> Iterator[tuple[StateKind, str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            yield StateKind.PARAMETER, canonical_name(name), parameter
        for name, buffer in self._module.named_buffers():
            yield StateKind.BUFFER, canonical_name(name), buffer

    def _remembered(self) -> Iterator[PendingRow]:
        """Yield digests of what the optimizer knows of each parameter, where it knows anything."""
        for name, parameter in self._parameters.items():
            whole = Slice(Place(name, self._module, "", is_buffer=False), parameter.numel())
            try:
                digest = digest_optimizer(self._optimizer, parameter, whole)
            except Exception:  # whatever an optimizer keeps
                digest = UNREADABLE
            if digest.known or digest.pending:
                yield PendingRow(StateKind.OPTIMIZER, name, digest)


def _joined(traces: list[Trace]) -> Trace:
    if not traces:
        return Trace((), (), np.empty(0, np.int64), np.empty(0), np.empty((0, TRACE_WIDTH), "f4"))
    return Trace(
        tuple(kind for trace in traces for kind in trace.kinds),
        tuple(name for trace in traces for name in trace.names),
        np.concatenate([trace.digests_N for trace in traces]),
        np.concatenate([trace.norms_N for trace in traces]),
        np.concatenate([trace.sketches_NK for trace in traces]),
    )
