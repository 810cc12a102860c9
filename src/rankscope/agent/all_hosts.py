"""The processes of all ranks of a job, as the root knows them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rankscope.agent.hang_report import CodePlace, ProcessState, Stack
from rankscope.agent.local_ranks import LocalRanks

if TYPE_CHECKING:
    from rankscope.agent.branches import Branches


class AllHosts:
    """The processes of all ranks, on this host and on others.

    Args:
        local: Those of this host.
        branches: The other hosts; None without.
    """

    def __init__(self, local: LocalRanks, branches: "Branches | None") -> None:
        self._local, self._branches = local, branches
        self.endings: dict[int, str] = {}

    def ask(self) -> None:
        """Have other hosts look at their processes."""
        if self._branches is not None:
            self._branches.ask()

    def states(self) -> Mapping[int, ProcessState]:
        """Return how the processes are, as far as is known."""
        others = {} if self._branches is None else self._branches.states
        return {**others, **self._local.states()}

    def marks(self) -> Mapping[int, CodePlace]:
        """Return where the ranks are inside of their steps, as far as is known."""
        others = {} if self._branches is None else self._branches.places
        return {**others, **self._local.marks()}

    def ending(self, rank: int) -> str:
        """Return what became of a rank whose connection was lost, as far as that is known."""
        return self.endings.get(rank) or self._local.ending(rank)

    def say(self, line: str) -> None:
        """Write a line where the training's warnings go, though it stands still."""
        self._local.say(line)

    def take_stacks(self) -> None:
        """Begin to take stacks, on all hosts."""
        self._local.take_stacks()
        if self._branches is not None:
            self._branches.take_stacks()

    def stacks(self) -> Mapping[int, Stack] | None:
        """Return stacks by rank, once some have come."""
        own = self._local.stacks() or {}
        others = {} if self._branches is None else self._branches.stacks()
        return {**others, **own} or None
