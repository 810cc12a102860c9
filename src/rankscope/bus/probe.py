"""What a kind of evidence does in the training process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

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
