"""Canaries inside a training: kept, sent, run and concluded without the training waiting.

The training thread keeps a batch and runs what it is given; the courier's thread decides, sends
and concludes. Every worker comes to the same decisions from the same gathered steps, see
:mod:`rankscope.core.canary_plan`, so that all take part in the same exchanges.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from typing import Any as Channel

import numpy as np
import torch
from numpy.typing import NDArray

from rankscope.capture.canary import PendingCanary, check_module, run_batch
from rankscope.capture.canary_batch import CanaryDeclined, CapturedBatch, capture_batch
from rankscope.capture.canary_buffers import BroadcastBuffers
from rankscope.core.batches import BatchError, PlainBatch, pack_batch, unpack_batch
from rankscope.core.canary import Verdict, judge, results_of
from rankscope.core.canary_plan import CanaryPlan, Planned, all_asked
from rankscope.core.finding import Finding
from rankscope.core.recorded import MAX_PAIRED_WORKERS as MAX_PAIRED
from rankscope.core.step import GatheredStep
from rankscope.errors import RunError, UnsupportedError, UsageError
from rankscope.record.bundle import ReplayBundle, save_bundle
from rankscope.wrapping import Wrapped

_log = logging.getLogger("rankscope")


@dataclass(frozen=True, slots=True)
class _Captured:
    planned: Planned
    batch: CapturedBatch | None  # None on workers that only take part
    autocast: str


@dataclass(frozen=True, slots=True)
class _Ready:
    planned: Planned
    batches: tuple[PlainBatch, PlainBatch]


class LiveCanary:
    """Canaries of one watched model on one worker.

    Args:
        wrapped: The model.
        channel: Where batches are sent; used in the courier's thread alone.
        every: Steps from one scheduled canary to the next; None for none.
        run_dir: Where rank 0 saves replay bundles; None on all others.
    """

    def __init__(
        self, wrapped: Wrapped, channel: Channel, *, every: int | None, run_dir: Path | None
    ) -> None:
        self._module = wrapped.module
        self._device = wrapped.device
        self._moves_inputs = bool(getattr(wrapped.wrapper, "device_ids", None))
        self._channel = channel
        self._run_dir = run_dir
        self._plan = CanaryPlan(channel.num_workers, every)
        self._asked = False
        self._captured: _Captured | None = None
        self._due: Planned | None = None
        self._buffers = BroadcastBuffers(wrapped.wrapper, wrapped.module, wrapped.device)
        self._ready: _Ready | None = None
        self._pending: PendingCanary | None = None
        self._bundle: ReplayBundle | None = None

    # In the training thread -----------------------------------------------------------------

    def ask(self) -> None:
        """Ask for a canary; all workers do so in the same step."""
        self._asked = True

    def before_forward(self, step: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """Keep the batch if this is the step to do so, or note that a canary is to run now.

        Args:
            step: The step that begins with this forward pass.
            args: What enters the model by position.
            kwargs: What enters it by name.

        Returns:
            Seconds that it took.
        """
        self._due, planned = None, self._plan.current
        if planned is None or step not in (planned.capture_at, planned.run_at):
            return 0.0
        start = time.perf_counter()
        if step == planned.capture_at:
            self._capture(planned, args, kwargs)
        else:
            self._due = planned
        return time.perf_counter() - start

    @property
    def due(self) -> bool:
        """Whether a canary is to run before the forward pass that begins now."""
        return self._due is not None

    def run(self) -> float:
        """Run the canary that is due, if one is; DDP has made the model's buffers alike by now.

        Returns:
            Seconds that it took.
        """
        start = time.perf_counter()
        due, self._due = self._due, None
        if due is not None:
            self._run(due)
        return time.perf_counter() - start

    def run_early(self, step: int) -> float:
        """Run the canary that is due, if one is, before DDP's forward pass begins.

        It is declined where DDP is about to broadcast buffers, and these have changed since the
        step before.

        Args:
            step: The step that begins with this forward pass.

        Returns:
            Seconds that it took.
        """
        planned = self._plan.current
        if planned is None or not planned.run_at - 1 <= step <= planned.run_at:
            return 0.0
        start = time.perf_counter()
        if step < planned.run_at:
            self._buffers.note(planned)
        elif self._due is not None:
            due, self._due = self._due, None
            self._run(due, early=True)
        return time.perf_counter() - start

    def collect(self) -> PendingCanary | None:
        """Return what the step's message says of canaries, None if nothing; start again."""
        pending, self._pending = self._pending, None
        asked, self._asked = self._asked, False
        return PendingCanary(0, 0) if asked and pending is None else pending

    def _capture(self, planned: Planned, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._captured is not None and self._captured.planned == planned:
            return
        batch = None
        if self._channel.rank in (planned.suspect, planned.peer):
            try:
                batch = capture_batch(args, kwargs, moves_inputs=self._moves_inputs)
            except CanaryDeclined as reason:
                self._say_declined(planned, reason)
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else ""
        self._captured = _Captured(planned, batch, str(autocast).removeprefix("torch."))

    def _run(self, planned: Planned, *, early: bool = False) -> None:
        ready, self._ready = self._ready, None
        if ready is None or ready.planned != planned:
            return
        suspect, peer = ready.batches
        start = time.perf_counter()
        try:
            if early:
                self._buffers.check(planned)
            seed = seed_of(planned)
            first, again, against = (
                run_batch(self._module, batch, self._device, seed=seed, backward_seed=other)
                for batch, other in ((suspect, None), (suspect, seed + 1), (peer, None))
            )
        except CanaryDeclined as reason:
            self._say_declined(planned, reason)
            return
        self._pending = PendingCanary(planned.suspect, planned.peer, (first, again, against))
        if self._channel.rank == 0:
            _log.info(
                "before step %d every worker replayed a batch of rank %d twice and one of rank %d: "
                "%.2f s, which do not count as the monitor's overhead",
                planned.run_at,
                planned.suspect,
                planned.peer,
                time.perf_counter() - start,
            )

    def _say_declined(self, planned: Planned, reason: CanaryDeclined) -> None:
        say = _log.info if planned.of_finding else _log.warning
        # As text: its traceback holds what the run has made, and a handler may hold the record.
        say("no canary for %s at step %d: %s", planned.reason, planned.capture_at, str(reason))

    # In the courier's thread, on every worker alike -----------------------------------------

    def on_step(
        self, step: GatheredStep, told: Sequence[Finding], known: Callable[[], Sequence[Finding]]
    ) -> None:
        """Take a gathered step; may exchange batches with all other workers.

        Args:
            step: The step.
            told: Findings that opened or changed with it.
            known: Returns all findings.

        Raises:
            ChannelError: A peer is gone, or did not answer in time.
        """
        planned = self._plan.current
        if planned is not None and step.step == planned.capture_at:
            self._share(planned, known())
        elif planned is not None and step.step >= planned.run_at:
            self._conclude(planned, step, known())
        asked = all_asked(step)
        if asked is None and self._channel.rank == 0:
            _log.warning(
                "no canary at step %d: scope.canary() was not called on all ranks in the same step",
                step.step,
            )
        self._plan.observe(step.step, told, asked=bool(asked))

    def _share(self, planned: Planned, known: Sequence[Finding]) -> None:
        """Send the batches to all; sizes first, so that all agree on what follows."""
        captured, self._captured = self._captured, None
        if captured is not None and captured.planned != planned:
            captured = None
        message = _message(captured)
        roots, rank = (planned.suspect, planned.peer), self._channel.rank
        own = [len(message) if rank == root else 0 for root in roots]
        self._channel.meet()
        sizes = self._channel.reduce_max(np.array(own, np.int64)).tolist()
        if not all(sizes):
            self._give_up(planned, "a worker could not keep its batch")
            return
        received = [
            self._channel.broadcast(message if rank == root else np.zeros(size, np.uint8), root)
            for root, size in zip(roots, sizes, strict=True)
        ]
        try:
            batches = unpack_batch(received[0]), unpack_batch(received[1])
        except BatchError as error:  # on every worker alike
            self._give_up(planned, str(error))
            return
        self._ready = _Ready(planned, batches)
        if self._run_dir is not None:
            autocast = "" if captured is None else captured.autocast
            self._bundle = self._make_bundle(planned, batches, autocast, known)
            if planned.of_finding:
                self._save()

    def _conclude(self, planned: Planned, step: GatheredStep, known: Sequence[Finding]) -> None:
        self._ready = None
        results = results_of(step)
        if results is None or step.step != planned.run_at:
            self._give_up(planned, "a worker had no result")
            return
        self._plan.finish()
        if self._bundle is None:
            return
        verdict = judge(results, differing=_differing(known, step.step))
        self._bundle = replace(self._bundle, results=results, verdict=verdict)
        if planned.of_finding or verdict.verdict is not Verdict.DATA:
            self._save()
        self._bundle = None

    def _give_up(self, planned: Planned, why: str) -> None:
        self._ready, self._bundle = None, None
        again = self._plan.give_up()
        if self._channel.rank == 0:
            after = ": it will be tried once more" if again else ""
            _log.info("the canary for %s was given up, since %s%s", planned.reason, why, after)

    def _make_bundle(
        self,
        planned: Planned,
        batches: tuple[PlainBatch, PlainBatch],
        autocast: str,
        known: Sequence[Finding],
    ) -> ReplayBundle:
        return ReplayBundle(
            reason=planned.reason,
            step=planned.capture_at,
            suspect=planned.suspect,
            peer=planned.peer,
            num_workers=self._channel.num_workers,
            seed=seed_of(planned),
            autocast=autocast,
            batches=batches,
            finding=next((f for f in known if f.id == planned.reason), None),
            versions={"torch": torch.__version__},
        )

    def _save(self) -> None:
        assert self._run_dir is not None
        assert self._bundle is not None
        try:
            save_bundle(self._run_dir, self._bundle)
        except RunError as error:
            _log.warning("a replay bundle is lost: %s", error)


def _message(captured: _Captured | None) -> NDArray[np.uint8]:
    """Return what to send of a batch, nothing if there is none: others wait for it already."""
    if captured is None or captured.batch is None:
        return np.empty(0, np.uint8)
    try:
        return pack_batch(captured.batch.plain())
    except Exception as error:
        _log.info("the batch kept at step %d is lost: %r", captured.planned.capture_at, error)
        return np.empty(0, np.uint8)


def _differing(known: Sequence[Finding], step: int) -> tuple[int, ...]:
    """Return the workers that the diagnosis of this canary found to hold other state."""
    for finding in known:
        if finding.last_step == step and finding.evidence.get("verdict") == str(Verdict.STATE):
            return finding.ranks
    return ()


def seed_of(planned: Planned) -> int:
    """Return the seed of all random generators in a canary, equal on all workers."""
    return 0x5EED + planned.capture_at


def check_canary(wrapped: Wrapped, *, wanted: bool, every: int | None) -> bool:
    """Return whether canaries run in a training.

    Args:
        wrapped: The model.
        wanted: Whether the user left them on.
        every: Steps from one scheduled canary to the next; None for none.

    Raises:
        UsageError: The options contradict each other.
        UnsupportedError: A schedule is asked for and cannot be kept.
    """
    if every is not None and (every < 1 or not wanted):
        raise UsageError(
            f"canary_every expected at least 1 step, and canary=True, got {every} and {wanted}"
        )
    if not wanted:
        return False
    reason = _why_not(wrapped)
    if reason and every is not None:
        raise UnsupportedError(f"canary_every cannot be kept: {reason}; leave it out")
    if reason:
        _log.info("no canaries in this run: %s", reason)
    return not reason


def _why_not(wrapped: Wrapped) -> str:
    num_workers = wrapped.group.size()
    if wrapped.kind != "DDP":
        return (
            f"a canary runs the whole model on each worker alone, which under {wrapped.kind} no "
            "worker holds"
        )
    if any(kind.__name__ == "LightningModule" for kind in type(wrapped.module).__mro__):
        return (
            "Lightning runs training_step in place of the model's forward pass, with all that it "
            "logs, which a canary cannot repeat"
        )
    if not 2 <= num_workers <= MAX_PAIRED:
        return f"canaries compare 2 to {MAX_PAIRED} workers, got {num_workers}"
    try:
        check_module(wrapped.module)
    except CanaryDeclined as declined:
        return str(declined)
    return ""
