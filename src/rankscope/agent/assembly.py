"""Assembles the messages of W workers into common steps, in order, and computes what follows.

A step is complete when every worker has delivered it. Messages come from senders: each worker by
itself, or all workers of a host together.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.agent.host_summary import HostSummary
from rankscope.agent.step_message import StepMessage, unpack_columns
from rankscope.bus.evidence import Source, Table
from rankscope.bus.messages import Combiner, HeldValues, Layout, Messages
from rankscope.bus.step import GatheredStep, StepReport
from rankscope.bus.words import name_ranks
from rankscope.evidence import EVIDENCE, columns_of


@dataclass(slots=True)
class Worker:
    """The state of one worker."""

    left: str | None = None  # why it sends nothing more; None while it may
    complete: bool = False  # whether it has completed its part of the run
    ended_at: float = 0.0  # Unix time at which it left
    wants_reports: bool = False  # whether it has subscribed to reports
    end_reason: str = ""  # why the run ended early, for a worker that has completed its part
    without_room: int = 0  # number of gradients it left out, as its agent did not keep up


class Workers(list[Worker]):
    """All workers of a run, by rank."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(Worker() for _ in range(num_workers))

    @property
    def left(self) -> list[int]:
        """The ranks that send nothing more."""
        return [rank for rank, worker in enumerate(self) if worker.left is not None]

    def leave(self, rank: int, why: str, at: float) -> None:
        """Record that a worker sends nothing more; the first reason counts."""
        if self[rank].left is None:
            self[rank].left = why
            self[rank].ended_at = at

    def are_whole(self, delivered: Sequence[int]) -> bool:
        """Return whether all workers have completed the run, with the same last step."""
        return all(worker.complete for worker in self) and len(set(delivered)) == 1

    def ended(self, delivered: Sequence[int]) -> list[int]:
        """Return the ranks that have left, in order of last step, then of time."""
        return sorted(
            self.left,
            key=lambda rank: (self[rank].complete, delivered[rank], self[rank].ended_at),
        )

    def endings(self, delivered: Sequence[int]) -> list[dict[str, Any]]:
        """Return the ends of workers for the record, the first one first."""
        return [
            {
                "rank": rank,
                "last_step": delivered[rank],
                "time": self[rank].ended_at,
                "why": self[rank].left,
            }
            for rank in self.ended(delivered)
        ]


_log = logging.getLogger("rankscope")

_AMEND = [amend for each in EVIDENCE if (amend := each.at_root("amend")) is not None]

Sent = StepMessage | HostSummary  # what a sender delivers of one step


class Assembly:
    """Collects what the senders deliver until a step is complete."""

    def __init__(self, layout: Layout, first_step: int) -> None:
        self.next_step = first_step
        self.newest = first_step - 1
        self.lost: list[int] = []  # steps of which some worker's message was lost
        self.lost_of: Counter[int] = Counter()  # number of lost messages by rank
        self._queues: dict[int, deque[Sent | None]] = {}  # of each sender, by its first rank
        self._delivered_W = np.full(layout.num_workers, first_step - 1)
        self._num_silent = layout.num_workers
        self._combiners: list[Combiner] = []
        for each in EVIDENCE:
            if (make := each.at_root("make_combiner")) is not None:
                self._combiners.append(make(layout))
            if each.held:
                self._combiners.append(HeldValues(layout, each.held))

    @property
    def delivered(self) -> tuple[int, ...]:
        """The last step that each worker has delivered ``[W]``."""
        return tuple(self._delivered_W.tolist())

    @property
    def num_whole(self) -> int:
        """Number of complete steps that wait to be taken."""
        return 0 if self._num_silent else min(map(len, self._queues.values()))

    def learn(self, rank: int, message: StepMessage) -> None:
        """Process a message on arrival, before its step is complete."""
        for combiner in self._combiners:
            combiner.learn(rank, message)

    def add(self, ranks: Sequence[int] | NDArray[np.int32], sent: Sent) -> None:
        """Add what the sender of these ranks has delivered; a repeated step is ignored."""
        first = int(ranks[0])
        if first not in self._queues:
            self._queues[first] = deque()
            self._num_silent -= len(ranks)
        gap = sent.step - int(self._delivered_W[first]) - 1
        if gap < 0:
            return
        for rank in ranks if gap else ():
            self._note_lost(int(rank), sent.step, gap)
        self._queues[first].extend([None] * gap)  # lost on the way from another host
        self._queues[first].append(sent)
        self._delivered_W[ranks] = sent.step
        self.newest = max(self.newest, sent.step)

    def _note_lost(self, rank: int, step: int, gap: int) -> None:
        if not self.lost_of:
            _log.warning(
                "%s: its data up to step %d was lost on the way, of %d steps, which are not "
                "recorded: the link to its host was broken or too slow. This warning is not "
                "repeated; run.json counts the lost messages of each rank",
                name_ranks([rank]),
                step - 1,
                gap,
            )
        self.lost_of[rank] += gap

    def take(self, most: int) -> list[list[Any]]:
        """Return the next complete steps, ``most`` at most: what each sender delivered, by rank."""
        steps: list[list[Any]] = []
        while len(steps) < most and self.num_whole:
            step = self.next_step
            self.next_step += 1
            sent = [self._queues[first].popleft() for first in sorted(self._queues)]
            whole = [each for each in sent if each is not None]
            if len(whole) == len(sent):
                steps.append(whole)
            else:
                self.lost.append(step)
        return steps

    def step_of(self, messages: Messages, interval: int) -> GatheredStep:
        """Merge the messages of all workers into one step."""
        columns = unpack_columns(messages["slots"].matrix)
        fields: dict[str, Any] = {}
        for combiner in self._combiners:
            for name, value in combiner.combine(messages, columns).items():
                fields[name] = fields[name] + value if name in fields else value
        times = messages.times_W[np.isfinite(messages.times_W)]
        gathered = GatheredStep(
            step=messages.step,
            time=float(times.max()) if len(times) else time.time(),
            workers=columns,
            interval=interval,
            **fields,
        )
        for amend in _AMEND:
            gathered = amend(gathered)
        return gathered


_STEPS = tuple(column.name for column in columns_of(Table.STEPS, Source.DERIVED))
_WORKERS = {column.name for column in columns_of(Table.WORKERS, Source.DERIVED)}
_DERIVE = [derive for each in EVIDENCE if (derive := each.at_root("derive")) is not None]


def summarize(gathered: GatheredStep) -> StepReport:
    """Compute every DERIVED column of a step from its finite values."""
    steps: dict[str, float] = {"interval": float(gathered.interval)}
    workers: dict[str, Any] = {}
    report: dict[str, Any] = {}
    for derive in _DERIVE:
        derived = derive(gathered)
        steps.update(derived.steps)
        workers.update(derived.workers)
        report.update(derived.report)
    assert steps.keys() == set(_STEPS), "the steps table has other derived columns"
    assert workers.keys() == _WORKERS, "the workers table has other derived columns"
    values = {name: steps[name] for name in _STEPS}
    return StepReport(gathered, values, workers, **report)
