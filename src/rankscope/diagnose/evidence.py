"""What detectors hand to the diagnosis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankscope.core.finding import Severity

Groups = Sequence[tuple[int, ...]]
"""Groups of ranks whose batches are identical."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a detector knows about its cause, over the whole run so far.

    Attributes:
        cause: Name of the cause.
        severity: How bad it is now.
        ranks: The workers concerned.
        first_step: The first step that shows it.
        last_step: The last step that shows it.
        count: How much of it there is; a finding is told again when this has doubled.
        fields: What the templates of the rules need.
        numbers: Evidence for the record.
    """

    cause: str
    severity: Severity
    ranks: tuple[int, ...]
    first_step: int
    last_step: int
    count: int
    fields: Mapping[str, object] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
