"""What the root knows of each worker: whether it still sends, why not, and what it left out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Worker:
    """What the root knows of one worker.

    Attributes:
        left: Why it sends nothing any more; None while it may.
        complete: Whether it has said that its part of the run is complete.
        ended_at: Unix time at which it left.
        wants_reports: Whether it asked for the steps' reports.
        last_word: What it is told when the run is closed, though all was well on its side.
        without_room: Steps whose gradient it left out, as its agent did not keep up.
    """

    left: str | None = None
    complete: bool = False
    ended_at: float = 0.0
    wants_reports: bool = False
    last_word: str = ""
    without_room: int = 0


class Workers(list[Worker]):
    """All workers of a run, by rank.

    Args:
        num_workers: W.
    """

    def __init__(self, num_workers: int) -> None:
        super().__init__(Worker() for _ in range(num_workers))

    @property
    def left(self) -> list[int]:
        """The ranks that send nothing any more."""
        return [rank for rank, worker in enumerate(self) if worker.left is not None]

    @property
    def readers(self) -> list[int]:
        """The ranks that asked for the steps' reports."""
        return [rank for rank, worker in enumerate(self) if worker.wants_reports]

    def leave(self, rank: int, why: str, at: float) -> None:
        """Note that a worker sends nothing any more; the first reason counts."""
        if self[rank].left is None:
            self[rank].left, self[rank].ended_at = why, at

    def are_whole(self, delivered: Sequence[int]) -> bool:
        """Return whether all have said that the run is complete, after the same step.

        Args:
            delivered: The last step of each worker.
        """
        return all(worker.complete for worker in self) and len(set(delivered)) == 1

    def ended(self, delivered: Sequence[int]) -> list[int]:
        """Return the ranks that have left, the first one first: by its last step, then by time.

        A busy machine tells the agent of several ends at once.
        """
        return sorted(
            self.left,
            key=lambda rank: (self[rank].complete, delivered[rank], self[rank].ended_at),
        )

    def endings(self, delivered: Sequence[int]) -> list[dict[str, Any]]:
        """Return who ended, when and why, as the record keeps it; the first one first."""
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
        """How many steps' gradients were left out, by rank; only of those that did."""
        return {rank: each.without_room for rank, each in enumerate(self) if each.without_room}
