"""The interface of all wrappers to the monitor: taps on gradients."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch import Tensor

from rankscope.bus.probe import Probe
from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import GradientTotals

Guarded = Callable[..., None]
"""Runs a function, its first argument, on the other arguments: it can neither raise into the
training nor run after the monitor."""


class _HasGuard(Protocol):
    _guarded: Guarded


_Owner = TypeVar("_Owner", bound=_HasGuard)
_Args = ParamSpec("_Args")


def guarded(
    method: Callable[Concatenate[_Owner, _Args], None],
) -> Callable[Concatenate[_Owner, _Args], None]:
    """Run a method of an object under the guard that the object has in ``_guarded``."""

    @wraps(method)
    def run(self: _Owner, /, *args: _Args.args, **kwargs: _Args.kwargs) -> None:
        self._guarded(partial(method, self, *args, **kwargs))

    return run


class ReadReduced(StrEnum):
    """The totals to read of the reduced gradient, after the reduction and before any clipping."""

    OFF = "off"
    NORM = "norm"
    """Its squared norm, which the exact norm-weighted cosine needs (a second read)."""
    SKETCH = "sketch"
    """Its norm and sketch, which an audit of the reduction needs."""


@dataclass(frozen=True, slots=True)
class LocalGradient:
    """One worker's gradient in one step, on the gradient's device; None of what was not read.

    A tap may use the memory again in the next step.
    """

    totals: GradientTotals  # before the reduction, summed over the step's micro-batches
    reduced: GradientTotals | None = None
    """The part of the reduced gradient that this rank holds after the reduction: all of it under
    DDP, its shard under FSDP2. Its sketches are zero when only the norm was read."""
    micro_squared_norms: Tensor | None = None
    """Squared norm of each micro-batch's own gradient, in the units of ``totals``, float64 ``[M]``;
    None as well where there is a single one."""
    carried_over: Tensor | None = None
    """Whether the gradient held something before the step began (it was not zeroed), so that
    ``totals`` is not purely local, bool ``[]``; None when the tap cannot be misled in this way."""
    norm_estimated: bool = False
    """Whether the squared norms of ``totals`` are estimates, with a relative RMS error of about
    ``sqrt(2/k)``, since the gradient was only ever seen in parts."""
    accumulator_changes: Tensor | None = None  # between passes, see AccumulatorAudit.collect


def _ignore(*args: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class TapPlan:
    """What a tap measures, and whom it calls."""

    sketcher: Sketcher
    guarded: Guarded
    reduced: ReadReduced
    observer: Probe  # gets local gradients
    after_reduction: Sequence[Callable[[], None]] = ()
    """Called once the reduction is over, in order, before anything else touches the gradients."""
    shadowed: Callable[[], None] = _ignore
    """Called after each synchronising step that this rank only shadows, since it has run out of
    data inside ``model.join()``."""
    unawaited: Callable[[bool], None] = _ignore
    """Called in the hook of a backward pass's first gradient, if the pass was not noticed before
    (argument False), or no forward pass waited for it (True): it may announce one."""


class GradientTap(ABC):
    """Reads the local gradient during backward passes.

    A tap counts nothing and sends nothing: before each forward pass in training, the scope's call
    decides whether to measure the backward pass that follows.
    """

    reduced_copies: int
    """How many workers hold each element of the reduced gradient: W under DDP, 1 with FSDP2."""

    unreduced: bool = False
    """Whether the gradients hold something that no reduction has seen; False if unknown."""

    begins_anew: bool = False
    """Whether the training had used the step's gradient so far for something else.

    As of the last call of :meth:`notice_backward`: the gradient was taken away, and parameters had
    changed, as in sharpness-aware minimisation. Most taps cannot detect it.
    """

    def __init__(self, plan: TapPlan) -> None:
        self._sketcher = plan.sketcher
        self._guarded = plan.guarded
        self._observer = plan.observer
        self._after_reduction = plan.after_reduction
        self._reads = plan.reduced
        self._measure = False  # the backward passes that follow
        self._announce: Callable[[], None] | None = None  # a forward pass in evaluation mode
        self._reached: list[Callable[[], None]] = []  # called if the pass that runs trains

    @property
    def summed_workers(self) -> float:
        """How many workers' gradients make a reduced one: 1 for their mean, W for their sum."""
        return 1.0

    @abstractmethod
    def begin_forward(self, *, measure: bool, bypassed: bool = False) -> None:
        """Announce a forward pass in training whose backward pass will follow, to measure or not.

        Where the training calls the module inside the wrapper (``bypassed``), nothing is reduced.
        """

    @abstractmethod
    def notice_backward(self, trained: Callable[[], None]) -> None:
        """Note that the running backward pass has reached the model's output.

        ``trained`` is called once it proves to accumulate gradients, at its end at the latest; not
        for ``torch.autograd.grad``, where that shows.
        """

    def drop_gradient(self) -> None:
        """Drop what was measured in the step: its gradient was thrown away."""
        return

    def notice_unannounced(self, announce: Callable[[], None]) -> None:
        """Note that the running backward pass has reached a forward pass in evaluation mode.

        ``announce`` announces that forward pass, as soon as the backward pass proves to train
        parameters, if the tap can still begin a step then. By default it cannot: the step that the
        pass belongs to is under way.
        """
        return

    def see_evaluation(self, announce: Callable[[], None]) -> None:
        """Note a forward pass in evaluation mode; ``announce`` is as in :meth:`notice_unannounced`.

        For taps that know, before a backward pass begins, that it trains.
        """
        return

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward pass was announced whose backward pass has not begun.

        True where passes that nothing announces are not noticed.
        """
        return True

    def leave_out(self, names: Collection[str]) -> None:
        """Measure the step that begins without some parameters, where the tap can."""
        return

    def see_optimizer(self, optimizer: Any) -> None:
        """Note that this optimizer is about to be called; most taps need no such call."""
        return

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether a synchronising backward pass has ended since the last :meth:`collect`."""

    @property
    @abstractmethod
    def aborted(self) -> bool:
        """Whether a backward pass began since then and never ended: it raised."""

    @property
    def busy_seconds(self) -> float:
        """How long this worker was busy in the step before it began to wait for the others.

        The time from the end of the step before's reduction until the last local gradient of this
        step was ready; NaN where it cannot be known, since workers wait for each other elsewhere
        too. Read it before :meth:`collect`.
        """
        return math.nan

    def collect(self) -> LocalGradient | None:
        """Return the step's measurements and start again; None without valid ones."""
        gradient = self._gradient() if self._measure and self.complete else None
        self._start_again()
        return gradient

    @abstractmethod
    def remove(self) -> None:
        """Take all hooks out of the model."""

    def _see_reduced(self) -> None:
        for call in self._after_reduction:
            call()

    @abstractmethod
    def _gradient(self) -> LocalGradient | None:
        """Return the measurements of a complete step; None unless they are valid."""

    @abstractmethod
    def _start_again(self) -> None:
        """Begin another step."""
