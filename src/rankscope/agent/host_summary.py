"""The summary of a step that a host's agent sends to the root, beyond 64 workers.

It holds the messages of its workers without their sketches; the sketches narrowed
(:mod:`rankscope.stats.direction`); and its part of the audit (:mod:`rankscope.stats.audit`): one
sum, and one copy of equal reduced gradients. The root reads those of all hosts at once.

Legend of shapes: H hosts, w workers of one, W workers of several, A arrays of a message, K numbers
in a narrow sketch, g groups in turn, k numbers in the narrow sketch of a group, r = 1 + s rows of
the audit (the whole gradient and sections in turn), a numbers in each, d different reduced ones.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.agent.step_message import ARRAYS, MessageError, StepMessage, check_schema
from rankscope.bus.gradient_part import NUMBERS, SKETCHES, audit_of, by_rank, measured_in
from rankscope.bus.messages import Layout, Messages
from rankscope.bus.step import GatheredStep
from rankscope.evidence import schema_hash
from rankscope.stats.arrays import Floats, Ints, Ragged
from rankscope.stats.audit import AuditPart, distinct, residuals_by_row, total_of
from rankscope.stats.direction import Halves, consensus_of, in_turn, narrow, narrowing_for


def as_columns(messages: Sequence[StepMessage]) -> Messages:
    """Return the messages of one step as columns."""
    arrays = {
        array.name: Ragged.of(
            [np.asarray(getattr(message, array.name), array.dtype) for message in messages]
        )
        for array in ARRAYS
    }
    times_W = np.array([message.time for message in messages], np.float64)
    items_W = np.array([message.items for message in messages], np.int64)
    return Messages(messages[0].step, times_W, items_W, arrays)


_ARRAYS: tuple[tuple[str, type[np.generic]], ...] = (
    ("ranks_w", np.int32),
    ("times_w", np.float64),
    ("items_w", np.int64),
    ("lengths_wA", np.int32),
    *((array.name, array.dtype) for array in ARRAYS),
    ("sketches_wK", np.float16),
    ("exponents_w", np.int16),
    ("group_sketches_wgk", np.float16),
    ("group_exponents_wg", np.int16),
    ("audit_total_N", np.float32),
    ("reduced_dra", np.float32),
    ("reduced_squares_dr", np.float64),
    ("which_w", np.int16),
)
_TYPES = dict(_ARRAYS)
_HEADER = struct.Struct(f"<qq{len(_ARRAYS)}I")  # schema, step, bytes of each array


@dataclass(frozen=True, slots=True)
class HostSummary:
    """A step of a host's workers, as :func:`host_summary` packed it."""

    step: int
    ranks_w: NDArray[np.int32]  # the workers' ranks
    content: bytes  # all of it

    @classmethod
    def unpack(cls, content: bytes) -> "HostSummary":
        """Read step and ranks."""
        if len(content) < _HEADER.size:
            raise MessageError(f"a host's step of {len(content)} bytes is cut short")
        schema, step, *sizes = _HEADER.unpack_from(content)
        check_schema(schema)
        if _HEADER.size + sum(sizes) != len(content):
            raise MessageError(f"a host's step of {len(content)} bytes is cut short")
        ranks_w = np.frombuffer(content, np.int32, sizes[0] // 4, _HEADER.size)
        return cls(step, ranks_w, content)


class HostsStep:
    """A step from the summaries of all hosts."""

    def __init__(self, summaries: Sequence[HostSummary]) -> None:
        self._contents = [one.content for one in summaries]
        self.step = summaries[0].step
        self.ranks_H = [one.ranks_w for one in summaries]
        headers = b"".join([content[: _HEADER.size] for content in self._contents])
        sizes_HA = np.frombuffer(headers, np.uint32).reshape(len(summaries), -1)[:, 4:]
        self._ends_AH = (_HEADER.size + sizes_HA.astype(np.int64).cumsum(axis=1)).T
        self._begins_AH = self._ends_AH - sizes_HA.T

    @property
    def messages(self) -> Messages:
        """The workers' messages, without sketches, in the order of their ranks."""
        order_W = np.argsort(np.concatenate(self.ranks_H))
        lengths_WA = self.joined("lengths_wA").astype(np.int64).reshape(-1, len(ARRAYS))
        arrays = {
            array.name: Ragged(self.joined(array.name), lengths_R).take(order_W)
            for array, lengths_R in zip(ARRAYS, lengths_WA.T, strict=True)
        }
        times_W, items_W = (self.joined(name)[order_W] for name in ("times_w", "items_w"))
        return Messages(self.step, times_W, items_W, arrays)

    def joined(self, name: str) -> NDArray[Any]:
        """Return an array of all hosts, flat."""
        return np.frombuffer(b"".join(self._parts(name)), _TYPES[name])

    def lengths_of(self, name: str) -> Ints:
        """Return how long each host's array is ``[H]``."""
        place = list(_TYPES).index(name)
        sizes_H: Ints = self._ends_AH[place] - self._begins_AH[place]
        return sizes_H // np.dtype(_TYPES[name]).itemsize

    def _parts(self, name: str) -> list[bytes]:
        place = list(_TYPES).index(name)
        spans = zip(
            self._contents,
            self._begins_AH[place].tolist(),
            self._ends_AH[place].tolist(),
            strict=True,
        )
        return [content[begin:end] for content, begin, end in spans]


def summary_layout(layout: Layout) -> Layout:
    """Return the layout of messages without sketches, with groups in place of sections."""
    return replace(layout, section_counts=(), sketch_width=0, group_width=0, audit_width=0)


def host_summary(messages: Mapping[int, StepMessage], layout: Layout) -> bytes:
    """Return the summary of one step, from the messages of all of the host's workers by rank."""
    ranks = sorted(messages)
    step = messages[ranks[0]].step
    arrays: dict[str, Any] = {"ranks_w": ranks}
    lean = as_columns([_without_sketches(messages[rank], layout) for rank in ranks])
    arrays |= {name: each.flat for name, each in lean.arrays.items()}
    arrays |= {
        "times_w": lean.times_W,
        "items_w": lean.items_W,
        "lengths_wA": np.stack([each.lengths_R for each in lean.arrays.values()], axis=1),
    }
    if all(messages[rank].measured for rank in ranks):
        arrays |= _narrowed([messages[rank] for rank in ranks], layout)
    packed = [np.asarray(arrays.get(name, ()), dtype).tobytes() for name, dtype in _ARRAYS]
    return b"".join([_HEADER.pack(schema_hash(), step, *map(len, packed)), *packed])


class HostSteps:
    """Collects the messages of a host's ranks until a step is complete."""

    def __init__(self, num_local: int, layout: Layout) -> None:
        self._num_local = num_local
        self._layout = layout
        self._steps: dict[int, dict[int, StepMessage]] = {}

    def add(self, rank: int, message: StepMessage) -> bytes | None:
        """Add a message; return the host's summary of the step that it completes."""
        step = self._steps.setdefault(message.step, {})
        step[rank] = message
        if len(step) < self._num_local:
            return None
        return host_summary(self._steps.pop(message.step), self._layout)


def with_directions(gathered: GatheredStep, hosts: HostsStep, layout: Layout) -> GatheredStep:
    """Add directions and residuals from the summaries of all hosts to a step."""
    if not gathered.observed:
        return gathered
    narrowing = narrowing_for(layout.num_workers)
    order_W = np.argsort(np.concatenate(hosts.ranks_H))
    changes: dict[str, Any] = {}
    if layout.sketch_width:
        groups = _groups_in_turn(gathered.step, layout)
        [rows] = _rows(hosts, "sketches_wK", "exponents_w", order_W)
        group_rows = np.empty((0, len(order_W), 0))
        if len(groups):
            group_rows = _rows(hosts, "group_sketches_wgk", "group_exponents_wg", order_W)
        changes |= {"consensus": consensus_of(rows, group_rows), "groups_in_turn": groups}
    if layout.section_counts:
        chosen = in_turn(gathered.step, sum(layout.section_counts), narrowing.num_sections)
        found_WR = _residuals(hosts, layout, 1 + len(chosen))[order_W]
        changes |= {
            "total_residuals_W": found_WR[:, 0],
            "residuals_WG": _by_group(found_WR[:, 1:], chosen, layout.section_counts),
        }
    return replace(gathered, **changes)


def _groups_in_turn(step: int, layout: Layout) -> Ints:
    count = len(layout.groups) if layout.group_width else 0
    return in_turn(step, count, narrowing_for(layout.num_workers).num_groups)


def _without_sketches(message: StepMessage, layout: Layout) -> StepMessage:
    """Return a message without sketches, with numbers by group."""
    if not message.measured:
        return message
    sizes = message.sizes.tolist()
    num_rows, num_reduced = sizes[:2]
    counts = layout.section_counts or (1,) * num_rows
    firsts = np.cumsum((0, *counts[:-1]))
    squares, reduced, rest = np.split(message.numbers, [num_rows, num_rows + num_reduced])
    parts = [np.add.reduceat(each, firsts) if len(each) else each for each in (squares, reduced)]
    lean = [len(parts[0]), len(parts[1]), *sizes[2 : len(NUMBERS)], *(0,) * len(SKETCHES)]
    return message.replace(
        numbers=np.concatenate([*parts, rest]),
        sizes=np.array([*lean, sizes[-1]], np.int64),
        sketches=np.empty(0, np.float32),
    )


def _narrowed(messages: Sequence[StepMessage], layout: Layout) -> dict[str, Any]:
    narrowing = narrowing_for(layout.num_workers)
    step = messages[0].step
    found = measured_in(as_columns(messages), layout.section_counts)
    arrays: dict[str, Any] = {}
    if layout.sketch_width:
        rows = narrow(by_rank(found, "sketches_wK"), narrowing.sketch_width)
        arrays |= {"sketches_wK": rows.numbers_NK, "exponents_w": rows.exponents_N}
    groups = _groups_in_turn(step, layout)
    if len(groups):
        chosen_wgK = by_rank(found, "group_sketches_wGK")[:, groups]
        rows = narrow(chosen_wgK.reshape(-1, chosen_wgK.shape[-1]), narrowing.group_width)
        arrays |= {"group_sketches_wgk": rows.numbers_NK, "group_exponents_wg": rows.exponents_N}
    if layout.section_counts:
        sections = in_turn(step, sum(layout.section_counts), narrowing.num_sections)
        parts = [part.narrowed(sections, narrowing.audit_width) for part in audit_of(found)]
        width = layout.num_workers
        copies = layout.reduced_copies
        with np.errstate(over="ignore"):
            arrays["audit_total_N"] = total_of(parts, width, copies).astype(np.float32)
        if copies >= width:
            kept, arrays["which_w"] = distinct(parts)
            arrays["reduced_dra"] = [part.reduced_SK for part in kept]
            arrays["reduced_squares_dr"] = [part.reduced_squares_S for part in kept]
    return arrays


def _rows(hosts: HostsStep, name: str, exponents: str, order_W: Ints) -> Floats:
    """Return narrow sketches of all workers ``[sets, W, K]``."""
    powers_sW = hosts.joined(exponents).reshape(len(order_W), -1).T[:, order_W]
    shape = len(order_W), len(powers_sW), -1
    numbers_sWK = hosts.joined(name).reshape(shape).swapaxes(0, 1)[:, order_W]
    return Halves(numbers_sWK, powers_sW).widened()


def _residuals(hosts: HostsStep, layout: Layout, num_rows: int) -> Floats:
    """Return residuals of the rows ``[W, r]``, in the order of the hosts."""
    width = layout.num_workers
    copies = layout.reduced_copies
    totals_HN = hosts.joined("audit_total_N").reshape(len(hosts.ranks_H), -1)
    total_N: Floats = totals_HN.sum(axis=0, dtype=np.float64)
    if copies < width:
        shape = num_rows, len(total_N) // num_rows - 1
        nothing = AuditPart(np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty(0))
        return np.tile(residuals_by_row(total_N, nothing, width, copies), (width, 1))
    reduced_dra = hosts.joined("reduced_dra").reshape(-1, num_rows, len(total_N) // num_rows)
    squares_dr = hosts.joined("reduced_squares_dr").reshape(-1, num_rows)
    found_dr = residuals_by_row(
        total_N, AuditPart(reduced_dra, reduced_dra, squares_dr), width, copies
    )
    kept_H = hosts.lengths_of("reduced_squares_dr") // num_rows
    firsts_H = np.cumsum(kept_H) - kept_H
    counts_H = [len(ranks) for ranks in hosts.ranks_H]
    which_W: Ints = hosts.joined("which_w") + np.repeat(firsts_H, counts_H)
    return found_dr[which_W]


def _by_group(found_Ws: Floats, sections: Ints, counts: Sequence[int]) -> Floats:
    """Return the largest residual of each group's sections in turn ``[W, G]``; NaN without any."""
    group_of = np.repeat(np.arange(len(counts)), counts)[sections]
    found_WG = np.full((len(found_Ws), len(counts)), np.nan)
    for place, group in enumerate(group_of):
        now = found_WG[:, group]
        here = found_Ws[:, place]
        first = group not in group_of[:place]
        found_WG[:, group] = here if first else np.maximum(now, here)
    return found_WG
