"""What a kind of evidence does in the training process.

The ``probe.py`` of a kind of evidence has ``make_probe(job) -> Probe | None``. All calls come on
the training's thread, and none waits for a device.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Content = bytes | bytearray | memoryview
"""Of bytes: its length is their number."""


@dataclass(slots=True)
class Part:
    """What one kind of evidence adds to a step's message.

    Attributes:
        values: LOCAL columns of the workers table by name; what is absent or NaN is missing.
        arrays: The bytes of its arrays by name.
        names: What is said in words, as JSON can hold it.
        items: Digest of what ``digests_D`` are of.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    arrays: Mapping[str, Content] = field(default_factory=dict)
    names: Mapping[str, Any] = field(default_factory=dict)
    items: int = 0


class Pending(Protocol):
    """A part of a step whose numbers may still be on the device."""

    @property
    def ready(self) -> bool:
        """Whether it can be read without waiting."""

    def read(self) -> Part:
        """Wait for the device and return it."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A part that is on the host already."""

    part: Part
    ready: bool = True

    def read(self) -> Part:
        """Return it."""
        return self.part


@dataclass(slots=True)
class StepEnd:
    """What the collector knows of a step that ends.

    Attributes:
        step: Step number.
        comparable: Whether workers that agree hold the same after it.
        idle: Numbers of the forward passes that took no part in it.
        num_passes: How many forward passes did.
        summed_workers: How many workers' gradients the reduction adds up: 1 for their mean.
        unreduced: Whether the optimizer was called with gradients that no reduction had seen.
        left_over: Whether the step's first backward pass added to a gradient applied before.
        step_seconds: Wall time since the step before.
        busy_seconds: Time before this worker began to wait for the others; a probe that kept it
            busy takes its own part out.
        overhead_seconds: Time that the monitor took on the host.
        read_seconds: The part of it in which gradients were read.
        device_overhead: What the step lost to the monitor on an accelerator; None on the host.
    """

    step: int
    comparable: bool
    idle: frozenset[int]
    num_passes: int
    summed_workers: float = 1.0
    unreduced: bool = False
    left_over: bool = False
    step_seconds: float = math.nan
    busy_seconds: float = math.nan
    overhead_seconds: float = math.nan
    read_seconds: float = math.nan
    device_overhead: Any = None


class Evaluated(NamedTuple):
    """What a probe keeps of a forward pass in evaluation mode, until a backward pass trains on it.

    Attributes:
        before_close: Called first, while the step before may still be open.
        begin: Called with the number of the forward pass, once its step has begun.
    """

    before_close: Callable[[], None]
    begin: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Job:
    """The training that probes measure, as they are made.

    Attributes:
        wrapped: The model and how it is data parallel, see :mod:`rankscope.session.wrapping`.
        optimizer: Its optimizer, or several as one; None if not known.
        rank: This worker's rank in its data-parallel group.
        loader: The training's data loader; None if it was not given.
        exact: Whether state, randomness and precision are compared exactly.
        trace: Whether this rank traces its tensors.
        every: Gradients are measured in steps that are multiples of this.
        state_spacing: Steps from one reading of the model's state to the next.
        local_steps: Steps from one average of the workers' parameters to the next; 0 where every
            step's gradients are reduced.
        leave_out: Takes seconds of the present work that count elsewhere.
    """

    wrapped: Any
    optimizer: Any = None
    rank: int = 0
    loader: Any = None
    exact: bool = True
    trace: bool = False
    every: int = 1
    state_spacing: int = 1
    local_steps: int = 0
    leave_out: Callable[[float], None] = lambda seconds: None


class Probe:
    """Measures one kind of evidence on one worker.

    A method that a probe overrides is called; one that it leaves alone costs nothing. The calls of
    a step come in this order, those of a forward pass once for each.
    """

    def begin_step(self, step: int, *, paused: bool) -> None:
        """A forward pass of this step is about to begin; the step's first call counts."""

    def on_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int) -> None:
        """A forward pass in training begins with these inputs; it has this number in its step."""

    def before_forward(self, step: int, *, first: bool) -> None:
        """The forward pass begins; ``first`` in its step."""

    def enter_module(self) -> None:
        """The forward pass is about to enter the module inside the wrapper."""

    def after_forward(self) -> None:
        """The forward pass has ended."""

    def on_output(self, output: Any, kwargs: Mapping[str, Any], forward: int) -> None:
        """The forward pass has returned this."""

    def on_evaluation(self, output: Any, kwargs: Mapping[str, Any]) -> Evaluated | None:
        """A forward pass in evaluation mode has returned this, with a graph."""

    @property
    def wanted_names(self) -> Collection[str]:
        """Names of the parameters whose local gradient it wants to see in this step."""
        return ()

    def see_local(self, name: str, gradient: Any) -> None:
        """The local gradient of a parameter is there, before the reduction."""

    def see_locals(self, gradients: Iterable[tuple[str, Any]]) -> None:
        """The same of several parameters at once, by name."""

    def see_reduced(self) -> None:
        """The reduction is over, and nothing else has touched the gradients."""

    def before_update(self) -> None:
        """The optimizer is about to be called."""

    def after_update(self, optimizer: Any, *, complete: bool) -> None:
        """The optimizer's call has ended; ``complete`` if the step's gradients were reduced."""

    def collect(self, end: StepEnd) -> Pending | None:
        """The step ends: return its part of the message, and start again."""

    def abort(self) -> None:
        """Forget the step: an exception, or a step that is begun anew."""

    def close(self) -> None:
        """Take all hooks out."""


def overriding(probes: Iterable[Probe], name: str) -> list[Any]:
    """Return the bound methods of this name of the probes that override it."""
    own = getattr(Probe, name)
    return [getattr(probe, name) for probe in probes if getattr(type(probe), name) is not own]
