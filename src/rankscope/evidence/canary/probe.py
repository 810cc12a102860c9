"""Canaries inside a training: they run in the training thread, which never waits.

The root decides on them, see :mod:`rankscope.evidence.canary.director`; its messages are read when
a forward pass begins.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rankscope.bus.bundles import PlainBatch, pack_batch, unpack_batch
from rankscope.bus.probe import Job, Probe, StepEnd
from rankscope.bus.step import MAX_PAIRED_WORKERS
from rankscope.errors import UnsupportedError, UsageError
from rankscope.evidence.canary.batch import CanaryDeclined, CapturedBatch, capture_batch
from rankscope.evidence.canary.cost import BroadcastBuffers, StepMemory, Stopwatch
from rankscope.evidence.canary.replay import PendingCanary, check_module, run_batch
from rankscope.evidence.canary.schedule import (
    CanaryAnswer,
    CanaryRequest,
    Planned,
    first_scheduled,
)
from rankscope.private import lacking
from rankscope.wrappers.surroundings import why_wait
from rankscope.wrappers.wrapped import Wrapped

_log = logging.getLogger("rankscope")

_MOST_BYTES = 24 * 2**20
"""Larger batches are declined: all workers would get them, in one message, see
:data:`rankscope.agent.link.MOST_BYTES`."""

_SWITCHED_OFF = "canary=False was given"
_APART = "workers hold other parameters between two averages"
_MOST_BYTES_BY_DEFAULT = 8 * 2**20
"""The same for canaries that nobody asked for."""


@dataclass(frozen=True, slots=True)
class _Captured:
    planned: Planned
    batch: CapturedBatch
    step: int
    autocast: str


@dataclass(frozen=True, slots=True)
class _WithBatches:
    planned: Planned
    batches: tuple[PlainBatch, PlainBatch]


class CanaryProbe(Probe):
    """Canaries of one watched model on one worker; all calls come on the training thread."""

    def __init__(
        self,
        wrapped: Wrapped,
        rank: int,
        send: Callable[[bytes], None],  # a CanaryAnswer, to the root; must not block
        *,
        first: Planned | None = None,  # a canary that needs no announcement
        leave_out: Callable[[float], None] = lambda seconds: None,  # not counted as overhead
    ) -> None:
        self._leave_out = leave_out
        self._module = wrapped.module
        self._device = wrapped.device
        self._moves_inputs = bool(getattr(wrapped.wrapper, "device_ids", None))
        self._rank = rank
        self._send = send
        self._buffers = BroadcastBuffers(wrapped.wrapper, wrapped.module, wrapped.device)
        self._memory = StepMemory(wrapped.device)
        self._requested = self._ended = False
        self._planned = first
        self._captured: _Captured | None = None
        self._ready: _WithBatches | None = None
        self._due: _WithBatches | None = None
        self._waits = ""  # why the due canary has not run yet
        self._pending: PendingCanary | None = None
        self._spent = 0.0  # of the training's time, on the present canary
        self._looked_at = -1
        self._logged: set[str] = set()

    # Messages from the root ----------------------------------------------------------------

    def ask(self) -> None:
        """Request a canary; all workers do so in the same step."""
        self._requested = True

    def on_request(self, step: int, content: bytes) -> None:
        """Process a message from the root; raise PackedError if it is damaged."""
        request = CanaryRequest.unpack(content)
        if request.batches:
            suspect, peer = map(unpack_batch, request.batches)
            self.store_batches(request.planned, (suspect, peer))
        else:
            self.store_plan(request.planned)

    def store_plan(self, planned: Planned) -> None:
        """Store the announcement of a canary."""
        if self._ended:
            return
        self._planned = planned
        self._captured = None
        self._ready = None
        self._spent = 0.0
        self._memory.forget()

    def store_batches(self, planned: Planned, batches: tuple[PlainBatch, PlainBatch]) -> None:
        """Store the batches of a canary, the suspect's and the peer's."""
        if not self._ended:
            self._planned = None
            self._captured = None
            self._ready = _WithBatches(planned, batches)

    def forbid(self, why: str) -> None:
        """Run no canaries from now on."""
        ready = self._due or self._ready or self._captured
        planned = self._planned if ready is None else ready.planned
        self._due = self._captured = None
        if planned is not None and not self._ended:
            _log.info("no canaries in this run: %s", why)
            self._end(planned, why)
        self._ended = True

    # Events of the training ----------------------------------------------------------------

    def before_pass(self, step: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copy the batch in the step of a canary, send it, or note that a canary is due."""
        if self._due is not None and step != self._due.planned.run_at:
            due = self._due
            self._due = None
            if self._waits:
                self._decline(due.planned, CanaryDeclined(self._waits))
        if self._planned is None and self._captured is None and self._ready is None:
            return
        start = time.perf_counter()
        if step != self._looked_at:
            self._looked_at = step
            self._memory.see()
        if self._planned is not None and step >= self._planned.capture_at:
            planned = self._planned
            self._planned = None
            if self._rank in (planned.suspect, planned.peer):
                self._capture(planned, step, args, kwargs)
        if self._captured is not None and self._captured.batch.ready:
            captured = self._captured
            self._captured = None
            self._send(_pack_answer(captured))
        if self._ready is not None and step >= self._ready.planned.run_at:
            ready = self._ready
            self._ready = None
            late = step - ready.planned.run_at
            self._due = None if late else ready
            if late:
                self._send(CanaryAnswer(ready.planned.capture_at, late=late).pack())
        seconds = time.perf_counter() - start
        self._spent += seconds
        self._leave_out(seconds)

    @property
    def run_due(self) -> bool:
        """Whether a canary is to run before the forward pass that begins now."""
        return self._due is not None

    @property
    def run_near(self) -> bool:
        """Whether one is to run then, or in a later step."""
        return self._due is not None or self._ready is not None

    def run_model(self, step: int, *, early: bool) -> None:
        """Run the canary that is due, if one is.

        If no model may run now, it waits for another forward pass of the step. ``early``, before
        DDP's forward pass, it is declined if DDP is about to broadcast buffers that have changed
        since the last step.
        """
        due = self._take_due()
        if due is not None:
            self._leave_out(self._run(due, early=early))
        elif early and self._ready is not None and step == self._ready.planned.run_at - 1:
            start = time.perf_counter()
            self._buffers.note(self._ready.planned)
            self._leave_out(time.perf_counter() - start)

    def collect(self, end: StepEnd) -> PendingCanary | None:
        """Return the canary's part of the step's message, None if there is none; start anew."""
        pending = self._pending
        requested = self._requested
        self._pending = None
        self._requested = False
        if requested and pending is None:
            pending = PendingCanary(0, 0)
        if pending is not None:
            end.busy_seconds = math.nan
        return pending

    # --------------------------------------------------------------------------------------

    def _take_due(self) -> _WithBatches | None:
        """Return the canary that is due, unless it has to wait."""
        self._waits = why_wait()
        if self._waits:
            return None
        due = self._due
        self._due = None
        return due

    def _capture(
        self, planned: Planned, step: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Copy the batch; answer at once if there is none, since others wait for it."""
        most = _MOST_BYTES_BY_DEFAULT if planned.by_default else _MOST_BYTES
        try:
            batch = capture_batch(args, kwargs, moves_inputs=self._moves_inputs, most_bytes=most)
        except CanaryDeclined as reason:
            self._decline(planned, reason)
            return
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else ""
        name = str(autocast).removeprefix("torch.")
        self._captured = _Captured(planned, batch, step, name)

    def _run(self, ready: _WithBatches, *, early: bool) -> float:
        planned = ready.planned
        suspect, peer = ready.batches
        took = Stopwatch(self._device, self._spent)
        try:
            if early:
                self._buffers.check(planned)
            self._check_room(planned)
            seed = planned.seed
            first, again, against = (
                run_batch(
                    self._module,
                    batch,
                    self._device,
                    seed=seed,
                    backward_seed=other,
                    record=not number,
                )
                for number, (batch, other) in enumerate(
                    ((suspect, None), (suspect, seed + 1), (peer, None))
                )
            )
        except CanaryDeclined as reason:
            took.stop()
            if reason.out_of_memory:
                self._log_declined(planned, reason)
                self._end(planned, str(reason))
            else:
                self._decline(planned, reason)
            return took.host_seconds
        took.stop()
        self._pending = PendingCanary(planned.suspect, planned.peer, (first, again, against), took)
        return took.host_seconds

    def _check_room(self, planned: Planned) -> None:
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        if planned.by_default and any(parameter.grad is not None for parameter in parameters):
            raise CanaryDeclined(
                "gradients are held when the forward pass begins, and another one beside them "
                "would take memory; with watch(canary_every=...), canaries run all the same"
            )
        self._memory.check(parameters)

    def _end(self, planned: Planned, why: str) -> None:
        """Run no canaries from now on."""
        self._ended = True
        self._ready = None
        self._planned = None
        self._send(CanaryAnswer(planned.capture_at, declined=why, ends=True).pack())

    def _decline(self, planned: Planned, reason: CanaryDeclined) -> None:
        """Log why there is no canary, and answer at once, since the root waits for it."""
        self._log_declined(planned, reason)
        self._send(CanaryAnswer(planned.capture_at, declined=str(reason)).pack())

    def _log_declined(self, planned: Planned, reason: CanaryDeclined) -> None:
        """Log why there is no canary, each reason once."""
        why = str(reason)  # as text: its traceback holds the run's tensors
        if reason.out_of_memory:
            why += "; no more canaries are run on this rank, and training goes on"
        elif why in self._logged:
            return
        self._logged.add(why)
        quiet = (planned.of_finding or planned.by_default) and not reason.out_of_memory
        log = _log.info if quiet else _log.warning
        log("no canary for %s at step %d: %s", planned.reason, planned.capture_at, why)


def _pack_answer(captured: _Captured) -> bytes:
    """Return a batch as an answer, or the reason why there is none."""
    capture_at = captured.planned.capture_at
    versions = {"torch": torch.__version__}
    try:
        batch = pack_batch(captured.batch.plain())
    except Exception as error:
        _log.info("the batch kept at step %d is lost: %r", capture_at, error)
        return CanaryAnswer(capture_at, declined=repr(error)).pack()
    answer = CanaryAnswer(capture_at, batch, captured.autocast, versions, step=captured.step)
    return answer.pack()


def make_probe(job: Job) -> CanaryProbe | None:
    """Return the probe of canaries; None in a run without them."""
    if not job.canary:
        return None
    first = first_scheduled(job.first_step, by_default=job.canary_every is None)
    return CanaryProbe(
        job.wrapped,
        job.rank,
        lambda content: job.channel.send("canary", 0, content),
        first=first,
        leave_out=job.leave_out,
    )


def why_not(wrapped: Wrapped, options: Any, *, alike: bool) -> str:
    """Return why no canaries run in a training; an error where one asks for what cannot be."""
    wanted = options.canary and alike
    every = options.canary_every
    if every is not None and (every < 1 or not wanted):
        raise UsageError(
            f"canary_every expected at least 1 step, and canary=True, got {every} and {wanted}"
        )
    if not options.canary:
        return _SWITCHED_OFF
    if not alike:
        return _APART
    reason = _why_not(wrapped)
    if reason and every is not None:
        raise UnsupportedError(f"canary_every cannot be kept: {reason}; leave it out")
    if reason:
        _log.info("no canaries in this run: %s", reason)
    return reason


def _why_not(wrapped: Wrapped) -> str:
    num_workers = wrapped.group.size()
    if wrapped.kind.no_canary:
        return wrapped.kind.no_canary
    if any(kind.__name__ == "LightningModule" for kind in type(wrapped.module).__mro__):
        return (
            "Lightning runs training_step in place of the model's forward pass, with all that it "
            "logs, which a canary cannot repeat"
        )
    if not 2 <= num_workers <= MAX_PAIRED_WORKERS:
        return f"canaries compare 2 to {MAX_PAIRED_WORKERS} workers, got {num_workers}"
    missing = lacking("canary")
    if missing:
        return f"torch {torch.__version__} lacks {', '.join(missing)}"
    try:
        check_module(wrapped.module)
    except CanaryDeclined as declined:
        return str(declined)
    return ""
