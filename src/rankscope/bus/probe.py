"""How a kind of evidence measures in the training process, and decides at the root.

The ``probe.py`` of a kind of evidence has ``make_probe(job)``, which returns a probe, several, or
None. All calls come on the training's thread, and none waits for a device. Its ``director.py`` has
``make_director(run) -> Director | None``, which gets the messages of its probes, and returns
requests to them; it has no socket and no clock.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from rankscope.bus.finding import Finding, FindingEvents

if TYPE_CHECKING:
    from rankscope.bus.step import GatheredStep


Content = bytes | bytearray | memoryview
"""Bytes; ``len`` is their number."""


@dataclass(slots=True)
class MessagePart:
    """The part of one kind of evidence in a step's message."""

    # LOCAL columns of the workers table by name; absent and NaN values are missing
    values: Mapping[str, float] = field(default_factory=dict)
    arrays: Mapping[str, Content] = field(default_factory=dict)  # the bytes of its arrays by name
    names: Mapping[str, Any] = field(default_factory=dict)  # texts and names, as JSON can hold them
    items: int = 0  # digest of the kinds and names behind ``digests_D``


class Pending(Protocol):
    """A part of a step whose numbers may still be on the device."""

    @property
    def ready(self) -> bool:
        """Whether it can be read without waiting."""

    def read(self) -> MessagePart:
        """Wait for the device and return it."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A part that is on the host already."""

    part: MessagePart
    ready: bool = True

    def read(self) -> MessagePart:
        """Return it."""
        return self.part


_Read = TypeVar("_Read", covariant=True)


@dataclass(frozen=True, slots=True)
class Awaited(Generic[_Read]):
    """What is read from numbers on their way to the host, such as a part of a step."""

    copies: Sequence[Any]  # what it waits for; None for nothing
    read: Callable[[], _Read]

    @property
    def ready(self) -> bool:
        """Whether it can be read without waiting."""
        return all(copy is None or copy.ready for copy in self.copies)


@dataclass(slots=True)
class StepEnd:
    """Facts of the step that ends, from the collector."""

    step: int
    comparable: bool  # whether healthy workers hold equal state after it
    idle: frozenset[int]  # numbers of the forward passes that have no part in its gradient
    num_passes: int  # number of forward passes with one
    # numbers of the forward passes whose output has no graph, such as a call of the wrapper with a
    # constant, to arm its hooks, before a loss that the module's methods compute
    graphless: frozenset[int] = frozenset()
    # how many workers' gradients the reduction adds up: 1 for their mean
    summed_workers: float = 1.0
    # whether the optimizer was called with gradients that no reduction had seen
    unreduced: bool = False
    # whether the step's first backward pass added to a gradient applied before
    left_over: bool = False
    # whether a gradient was reduced and taken away in a step before, since the last update: the
    # optimizer may get it with this step's
    set_aside: bool = False
    # by what pipeline schedules multiplied gradients after the backward passes; NaN without one
    schedule_scale: float = math.nan
    step_seconds: float = math.nan  # wall time since the step before
    # time before this worker began to wait for the others; a probe that kept it busy takes its own
    # part out
    busy_seconds: float = math.nan
    overhead_seconds: float = math.nan  # time that the monitor took on the host
    read_seconds: float = math.nan  # the part of it in which gradients were read
    device_overhead: Any = None  # accelerator time that the monitor took; None on the host
    # called with seconds of collecting that do not count against the budget
    leave_out: Callable[[float], None] = lambda seconds: None


class Evaluated(NamedTuple):
    """A probe's callbacks for a forward pass in evaluation mode that a backward pass trains on."""

    before_close: Callable[[], None]  # called first, while the step before may still be open
    # called with the number of the forward pass, once its step has begun
    begin: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Channel:
    """How probes reach the root, and the other ranks."""

    # sends bytes to the director of a kind of evidence: name, step, content. Never blocks
    send: Callable[[str, int, Content], None] = lambda name, step, content: None
    has_room: Callable[[], bool] = lambda: True  # returns whether the agent keeps up
    meeting: Any = None  # rendezvous of the run's ranks, see ``rankscope.wrappers.rendezvous``
    mesh: Any = None  # the mesh of the run, see ``rankscope.session.meetings``; None without one
    stages: Any = None  # the pipeline stages that share weights with the run's; None without
    # returns these at the first call of the optimizer, where they were not there to be met before
    meet_stages: Callable[[], Any] | None = None
    # names of parameters that other pipeline stages hold, too: their gradients are summed after the
    # reduction. Another stage's ``watch`` may add some
    shared_weights: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Job:
    """The training that probes measure, as they are made."""

    wrapped: Any  # the model and its wrapper, see ``rankscope.wrappers.wrapped``
    optimizer: Any = None  # its optimizer, or several as one; None if unknown
    rank: int = 0  # this worker's rank in its data-parallel group
    loader: Any = None  # the training's data loader; None if it was not given
    exact: bool = True  # whether state, randomness and precision are compared exactly
    trace: bool = False  # whether this rank traces its tensors
    every: int = 1  # gradients are measured in steps that are multiples of this
    state_spacing: int = 1  # steps from one reading of the model's state to the next
    # steps from one average of the workers' parameters to the next; 0 where every step's gradients
    # are reduced
    local_steps: int = 0
    first_step: int = 0
    seed: int = 0  # seed of sketches; equal on all workers
    canary: bool = False
    # steps from one scheduled canary to the next; None for a schedule by cost
    canary_every: int | None = None
    verify_at: Collection[int] = ()  # steps whose gradient is computed again
    parity: int = 0  # number of first steps that are recorded for ``rankscope parity``
    # the run directory that the user gave, before each group takes one of its own
    given_dir: str = ""
    # called with seconds of the present work that count elsewhere
    leave_out: Callable[[float], None] = lambda seconds: None
    # runs work of listeners that the collector does not call, on the training's thread
    guard: Callable[..., None] = lambda work, *args: work(*args)
    channel: Channel = field(default_factory=Channel)  # the way to the root


class Probe:
    """Measures one kind of evidence on one worker.

    Only overridden methods are called; the others cost nothing. After those of the user and of the
    root, the calls of a step come in this order, those of a forward pass once for each.

    Hooks of a probe's own run their work by ``job.guard``. They also fire in passes that are not
    the training's, such as a canary's or a recomputation, and not in a compiled model.
    """

    @property
    def run_near(self) -> bool:
        """Whether :meth:`run_model` is wanted soon."""
        return False

    @property
    def run_due(self) -> bool:
        """Whether :meth:`run_model` is wanted where this forward pass enters the module."""
        return False

    @property
    def recompute_due(self) -> bool:
        """Whether :meth:`recompute` is wanted in the present step."""
        return False

    def ask(self) -> None:
        """The user requests a measurement, on all workers in the same step."""

    def give_samples(self, samples: Any, forward: int) -> None:
        """The user gives the samples of the next forward pass: :meth:`rankscope.Scope.batch`."""

    def give_loss(self, value: Any, weight: Any, forward: int, **more: Any) -> None:
        """The user gives the loss of a micro-batch: :meth:`rankscope.Scope.loss`."""

    def give_rollout(self, trainer: Any, rollout: Any, mask: Any) -> None:
        """The user gives log-probabilities of tokens: :meth:`rankscope.Scope.rollout`."""

    def on_request(self, step: int, content: bytes) -> None:
        """A request from the root, see :class:`rankscope.bus.probe.Request`."""

    def before_pass(self, step: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A forward pass of the wrapped model is about to begin."""

    def begin_step(self, step: int, *, paused: bool) -> None:
        """A forward pass of this step is about to begin; the step's first call counts."""

    def on_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int) -> None:
        """A forward pass in training begins with these inputs; it has this number in its step."""

    def wants_all_parts(self, step: int) -> bool:
        """Whether calls of parts matter in a step, where others have computed their inputs."""
        return False

    def before_part(self, call: Any, args: Any, kwargs: Any, step: int) -> None:
        """A part of the model is called by the training itself, with these inputs.

        ``call`` is a :class:`~rankscope.wrappers.part_calls.PartCall`; the step is that of the next
        backward pass.
        """

    def after_part(self, call: Any, output: Any) -> None:
        """The part has returned this."""

    def begin_unseen(self, forward: int) -> None:
        """A backward pass begins a micro-batch, of which no forward pass of the model was seen.

        It has this number in its step; -1 where the number stands for a pass without a graph.
        """

    def before_forward(self, step: int, *, first: bool) -> None:
        """The forward pass begins; ``first`` in its step."""

    def enter_module(self) -> None:
        """The forward pass is about to enter the module inside the wrapper."""

    def on_module_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The inputs of the module inside the wrapper."""

    def run_model(self, step: int, *, early: bool) -> None:
        """The probe may run the model; ``early`` if the wrapper's forward pass has not begun."""

    def before_apart(self) -> None:
        """The module is called past its wrapper for a pass that is none of the training's."""

    def on_module_output(self, output: Any) -> None:
        """The module inside the wrapper has returned this."""

    def after_forward(self) -> None:
        """The forward pass has ended."""

    def on_output(self, output: Any, kwargs: Mapping[str, Any], forward: int) -> None:
        """The forward pass has returned this."""

    def on_evaluation(self, output: Any, kwargs: Mapping[str, Any]) -> Evaluated | None:
        """A forward pass in evaluation mode has returned this, with a graph."""

    @property
    def wanted_names(self) -> Collection[str]:
        """Names of the parameters whose local gradient it reads in this step."""
        return ()

    def see_local(self, name: str, gradient: Any) -> None:
        """The local gradient of a parameter is there, before the reduction.

        Of all probes of a session, one may override this.
        """

    def see_locals(self, gradients: Iterable[tuple[str, Any]]) -> None:
        """The same of several parameters at once, by name."""

    def after_schedule(self) -> None:
        """A pipeline's schedule has reduced the gradients, and may have divided them since."""

    def see_reduced(self) -> None:
        """The reduction is over, and nothing else has touched the gradients."""

    def before_update(self, optimizer: Any) -> None:
        """An optimizer is about to be called, one of several perhaps."""

    def see_other_update(self, optimizer: Any) -> None:
        """An optimizer was called under ``rankscope run`` that may be none of the run's."""

    def forbid(self, why: str) -> None:
        """The model may not be run by the probe, from now on: its forward pass trains it."""

    def listen(self, recompute: Callable[..., None]) -> Callable[[], object] | None:
        """Call a function where no optimizer's hook serves; return the function that ends it."""

    def recompute(self) -> None:
        """The optimizer is about to be called, and the model may be run again."""

    def after_update(self, optimizer: Any, *, complete: bool) -> None:
        """The optimizer's call has ended; ``complete`` if the step's gradients were reduced."""

    def take_later(self, num_passes: int) -> Callable[[int], None]:
        """The step ends as a backward pass begins the next one, without a forward pass.

        Take out what was given for the next; return what puts it back, with its pass's number.
        """
        return lambda forward: None

    def see_saved(self) -> None:
        """The training saves its optimizer's state, or the session ends."""

    def collect(self, end: StepEnd) -> Pending | None:
        """The step ends: return the probe's part of the message, and start again."""

    def on_message(self, step: int, part: MessagePart) -> None:
        """A step is about to be sent: the parts of all probes together, on the host."""

    def abort(self) -> None:
        """Forget the step, after an exception or a second begin."""

    def close(self) -> None:
        """Remove all hooks."""


EVENTS = tuple(name for name, each in vars(Probe).items() if callable(each) and name[0] != "_")
"""The names of the methods of probes that are called."""


def overriding(probes: Iterable[Probe], name: str) -> list[Any]:
    """Return the bound methods of this name of the probes that override it."""
    own = getattr(Probe, name)
    return [getattr(probe, name) for probe in probes if getattr(type(probe), name) is not own]


class Request(NamedTuple):
    """A request to the probes of one kind, on all workers."""

    step: int
    content: bytes  # bytes for the probe to read


@dataclass(frozen=True, slots=True)
class DirectedRun:
    """The run that directors are made for."""

    num_workers: int
    first_step: int  # number of the run's first step
    run_dir: Path
    # options that all ranks agreed on, see ``options`` of ``run.json``
    options: Mapping[str, Any] = field(default_factory=dict)
    by_loop: bool = False  # whether the training's own loop reduces
    # called with each finding that has changed
    report: Callable[[Finding], None] = lambda finding: None


class Director:
    """Decides for one kind of evidence."""

    def __init__(self, report: Callable[[Finding], None] = lambda finding: None) -> None:
        self._report = report
        self._events = FindingEvents()
        self._facts: dict[str, object] = {}  # by id, as of the last report
        self.findings: dict[str, Finding] = {}  # its findings by id, each in its latest state
        self.unmeasured: str | None = None  # why it measures nothing so far; None if not known

    def publish(self, finding: Finding, count: int = 0, facts: object = None) -> None:
        """Report a finding if it is new, has changed, or its amount of evidence has doubled.

        ``facts`` are further parts of it whose change is reported.
        """
        self.findings[finding.id] = finding
        event = self._events.of(finding, count)
        if event is not None or self._facts[finding.id] != facts:
            self._facts[finding.id] = facts
            self._report(finding)

    def take(self, rank: int | None, step: int, content: bytes) -> None:
        """Process a probe's message; ``rank`` is None for a rank of another run."""

    def observe(
        self,
        step: "GatheredStep",
        changed: Sequence[Finding],
        known: Sequence[Finding],
        newest: int,
    ) -> Iterable[Request]:
        """Process the next step; return requests to the probes.

        ``changed`` findings opened or changed with it, ``known`` are all; ``newest`` is the newest
        step that any worker is known to have ended.
        """
        return ()


class RareProbe(Probe):
    """Measures in the steps 0, 1, 2, 4, 8 and so on of a session, up to its step ``last``."""

    def __init__(self, first_step: int, last: int | None = None) -> None:
        self._first_step = first_step
        self._last_age = last
        self.due = False  # whether the present step is one of these
        self.before: Any = None  # what was read before a pass that is still under way
        self.pending: Pending | None = None  # what was measured, to be sent at the step's end

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Note whether the step is due."""
        age = step - self._first_step
        self.due = is_power(age) and (self._last_age is None or age <= self._last_age)

    def collect(self, end: StepEnd) -> Pending | None:
        """Return what was measured in this step."""
        pending, self.pending = self.pending, None
        return pending

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self.before = self.pending = None


def is_power(age: int) -> bool:
    """Return whether a number is 0 or a power of two."""
    return age >= 0 and age & (age - 1) == 0
