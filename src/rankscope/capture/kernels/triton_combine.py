"""Adds up what the jobs of the fused Triton kernel have found, in a fixed order."""

# mypy: ignore-errors
# (Triton compiles these functions and gives their names types of its own.)

import triton
import triton.language as tl

from rankscope.capture.kernels.jobs import ALIGNED

COMBINED = 128  # columns of one program
_ALIGNED = tl.constexpr(ALIGNED)
_COMBINED = tl.constexpr(COMBINED)
_AT_ONCE = tl.constexpr(256)  # programs whose norms are read at once


@triton.jit
def larger(a, b):
    """The larger of two numbers, or NaN if one is."""
    return tl.where((a != a) | (b != b), float("nan"), tl.maximum(a, b))


@triton.jit
def combine(
    jobs_of, num_rows, sketches, norms, tops, nonfinites, sketch, squared_norm, largest, nonfinite,
    WIDTH: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    SKETCH: tl.constexpr, FRESH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Add the sums of :func:`~rankscope.capture.kernels.triton.measure_tiles` to totals.

    Of each row's programs all but the last add ``COMBINED`` columns each; the last adds scalars.

    Args:
        jobs_of: The first job of each row, and the number of jobs; int64 ``[R + 1]``.
        num_rows: R; rows behind have no jobs.
        sketches: What jobs have found.
        norms: The same of squared norms.
        tops: The same of largest magnitudes.
        nonfinites: The same of non-finite values.
        sketch: Sketches of the totals, ``[R, WIDTH]``.
        squared_norm: Their squared norms.
        largest: Their largest magnitudes.
        nonfinite: Their non-finite counts.
        WIDTH: Columns of the sketch.
        TILES: Tiles in a row.
        TILE: Columns in a tile.
        ROWS: Jobs read at once.
        SKETCH: Whether there are sketches.
        FRESH: Whether to overwrite totals instead of adding to them; sketches with 0 where there
            are none.
        WHOLE: Columns of the totals' sketches.
    """
    blocks: tl.constexpr = (WIDTH + _COMBINED - 1) // _COMBINED if SKETCH else 0
    row = tl.program_id(0) // (blocks + 1)
    part = tl.program_id(0) % (blocks + 1)
    first = tl.load(jobs_of + tl.minimum(row, num_rows)).to(tl.int32)
    stop = tl.load(jobs_of + tl.minimum(row + 1, num_rows)).to(tl.int32)
    if part < blocks:
        columns = part * _COMBINED + tl.arange(0, _COMBINED)
        total = tl.zeros([_COMBINED], tl.float32)
        place = columns // TILE * (TILE + _ALIGNED) + columns % TILE + _ALIGNED
        behind = (columns % TILE >= TILE - _ALIGNED) & (columns // TILE + 1 < TILES)
        for start in range(first, stop, ROWS):
            numbers = start + tl.arange(0, ROWS)
            mask = (numbers < stop)[:, None] & (columns < WIDTH)[None, :]
            at = numbers[:, None].to(tl.int64) * (TILES * (TILE + _ALIGNED)) + place[None, :]
            total += tl.sum(tl.load(sketches + at, mask=mask, other=0.0), axis=0)
            # What the program of the next tile has found in the last columns of this one.
            there = sketches + at + _ALIGNED
            total += tl.sum(tl.load(there, mask=mask & behind[None, :], other=0.0), axis=0)
        at = sketch + row.to(tl.int64) * WIDTH + columns
        mask = columns < WIDTH
        if not FRESH:
            total += tl.load(at, mask=mask)
        tl.store(at, total, mask=mask)
    else:
        norm = tl.zeros([_AT_ONCE], tl.float64)
        top = tl.zeros([_AT_ONCE], tl.float32)
        bad = tl.zeros([_AT_ONCE], tl.int64)
        for start in range(first * TILES, stop * TILES, _AT_ONCE):
            at = start + tl.arange(0, _AT_ONCE)
            mask = at < stop * TILES
            norm += tl.load(norms + at, mask=mask, other=0.0)
            top = larger(top, tl.load(tops + at, mask=mask, other=0.0))
            bad += tl.load(nonfinites + at, mask=mask, other=0)
        nans = tl.sum((top != top).to(tl.int32))
        most = tl.where(nans > 0, float("nan"), tl.max(tl.where(top != top, 0.0, top)))
        squares = tl.sum(norm)
        count = tl.sum(bad)
        if not FRESH:
            squares += tl.load(squared_norm + row)
            most = larger(tl.load(largest + row), most)
            count += tl.load(nonfinite + row)
        elif not SKETCH:
            for start in range(0, WHOLE, _AT_ONCE):
                columns = start + tl.arange(0, _AT_ONCE)
                at = sketch + row.to(tl.int64) * WHOLE + columns
                tl.store(at, tl.zeros([_AT_ONCE], tl.float32), mask=columns < WHOLE)
        tl.store(squared_norm + row, squares)
        tl.store(largest + row, most)
        tl.store(nonfinite + row, count)
