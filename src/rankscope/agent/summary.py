"""The summary of a step that a host's agent sends to the root, beyond 64 workers.

It holds the messages of its workers without their sketches, packed together since much in them is
the same; the sketches narrowed (:mod:`rankscope.stats.consensus`); and its part of the audit
(:mod:`rankscope.stats.audit`): one sum, and one copy of equal reduced gradients.

Legend of shapes: w workers of the host, K numbers in a narrow sketch, g groups in turn, k numbers
in the narrow sketch of a group, r = 1 + s rows of the audit: the whole gradient and sections in
turn, a numbers in each, d different reduced gradients.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.agent.message import MessageError, StepMessage
from rankscope.bus.layout import Layout
from rankscope.bus.measured import NUMBERS, SKETCHES, measured_of
from rankscope.bus.step import GatheredStep
from rankscope.stats.arrays import Floats, Ints
from rankscope.stats.audit import AuditPart, distinct, residuals_by_row, total_of
from rankscope.stats.consensus import Halves, consensus_of, in_turn, narrow, narrowing_for

_ARRAYS: tuple[tuple[str, type[np.generic]], ...] = (
    ("ranks_w", np.int32),
    ("lengths_w", np.int32),
    ("packed", np.uint8),
    ("sketches_wK", np.float16),
    ("exponents_w", np.int16),
    ("group_sketches_gwk", np.float16),
    ("group_exponents_gw", np.int16),
    ("audit_total_N", np.float32),
    ("reduced_dra", np.float32),
    ("reduced_squares_dr", np.float64),
    ("which_w", np.int16),
)
_HEADER = struct.Struct(f"<q{len(_ARRAYS)}I")


@dataclass(frozen=True, slots=True)
class HostSummary:
    """A step of a host's workers, as :func:`host_summary` packed it.

    Attributes:
        step: Step number.
        messages: The workers' messages by rank, without sketches.
        arrays: All other parts, flat, by name.
    """

    step: int
    messages: Mapping[int, StepMessage]
    arrays: Mapping[str, NDArray[Any]]

    @classmethod
    def unpack(cls, content: bytes) -> "HostSummary":
        """Read a summary.

        Raises:
            MessageError: It is truncated, or holds a message of another version.
        """
        try:
            step, *lengths = _HEADER.unpack_from(content)
            arrays = {}
            at = _HEADER.size
            for (name, dtype), length in zip(_ARRAYS, lengths, strict=True):
                arrays[name] = np.frombuffer(content, dtype, length, at)
                at += length * np.dtype(dtype).itemsize
            packed = zlib.decompress(arrays["packed"].data)
        except (struct.error, ValueError, zlib.error) as error:
            raise MessageError(f"a host's step of {len(content)} bytes is cut short") from error
        ends = np.cumsum(arrays["lengths_w"]).tolist()
        pieces = zip([0, *ends[:-1]], ends, strict=True)
        messages = [StepMessage.unpack(packed[begin:end]) for begin, end in pieces]
        ranks = arrays.pop("ranks_w").tolist()
        return cls(step, dict(zip(ranks, messages, strict=True)), arrays)


def summary_layout(layout: Layout) -> Layout:
    """Return the layout of messages without sketches, with groups in place of sections."""
    return replace(layout, section_counts=(), sketch_width=0, group_width=0, audit_width=0)


def host_summary(messages: Mapping[int, StepMessage], layout: Layout) -> bytes:
    """Return the summary of one step, from the messages of all of the host's workers by rank."""
    ranks = sorted(messages)
    step = messages[ranks[0]].step
    packed = [_without_sketches(messages[rank], layout).pack() for rank in ranks]
    arrays: dict[str, Any] = {
        "ranks_w": ranks,
        "lengths_w": [len(each) for each in packed],
        "packed": np.frombuffer(zlib.compress(b"".join(packed), 1), np.uint8),
    }
    if all(messages[rank].measured for rank in ranks):
        arrays |= _narrowed([messages[rank] for rank in ranks], layout)
    flat = [np.asarray(arrays.get(name, ()), dtype).ravel() for name, dtype in _ARRAYS]
    header = _HEADER.pack(step, *(array.size for array in flat))
    return b"".join([header, *(array.tobytes() for array in flat)])


def with_directions(
    gathered: GatheredStep, summaries: Sequence[HostSummary], layout: Layout
) -> GatheredStep:
    """Add directions and residuals from the summaries of all hosts to a step.

    Args:
        gathered: The step, from messages without sketches.
        summaries: The summaries of the step from all hosts.
        layout: The layout of the workers' own messages.
    """
    if not gathered.observed:
        return gathered
    narrowing = narrowing_for(layout.num_workers)
    order_W = np.argsort([rank for one in summaries for rank in one.messages])
    changes: dict[str, Any] = {}
    if layout.sketch_width:
        groups = _groups_in_turn(gathered.step, layout)
        rows = _rows(summaries, "sketches_wK", "exponents_w", 1)[0][order_W]
        group_rows = np.empty((0, len(order_W), 0))
        if len(groups):
            group_rows = _rows(summaries, "group_sketches_gwk", "group_exponents_gw", len(groups))[
                :, order_W
            ]
        changes |= {"consensus": consensus_of(rows, group_rows), "groups_in_turn": groups}
    if layout.section_counts:
        chosen = in_turn(gathered.step, sum(layout.section_counts), narrowing.num_sections)
        found_WR = _residuals(summaries, layout, 1 + len(chosen))[order_W]
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
    gradients = [
        measured_of(one.numbers, one.sketches, one.sizes, layout.section_counts).gradient
        for one in messages
    ]
    arrays: dict[str, Any] = {}
    if layout.sketch_width:
        rows = narrow(np.stack([one.sketch_K for one in gradients]), narrowing.sketch_width)
        arrays |= {"sketches_wK": rows.numbers_NK, "exponents_w": rows.exponents_N}
    groups = _groups_in_turn(step, layout)
    if len(groups):
        chosen = np.concatenate([[one.group_sketches_GK[g] for one in gradients] for g in groups])
        rows = narrow(chosen, narrowing.group_width)
        arrays |= {"group_sketches_gwk": rows.numbers_NK, "group_exponents_gw": rows.exponents_N}
    if layout.section_counts:
        sections = in_turn(step, sum(layout.section_counts), narrowing.num_sections)
        parts = [
            one.audit.narrowed(sections, narrowing.audit_width)
            for one in gradients
            if one.audit is not None
        ]
        width = layout.num_workers
        copies = layout.reduced_copies
        with np.errstate(over="ignore"):
            arrays["audit_total_N"] = total_of(parts, width, copies).astype(np.float32)
        if copies >= width:
            kept, arrays["which_w"] = distinct(parts)
            arrays["reduced_dra"] = [part.reduced_SK for part in kept]
            arrays["reduced_squares_dr"] = [part.reduced_squares_S for part in kept]
    return arrays


def _rows(summaries: Sequence[HostSummary], name: str, exponents: str, sets: int) -> Floats:
    """Return narrow sketches ``[sets, W, K]``, workers in the order of the summaries."""
    found = []
    for one in summaries:
        powers = one.arrays[exponents]
        rows = Halves(one.arrays[name].reshape(len(powers), -1), powers).widened()
        found.append(rows.reshape(sets, len(powers) // sets, -1))
    return np.concatenate(found, axis=1)


def _residuals(summaries: Sequence[HostSummary], layout: Layout, num_rows: int) -> Floats:
    """Return residuals of the rows ``[W, r]``, workers in the order of the summaries."""
    width = layout.num_workers
    copies = layout.reduced_copies
    totals = np.stack([one.arrays["audit_total_N"] for one in summaries])
    total_N: Floats = totals.sum(axis=0, dtype=np.float64)
    if copies < width:
        shape = num_rows, len(total_N) // num_rows - 1
        nothing = AuditPart(np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty(0))
        return np.tile(residuals_by_row(total_N, nothing, width, copies), (width, 1))
    found = []
    for one in summaries:
        reduced_dra = one.arrays["reduced_dra"].reshape(-1, num_rows, len(total_N) // num_rows)
        squares_dr = one.arrays["reduced_squares_dr"].reshape(-1, num_rows)
        parts = [AuditPart(row, row, own) for row, own in zip(reduced_dra, squares_dr, strict=True)]
        each = [residuals_by_row(total_N, part, width, copies) for part in parts]
        found += [each[place] for place in one.arrays["which_w"]]
    return np.stack(found)


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
