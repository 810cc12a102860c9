"""The sketch as a fused Triton kernel: one read of the gradient, no atomics, a fixed order.

The gradient is cut into rows of k elements (the sketch's width) and the rows into tiles of
columns. A program owns one tile of every S-th row and keeps its sums per column in registers.
Rows start at any address, since k is odd; but rows that are a multiple of four apart start equally
far from an aligned one. S is such a multiple: a program shifts its columns once, by up to three,
and all its loads are aligned vectors. Columns that this adds at either end hold neighbouring
rows' elements; their sums are left out at the end. A second kernel adds up the programs' sums.

The squared norm adds up in fp32 over a few rows and then in float64. A program whose largest
magnitude is not finite, or so large or small that squares leave the fp32 range, reads its rows
again in float64; that is also where non-finite values are counted.
"""

# mypy: ignore-errors
# (Triton compiles these functions and gives their names types of its own.)

import triton
import triton.language as tl

ALIGNED = 4  # elements in an aligned vector
COMBINED = 128  # columns of one program that adds up
_ALIGNED = tl.constexpr(ALIGNED)
_COMBINED = tl.constexpr(COMBINED)
_PERIOD = tl.constexpr(8191)
_FLUSH = tl.constexpr(8)  # reads between two transfers of the norm from fp32 to float64
_LARGEST_SAFE = tl.constexpr(2.0**50)
_SMALLEST_SAFE = tl.constexpr(2.0**-40)
_AT_ONCE = tl.constexpr(256)  # programs whose norms are read at once


@triton.jit
def _begin(row, first_column, WIDTH: tl.constexpr):
    """Position of a row's first element, rounded down to an aligned one."""
    begin = row.to(tl.int64) * WIDTH - first_column
    return ((begin + _ALIGNED * WIDTH) // _ALIGNED - WIDTH) * _ALIGNED


@triton.jit
def _phase(row, first_phase, WIDTH: tl.constexpr):
    """Position of a row's first element among the period signs."""
    return (row % _PERIOD * WIDTH + first_phase) % _PERIOD


@triton.jit
def _signed(values, aligned, period, phase, row_sign, STRIDE: tl.constexpr):
    """Values of one row times their signs.

    The period signs exist in four copies, each shifted by one more place, so that those of four
    neighbouring columns are an aligned word in one of them.
    """
    place = phase + _ALIGNED  # the phase of a column left of the row is negative
    bits = tl.load(period + place % _ALIGNED * STRIDE + place // _ALIGNED * _ALIGNED + aligned)
    flipped = values.to(tl.int32, bitcast=True) ^ (bits.to(tl.int32) & -2147483648)
    return flipped.to(tl.float32, bitcast=True) * row_sign


@triton.jit
def _recount(
    gradient, aligned, valid, count, first_column, first, num_slices, turns,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Read a program's rows again in float64: squared norm, largest magnitude, non-finite."""
    norm = tl.zeros([TILE], tl.float64)
    largest = tl.zeros([TILE], tl.float32)
    nans = tl.zeros([TILE], tl.int32)
    infinite = tl.zeros([TILE], tl.int32)
    for turn in range(turns):
        at = _begin(first + num_slices * turn, first_column, WIDTH) + aligned
        mask = valid & (at >= 0) & (at < count)
        values = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
        wide = values.to(tl.float64)
        norm += wide * wide
        is_nan = values != values
        nans += is_nan.to(tl.int32)
        infinite += (tl.abs(values) == float("inf")).to(tl.int32)
        largest = tl.maximum(largest, tl.where(is_nan, 0.0, tl.abs(values)))
    num_nans = tl.sum(nans.to(tl.int64))
    top = tl.where(num_nans > 0, float("nan"), tl.max(largest))
    return tl.sum(norm), top, num_nans + tl.sum(infinite.to(tl.int64))


@triton.jit
def _read_blocks(
    gradient, row_signs, period, aligned, shift, first_column, first_row, first_phase,
    row, num_slices, blocks,
    WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr,
    SKETCH: tl.constexpr,
):  # fmt: skip
    """Read ``blocks * ROWS`` rows that need no mask: sums per column."""
    sketch = tl.zeros([TILE], tl.float32)
    norm = tl.zeros([TILE], tl.float64)
    largest = tl.zeros([TILE], tl.float32)
    fours = _begin(row, first_column, WIDTH) // _ALIGNED
    four_step = (num_slices // _ALIGNED).to(tl.int64) * WIDTH
    phase = _phase(row, first_phase, WIDTH)
    phase_step = _phase(num_slices, 0, WIDTH)
    for outer in range(0, blocks, _FLUSH):
        part = tl.zeros([TILE], tl.float32)
        for _ in range(outer, tl.minimum(outer + _FLUSH, blocks)):
            for _ in tl.static_range(ROWS):
                at = fours * _ALIGNED + aligned
                values = tl.load(gradient + at, eviction_policy="evict_first").to(tl.float32)
                if SKETCH:
                    row_sign = tl.load(row_signs + first_row + row)
                    sketch += _signed(values, aligned, period, phase - shift, row_sign, STRIDE)
                part += values * values
                largest = tl.maximum(largest, tl.abs(values))
                row += num_slices
                fours += four_step
                phase += phase_step
                phase = tl.where(phase >= _PERIOD, phase - _PERIOD, phase)
        norm += part.to(tl.float64)
    return sketch, norm, largest


@triton.jit
def _read_others(
    gradient, row_signs, period, aligned, shift, count, first_column, first_row, first_phase,
    first, num_slices, turns, skipped, done, sketch, norm, largest,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, SKETCH: tl.constexpr,
):  # fmt: skip
    """Read, with a mask, the rows that are left: skipped at the beginning or behind ``done``."""
    for turn in range(turns - done):
        row = first + num_slices * tl.where(turn < skipped, turn, turn + done)
        at = _begin(row, first_column, WIDTH) + aligned
        mask = (at >= 0) & (at < count)
        values = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
        if SKETCH:
            row_sign = tl.load(row_signs + first_row + row)
            phase = _phase(row, first_phase, WIDTH)
            sketch += _signed(values, aligned, period, phase - shift, row_sign, STRIDE)
        norm += (values * values).to(tl.float64)
        largest = tl.maximum(largest, tl.abs(values))
    return sketch, norm, largest


@triton.jit(
    do_not_specialize=[
        "count", "first_column", "first_row", "first_phase", "num_rows", "num_slices",
    ]
)  # fmt: skip
def measure_tiles(
    gradient, row_signs, period, sketches, norms, tops, nonfinites,
    count, first_column, first_row, first_phase, num_rows, num_slices,
    WIDTH: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    STRIDE: tl.constexpr, SKETCH: tl.constexpr,
):  # fmt: skip
    """Write the sums of each tile of every ``num_slices``-th row.

    Args:
        gradient: ``[count]``.
        row_signs: ``[first_row + num_rows]`` of +1 and -1.
        period: int8 sign bits ``[ALIGNED, STRIDE]``; copy j begins with sign j - ``ALIGNED``.
        sketches: Sums, float32 ``[num_slices, WIDTH]``.
        norms: Squared norms, float64 ``[num_slices * TILES]``.
        tops: Largest magnitudes, float32 ``[num_slices * TILES]``.
        nonfinites: Non-finite values, int64 ``[num_slices * TILES]``.
        count: Number of elements.
        first_column: Column of the first element.
        first_row: Its row in the whole parameter.
        first_phase: Position of the beginning of that row among the period signs.
        num_rows: Rows with at least one element.
        num_slices: A multiple of ``ALIGNED``.
        WIDTH: Elements in a row.
        TILES: Tiles in a row, with room for columns shifted by up to ``ALIGNED - 1``.
        TILE: Columns in a tile.
        ROWS: Rows read at once.
        STRIDE: Length of a copy of the period signs.
        SKETCH: Whether to sketch.
    """
    program = tl.program_id(0)
    tile = program % TILES
    first = program // TILES
    aligned = tile * TILE + tl.arange(0, TILE)
    begin = first.to(tl.int64) * WIDTH - first_column
    shift = (begin - _begin(first, first_column, WIDTH)).to(tl.int32)
    columns = aligned - shift
    valid = (columns >= 0) & (columns < WIDTH)
    turns = (num_rows - first + num_slices - 1) // num_slices

    # Turns that need no mask: not a first row that lacks its beginning, and no row whose tile
    # ends behind the last element.
    skipped = tl.where((first == 0) & (first_column > 0), 1, 0)
    room = count - begin + shift - (tile + 1) * TILE
    whole = tl.where(room < 0, 0, room // WIDTH // num_slices + 1).to(tl.int32)
    blocks = tl.maximum(whole - skipped, 0) // ROWS

    sketch, norm, largest = _read_blocks(
        gradient, row_signs, period, aligned, shift, first_column, first_row, first_phase,
        first + num_slices * skipped, num_slices, blocks, WIDTH, TILE, ROWS, STRIDE, SKETCH,
    )  # fmt: skip
    sketch, norm, largest = _read_others(
        gradient, row_signs, period, aligned, shift, count, first_column, first_row, first_phase,
        first, num_slices, turns, skipped, blocks * ROWS, sketch, norm, largest,
        WIDTH, STRIDE, SKETCH,
    )  # fmt: skip
    total = tl.sum(tl.where(valid, norm, 0.0))
    top = tl.max(tl.where(valid, largest, 0.0))
    nonfinite = tl.sum(tl.zeros([TILE], tl.int64))
    if (total != total) | (top > _LARGEST_SAFE) | ((top > 0) & (top < _SMALLEST_SAFE)):
        total, top, nonfinite = _recount(
            gradient, aligned, valid, count, first_column, first, num_slices, turns, WIDTH, TILE
        )
    if SKETCH:
        tl.store(sketches + first * WIDTH + columns, sketch, mask=valid)
    tl.store(norms + program, total)
    tl.store(tops + program, top)
    tl.store(nonfinites + program, nonfinite)


@triton.jit(do_not_specialize=["group", "num_slices", "num_programs"])
def combine(
    sketches, norms, tops, nonfinites, sketch, squared_norm, largest, nonfinite,
    group, num_slices, num_programs, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the sums of :func:`measure_tiles` to one group's totals.

    All programs but the last add ``COMBINED`` columns each to the sketch; the last adds scalars.
    """
    program = tl.program_id(0)
    if program < tl.num_programs(0) - 1:
        columns = program * _COMBINED + tl.arange(0, _COMBINED)
        total = tl.zeros([_COMBINED], tl.float32)
        for start in range(0, num_slices, ROWS):
            slices = start + tl.arange(0, ROWS)
            mask = (slices < num_slices)[:, None] & (columns < WIDTH)[None, :]
            at = slices[:, None] * WIDTH + columns[None, :]
            total += tl.sum(tl.load(sketches + at, mask=mask, other=0.0), axis=0)
        at = sketch + group * WIDTH + columns
        mask = columns < WIDTH
        tl.store(at, tl.load(at, mask=mask) + total, mask=mask)
    else:
        norm = tl.zeros([_AT_ONCE], tl.float64)
        top = tl.zeros([_AT_ONCE], tl.float32)
        bad = tl.zeros([_AT_ONCE], tl.int64)
        for start in range(0, num_programs, _AT_ONCE):
            at = start + tl.arange(0, _AT_ONCE)
            mask = at < num_programs
            norm += tl.load(norms + at, mask=mask, other=0.0)
            top = _larger(top, tl.load(tops + at, mask=mask, other=0.0))
            bad += tl.load(nonfinites + at, mask=mask, other=0)
        tl.store(squared_norm + group, tl.load(squared_norm + group) + tl.sum(norm))
        nans = tl.sum((top != top).to(tl.int32))
        most = tl.where(nans > 0, float("nan"), tl.max(tl.where(top != top, 0.0, top)))
        tl.store(largest + group, _larger(tl.load(largest + group), most))
        tl.store(nonfinite + group, tl.load(nonfinite + group) + tl.sum(bad))


@triton.jit
def _larger(a, b):
    """The larger of two numbers, or NaN if one is."""
    return tl.where((a != a) | (b != b), float("nan"), tl.maximum(a, b))
