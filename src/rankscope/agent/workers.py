"""The state of each worker at the root."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Worker:
    """The state of one worker.

    Attributes:
        left: Why it sends nothing more; None while it may.
        complete: Whether it has completed its part of the run.
        ended_at: Unix time at which it left.
        wants_reports: Whether it has subscribed to reports.
        end_reason: Why the run ended early, for a worker that has completed its part.
        without_room: Number of gradients it left out, as its agent did not keep up.
    """

    left: str | None = None
    complete: bool = False
    ended_at: float = 0.0
    wants_reports: bool = False
    end_reason: str = ""
    without_room: int = 0


class Workers(list[Worker]):
    """All workers of a run, by rank."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(Worker() for _ in range(num_workers))

    @property
    def left(self) -> list[int]:
        """The ranks that send nothing more."""
        return [rank for rank, worker in enumerate(self) if worker.left is not None]

    @property
    def readers(self) -> list[int]:
        """The ranks that have subscribed to reports."""
        return [rank for rank, worker in enumerate(self) if worker.wants_reports]

    def leave(self, rank: int, why: str, at: float) -> None:
        """Record that a worker sends nothing more; the first reason counts."""
        if self[rank].left is None:
            self[rank].left = why
            self[rank].ended_at = at

    def are_whole(self, delivered: Sequence[int]) -> bool:
        """Return whether all workers have completed the run, with the same last step."""
        return all(worker.complete for worker in self) and len(set(delivered)) == 1

    def ended(self, delivered: Sequence[int]) -> list[int]:
        """Return the ranks that have left, in order of last step, then of time.

        On a busy machine several ends may arrive at once.
        """
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

    @property
    def without_room(self) -> dict[int, int]:
        """Number of gradients left out, by rank, where not 0."""
        return {rank: each.without_room for rank, each in enumerate(self) if each.without_room}
