"""Messages of several workers as one block of bytes, and many such blocks as columns again.

Much in the messages of a host is the same for all of its workers. They are the rows of a matrix of
eight-byte words: a column of equal words is stored once, one of small integers in four bytes each.
Blocks that do so with the same columns are read together.

Legend of shapes: w workers of a block, W workers of several blocks, B blocks, P words of a worker.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.agent.message import ARRAYS, StepMessage
from rankscope.bus.evidence import Array
from rankscope.bus.messages import Messages
from rankscope.stats.arrays import Ints, Ragged

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
    """Return the messages of all blocks of a step, in the order of their ranks.

    Args:
        step: Step number.
        ranks_B: The ranks of each block's workers.
        parts: Each part of all blocks, by name.
    """
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
