"""How far a run came: what its end, and the runs that it continues, allow to say."""

from dataclasses import dataclass

from rankscope.core.signals import Table
from rankscope.record import Run
from rankscope.record.states import START_FILE, read_number
from rankscope.record.tables import step_range


@dataclass(frozen=True, slots=True)
class Course:
    """How far a run came.

    Attributes:
        status: As in ``run.json``: ``running``, ``complete`` or ``incomplete``.
        last_step: The last step on record; -1 without any.
        earlier_steps: Steps of the runs that it continues, as far as detectors remember them; None
            where that is not known.
    """

    status: str = "running"
    last_step: int = -1
    earlier_steps: int | None = 0

    @property
    def ended(self) -> bool:
        """Whether no more steps will come."""
        return self.status != "running"

    @property
    def cut_short(self) -> bool:
        """Whether the record has steps and ends before it should."""
        return self.status == "incomplete" and self.last_step >= 0


def course_of(run: Run) -> Course:
    """Return how far a recorded run came.

    Raises:
        RunError: The files of its steps cannot be listed.
    """
    steps = step_range(run.path, Table.STEPS)
    return Course(run.status, -1 if steps is None else steps[1], _earlier_steps(run))


def _earlier_steps(run: Run) -> int | None:
    return read_number(run.path / START_FILE, "num_steps") if "continues" in run.info else 0
