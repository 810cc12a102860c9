"""The summary of a step that a host's agent sends to the root, beyond 64 workers.

It holds the messages of its workers without their sketches as one block; the sketches narrowed
(:mod:`rankscope.stats.direction`); and its part of the audit (:mod:`rankscope.stats.audit`): one
sum, and one copy of equal reduced gradients. The root reads those of all hosts at once.

Much in the messages of a host is the same for all of its workers. They are the rows of a matrix of
eight-byte words: a column of equal words is stored once, one of small integers in four bytes each.
Blocks that do so with the same columns are read together.

Legend of shapes: H hosts, w workers of one, W workers of several, B blocks, P words of a worker, K
numbers in a narrow sketch, g groups in turn, k numbers in the narrow sketch of a group, r = 1 + s
rows of the audit: the whole gradient and sections in turn, a numbers in each, d different reduced
gradients.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.agent.step_message import ARRAYS, MessageError, StepMessage, check_schema
from rankscope.bus.evidence import Array
from rankscope.bus.gradient_part import NUMBERS, SKETCHES, audit_of, by_rank, measured_in
from rankscope.bus.messages import Layout, Messages
from rankscope.bus.step import GatheredStep
from rankscope.evidence import schema_hash
from rankscope.stats.arrays import Floats, Ints, Ragged
from rankscope.stats.audit import AuditPart, distinct, residuals_by_row, total_of
from rankscope.stats.direction import Halves, consensus_of, in_turn, narrow, narrowing_for

PARTS: tuple[tuple[str, type[np.generic]], ...] = (
    ("lengths_A", np.int32),  # of arrays that are as long for all workers; or UNEVEN
    ("kinds", np.uint8),  # of each word, a bit whether it is long, then a bit whether it is short
    ("long", np.int64),
    ("short", np.int32),
    ("same", np.int64),
    ("uneven", np.uint8),  # the other arrays, one after the other
)
"""The parts of a block, in order."""

_UNEVEN = -1
_WORD = 8
_FIRST = Array("first", np.int64)  # time and items
_Parts = Mapping[str, Sequence[bytes]]


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


def pack_block(messages: Messages) -> dict[str, NDArray[Any]]:
    """Return the parts of a block, by name."""
    rows = [messages[array.name] for array in ARRAYS]
    uneven = [each for each in rows if not each.is_even]
    words_wP = np.concatenate(
        [
            messages.times_W.view(np.int64)[:, None],
            messages.items_W[:, None],
            *(each.lengths_R[:, None] for each in uneven),
            *(_as_words(each.matrix) for each in rows if each.is_even),
        ],
        axis=1,
    )
    same_P = (words_wP == words_wP[0]).all(axis=0)
    short_P = ~same_P & (words_wP == words_wP.astype(np.int32)).all(axis=0)
    long_P = ~same_P & ~short_P
    return {
        "lengths_A": np.array([each.lengths_R[0] if each.is_even else _UNEVEN for each in rows]),
        "kinds": np.packbits([long_P, short_P]),
        "long": words_wP[:, long_P],
        "short": words_wP[:, short_P],
        "same": words_wP[0, same_P],
        "uneven": np.concatenate([np.empty(0, np.uint8), *(e.flat.view(np.uint8) for e in uneven)]),
    }


def unpack_blocks(step: int, ranks_B: Sequence[NDArray[np.int32]], parts: _Parts) -> Messages:
    """Return the messages of all blocks of a step, in the order of their ranks."""
    read: list[int] = []
    found: list[dict[str, Ragged]] = []
    for lengths, alike in _grouped(parts["lengths_A"], range(len(ranks_B))):
        lengths_A = np.frombuffer(lengths, np.int32).tolist()
        num_words = 2 + sum(map(_width, ARRAYS, lengths_A))
        by_kinds = [*_grouped(parts["kinds"], alike)]
        words_WP = np.concatenate(
            [_words(kinds, num_words, blocks, ranks_B, parts) for kinds, blocks in by_kinds]
        )
        blocks = [block for _, equal in by_kinds for block in equal]
        counts = [len(ranks_B[block]) for block in blocks]
        uneven = [parts["uneven"][block] for block in blocks]
        found.append(_arrays(words_WP, lengths_A, counts, uneven))
        read += blocks
    rows = {name: Ragged.joined([each[name] for each in found]) for name in found[0]}
    ranks_W = np.concatenate([ranks_B[block] for block in read])
    if (ranks_W[1:] < ranks_W[:-1]).any():
        order_W = np.argsort(ranks_W)
        rows = {name: each.take(order_W) for name, each in rows.items()}
    times_W, items_W = rows[_FIRST.name].matrix.T.copy()
    return Messages(step, times_W.view(np.float64), items_W, rows)


def _width(array: Array, length: int) -> int:
    """Return how many words of a worker's row an array takes, or its length if it is uneven."""
    return 1 if length == _UNEVEN else -(-length * np.dtype(array.dtype).itemsize // _WORD)


def _as_words(rows_wL: NDArray[Any]) -> Ints:
    if rows_wL.itemsize == _WORD:
        return rows_wL.view(np.int64)
    raw_wL = rows_wL.view(np.uint8)
    return np.pad(raw_wL, ((0, 0), (0, -raw_wL.shape[1] % _WORD))).view(np.int64)


def _grouped(keys: Sequence[bytes], blocks: Iterable[int]) -> Iterable[tuple[bytes, list[int]]]:
    """Return the blocks with each key."""
    found: dict[bytes, list[int]] = {}
    for block in blocks:
        found.setdefault(keys[block], []).append(block)
    return found.items()


def _words(
    kinds: bytes,
    num_words: int,
    blocks: Sequence[int],
    ranks_B: Sequence[NDArray[np.int32]],
    parts: _Parts,
) -> Ints:
    """Return the words of all workers ``[W, P]`` of blocks whose words are of the same kinds."""
    counts = [len(ranks_B[block]) for block in blocks]
    bits = np.unpackbits(np.frombuffer(kinds, np.uint8), count=2 * num_words)
    long_P, short_P = bits.reshape(2, -1).astype(bool)
    joined = {
        name: np.frombuffer(b"".join([parts[name][block] for block in blocks]), dtype)
        for name, dtype in PARTS
        if name in ("long", "short", "same")
    }
    num_workers = sum(counts)
    stored_WP = np.concatenate(
        [
            joined["long"].reshape(num_workers, -1),
            joined["short"].reshape(num_workers, -1),
            np.repeat(joined["same"].reshape(len(blocks), -1), counts, axis=0),
        ],
        axis=1,
    )
    kind_P = np.where(long_P, 0, np.where(short_P, 1, 2))
    place_P = np.argsort(np.argsort(kind_P, kind="stable"))
    return stored_WP.take(place_P, axis=1)


def _arrays(
    words_WP: Ints, lengths_A: Sequence[int], counts: Sequence[int], uneven: Sequence[bytes]
) -> dict[str, Ragged]:
    """Return the arrays of blocks in which the same ones are even, and time and items."""
    arrays = [(_FIRST, 2), *zip(ARRAYS, lengths_A, strict=True)]
    order = [pair for pair in arrays if pair[0] is _FIRST or pair[1] == _UNEVEN]
    order += [pair for pair in arrays[1:] if pair[1] != _UNEVEN]
    starts = np.cumsum((0, *counts[:-1]))
    begins = [0] * len(counts)
    found = {}
    at = 0
    for array, length in order:
        width = _width(array, length)
        here = np.ascontiguousarray(words_WP[:, at : at + width])
        at += width
        if length != _UNEVEN:
            flat = here.view(array.dtype)[:, :length].ravel()
            found[array.name] = Ragged(flat, np.full(len(here), length))
            continue
        sizes = np.add.reduceat(here[:, 0], starts) * np.dtype(array.dtype).itemsize
        ends = np.add(begins, sizes).tolist()
        content = b"".join([all_of[b:e] for all_of, b, e in zip(uneven, begins, ends, strict=True)])
        begins = ends
        found[array.name] = Ragged(np.frombuffer(content, array.dtype), here[:, 0])
    return found


_ARRAYS: tuple[tuple[str, type[np.generic]], ...] = (
    ("ranks_w", np.int32),
    *PARTS,
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


class JoinedSummaries:
    """One step of all hosts, from their summaries."""

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
        """The workers' messages, without sketches."""
        parts = {name: self._parts(name) for name, _ in PARTS}
        return unpack_blocks(self.step, self.ranks_H, parts)

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
    arrays |= pack_block(as_columns([_without_sketches(messages[rank], layout) for rank in ranks]))
    if all(messages[rank].measured for rank in ranks):
        arrays |= _narrowed([messages[rank] for rank in ranks], layout)
    packed = [np.asarray(arrays.get(name, ()), dtype).tobytes() for name, dtype in _ARRAYS]
    return b"".join([_HEADER.pack(schema_hash(), step, *map(len, packed)), *packed])


class HostAssembly:
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


def with_directions(gathered: GatheredStep, hosts: JoinedSummaries, layout: Layout) -> GatheredStep:
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


def _rows(hosts: JoinedSummaries, name: str, exponents: str, order_W: Ints) -> Floats:
    """Return narrow sketches of all workers ``[sets, W, K]``."""
    powers_sW = hosts.joined(exponents).reshape(len(order_W), -1).T[:, order_W]
    shape = len(order_W), len(powers_sW), -1
    numbers_sWK = hosts.joined(name).reshape(shape).swapaxes(0, 1)[:, order_W]
    return Halves(numbers_sWK, powers_sW).widened()


def _residuals(hosts: JoinedSummaries, layout: Layout, num_rows: int) -> Floats:
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
