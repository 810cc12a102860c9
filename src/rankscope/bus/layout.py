"""The layout of all messages of a run, sent to the root once, as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Layout:
    """How to read the workers' messages.

    Attributes:
        num_workers: W.
        groups: Names of the parameter groups.
        section_counts: How many sections each group has; empty without an audit.
        sketch_width: Numbers in the sketch of the local gradient; 0 without sketches.
        group_width: Numbers in the sketch of each group; 0 without.
        audit_width: Numbers in the sketch of a section; 0 without an audit.
        reduced_copies: How many workers hold each element of the reduced gradient.
        num_products: Inner products of the local gradient with the reduced one, 1 or 0.
        by_loop: Whether the training's own loop reduces: to a mean, a sum, or not at all.
    """

    num_workers: int
    groups: tuple[str, ...] = ()
    section_counts: tuple[int, ...] = ()
    sketch_width: int = 0
    group_width: int = 0
    audit_width: int = 0
    reduced_copies: int = 1
    num_products: int = 0
    by_loop: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "Layout":
        """Read what :meth:`to_json` returned."""
        lists = {"groups", "section_counts"}
        values: dict[str, Any] = {n: tuple(v) if n in lists else v for n, v in given.items()}
        return cls(**values)
