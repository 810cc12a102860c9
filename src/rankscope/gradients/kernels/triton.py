"""The sketch as a fused Triton kernel: one read of the gradients, no atomics, a fixed order.

However many gradients there are, they take one launch, over a table of their addresses. Each is cut
into rows of k elements (the sketch's width) and rows into tiles of columns. A program owns one tile
of a job: some rows of some gradients, all of one row of the totals. It keeps its sums per column in
registers. A second kernel, :func:`combine`, adds up what jobs have found.

Rows start at any address, since k is odd; but rows that are a multiple of four apart start equally
far from an aligned one. Where a job has many rows of a gradient, they make four segments of every
fourth row: columns are shifted once for all of a segment, by up to three, and all its loads are
aligned vectors. Columns that this adds at either end hold neighbouring rows' elements; their sums
are left out at the end. What a segment with shifted columns has found is added to the program's
own scratch memory, where columns are in order again.

The squared norm adds up in fp32 over a few rows and then in float64. A program whose largest
magnitude in a segment is not finite, or so large or small that squares leave the fp32 range, reads
its rows again in float64; that is also where non-finite values are counted.
"""

# mypy: ignore-errors
# (Triton compiles these functions and gives their names types of its own.)

import triton
import triton.language as tl

ALIGNED = 4  # elements in an aligned vector
FIELDS = 10  # of a segment in the table
ELEMENTS = {
    "torch.float32": tl.float32,
    "torch.bfloat16": tl.bfloat16,
    "torch.float16": tl.float16,
}
COMBINED = 128  # columns that one program of :func:`combine` adds up
_ALIGNED = tl.constexpr(ALIGNED)
_FIELDS = tl.constexpr(FIELDS)
_PERIOD = tl.constexpr(8191)
_FLUSH = tl.constexpr(8)  # reads between two transfers of the norm from fp32 to float64
_LARGEST_SAFE = tl.constexpr(2.0**50)
_SMALLEST_SAFE = tl.constexpr(2.0**-40)
_COMBINED = tl.constexpr(COMBINED)
_AT_ONCE = tl.constexpr(256)  # programs whose norms are read at once


@triton.jit
def larger(a, b):
    """The larger of two numbers, or NaN if one is."""
    return tl.where((a != a) | (b != b), float("nan"), tl.maximum(a, b))


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
    gradient, aligned, valid, count, begin, step, turns, TILE: tl.constexpr,
):  # fmt: skip
    """Read a segment again in float64: squared norm, largest magnitude, non-finite."""
    norm = tl.zeros([TILE], tl.float64)
    largest = tl.zeros([TILE], tl.float32)
    nans = tl.zeros([TILE], tl.int32)
    infinite = tl.zeros([TILE], tl.int32)
    for turn in range(turns):
        at = begin + turn * step + aligned
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
    vector, vector_step, row_signs, period, aligned, shift, row, first_phase, stride, blocks,
    WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr,
    SKETCH: tl.constexpr, TYPE: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Read ``blocks * ROWS`` rows that need no mask: sums per column.

    The address of the first one counts aligned vectors of ``BYTES`` bytes.
    """
    sketch = tl.zeros([TILE], tl.float32)
    norm = tl.zeros([TILE], tl.float64)
    largest = tl.zeros([TILE], tl.float32)
    phase = _phase(row, first_phase, WIDTH)
    phase_step = _phase(stride, 0, WIDTH)
    for outer in range(0, blocks, _FLUSH):
        part = tl.zeros([TILE], tl.float32)
        for _ in range(outer, tl.minimum(outer + _FLUSH, blocks)):
            for _ in tl.static_range(ROWS):
                begin = (vector * BYTES).to(tl.pointer_type(TYPE), bitcast=True)
                begin = tl.multiple_of(begin, BYTES)
                values = tl.load(begin + aligned, eviction_policy="evict_first").to(tl.float32)
                if SKETCH:
                    row_sign = tl.load(row_signs + row)
                    sketch += _signed(values, aligned, period, phase - shift, row_sign, STRIDE)
                part += values * values
                largest = tl.maximum(largest, tl.abs(values))
                row += stride
                vector += vector_step
                phase += phase_step
                phase = tl.where(phase >= _PERIOD, phase - _PERIOD, phase)
        norm += part.to(tl.float64)
    return sketch, norm, largest


@triton.jit
def _read_others(
    gradient, begin, step, row_signs, period, aligned, shift, count, first, first_phase, stride,
    turns, skipped, done, sketch, norm, largest,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, SKETCH: tl.constexpr,
):  # fmt: skip
    """Read, with a mask, the rows that are left: skipped at the beginning or behind ``done``."""
    for left in range(turns - done):
        turn = tl.where(left < skipped, left, left + done)
        at = begin + turn * step + aligned
        mask = (at >= 0) & (at < count)
        values = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
        if SKETCH:
            row = first + stride * turn
            row_sign = tl.load(row_signs + row)
            phase = _phase(row, first_phase, WIDTH)
            sketch += _signed(values, aligned, period, phase - shift, row_sign, STRIDE)
        norm += (values * values).to(tl.float64)
        largest = tl.maximum(largest, tl.abs(values))
    return sketch, norm, largest


@triton.jit
def _read_segment(
    fields, addresses, row_signs, period, aligned, tile,
    WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr,
    SKETCH: tl.constexpr, TYPE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Sums per column of one segment, how far columns are shifted, and the numbers of it."""
    base = tl.load(addresses + tl.load(fields)) + tl.load(fields + 1)
    count = tl.load(fields + 2)
    first_column = tl.load(fields + 3)
    row_signs += tl.load(fields + 4)
    first_phase = tl.load(fields + 5).to(tl.int32)
    first = tl.load(fields + 6).to(tl.int32)
    stride = tl.load(fields + 7).to(tl.int32)
    turns = tl.load(fields + 8).to(tl.int32)
    in_order = tl.load(fields + 9) != 0
    gradient = base.to(tl.pointer_type(TYPE), bitcast=True)

    begin = first.to(tl.int64) * WIDTH - first_column  # in elements, from the piece's first
    element = base // SIZE + begin
    shift = tl.where(in_order, 0, element % _ALIGNED).to(tl.int32)
    begin -= shift
    step = stride.to(tl.int64) * WIDTH
    columns = aligned - shift
    valid = (columns >= 0) & (columns < WIDTH)

    # Turns that need no mask: not one that begins before the first element, and none whose tile
    # ends behind the last.
    skipped = tl.where(begin < 0, 1, 0)
    room = count - begin - (tile + 1) * TILE
    whole = tl.minimum(tl.where(room < 0, 0, room // step + 1), turns).to(tl.int32)
    blocks = tl.where(in_order, 0, tl.maximum(whole - skipped, 0) // ROWS)

    sketch, norm, largest = _read_blocks(
        (element - shift + skipped * step) // _ALIGNED, step // _ALIGNED, row_signs, period,
        aligned, shift, first + stride * skipped, first_phase, stride, blocks,
        WIDTH, TILE, ROWS, STRIDE, SKETCH, TYPE, _ALIGNED * SIZE,
    )  # fmt: skip
    sketch, norm, largest = _read_others(
        gradient, begin, step, row_signs, period, aligned, shift, count, first, first_phase,
        stride, turns, skipped, blocks * ROWS, sketch, norm, largest, WIDTH, STRIDE, SKETCH,
    )  # fmt: skip
    sketch = tl.where(valid, sketch, 0.0)
    total = tl.sum(tl.where(valid, norm, 0.0))
    top = tl.max(tl.where(valid, largest, 0.0))
    nonfinite = tl.sum(tl.zeros([TILE], tl.int64))
    if (total != total) | (top > _LARGEST_SAFE) | ((top > 0) & (top < _SMALLEST_SAFE)):
        total, top, nonfinite = _recount(gradient, aligned, valid, count, begin, step, turns, TILE)
    return sketch, shift, in_order, total, top, nonfinite


@triton.jit
def measure_tiles(
    segments, jobs, addresses, row_signs, period, sketches, norms, tops, nonfinites,
    WIDTH: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    STRIDE: tl.constexpr, SKETCH: tl.constexpr, TYPE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the sums of each tile of each job.

    Args:
        segments: int64 ``[S, FIELDS]``: which gradient; bytes from its first element to the
            piece's; the piece's elements; column of its first one; where its row signs are;
            position of its first row among the period signs; the segment's first row in the piece;
            rows from one of the segment to the next; how many; whether columns stay in order, else
            vectors are aligned, and rows must be a multiple of ``ALIGNED`` elements apart.
        jobs: The first segment of each job, and the number of segments; int64 ``[J + 1]``.
        addresses: Of the gradients' first elements, int64.
        row_signs: Of all pieces, +1 and -1.
        period: int8 sign bits ``[ALIGNED, STRIDE]``; copy j begins with sign j - ``ALIGNED``.
        sketches: Sums, float32 ``[J * TILES, ALIGNED + TILE]``: also of the columns that lie just
            before the tile.
        norms: Squared norms, float64 ``[J * TILES]``.
        tops: Largest magnitudes, float32 ``[J * TILES]``.
        nonfinites: Non-finite values, int64 ``[J * TILES]``.
        WIDTH: Elements in a row.
        TILES: Tiles in a row, with room for columns shifted by up to ``ALIGNED - 1``.
        TILE: Columns in a tile.
        ROWS: Rows read at once.
        STRIDE: Length of a copy of the period signs.
        SKETCH: Whether to sketch.
        TYPE: Of the gradients.
        SIZE: Bytes of an element.
    """
    program = tl.program_id(0)
    tile = program % TILES
    job = program // TILES
    aligned = tile * TILE + tl.arange(0, TILE)
    own = sketches + program.to(tl.int64) * (TILE + _ALIGNED)
    if SKETCH:
        tl.store(own + tl.arange(0, TILE), tl.zeros([TILE], tl.float32))
        tl.store(own + TILE + tl.arange(0, _ALIGNED), tl.zeros([_ALIGNED], tl.float32))
        tl.debug_barrier()
    own += _ALIGNED + tl.arange(0, TILE)
    sums = tl.zeros([TILE], tl.float32)  # of columns in order
    norm = tl.sum(tl.zeros([TILE], tl.float64))
    top = tl.sum(tl.zeros([TILE], tl.float32))
    nonfinite = tl.sum(tl.zeros([TILE], tl.int64))
    first = tl.load(jobs + job).to(tl.int32)
    stop = tl.load(jobs + job + 1).to(tl.int32)
    for number in range(first, stop):
        sketch, shift, in_order, one_norm, one_top, one_nonfinite = _read_segment(
            segments + number * _FIELDS, addresses, row_signs, period, aligned, tile,
            WIDTH, TILE, ROWS, STRIDE, SKETCH, TYPE, SIZE,
        )  # fmt: skip
        if SKETCH:
            if in_order:
                sums += sketch
            else:
                tl.store(own - shift, tl.load(own - shift) + sketch)
                tl.debug_barrier()
        norm += one_norm
        top = larger(top, one_top)
        nonfinite += one_nonfinite
    if SKETCH:
        tl.store(own, tl.load(own) + sums)
    tl.store(norms + program, norm)
    tl.store(tops + program, top)
    tl.store(nonfinites + program, nonfinite)


@triton.jit
def combine(
    jobs_of, num_rows, sketches, norms, tops, nonfinites, sketch, squared_norm, largest, nonfinite,
    WIDTH: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    SKETCH: tl.constexpr, FRESH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Add the sums of :func:`~rankscope.gradients.kernels.triton.measure_tiles` to totals.

    Of each row's programs all but the last add ``COMBINED`` columns each; the last adds scalars.

    Args:
        jobs_of: The first job of each row, and the number of jobs; int64 ``[R + 1]``.
        num_rows: R; rows behind have no jobs.
        sketches: Of jobs.
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


GATHERED = 256  # columns of a sketch that one program of :func:`gather` makes
GATHER_FIELDS = 6  # of a program in its table
_GATHERED = tl.constexpr(GATHERED)
_GATHER_FIELDS = tl.constexpr(GATHER_FIELDS)
_ROWS = tl.constexpr(8)  # added up at once


@triton.jit
def gather(
    table, local, reduced, signs, sketches, squares, reduced_squares, largest, nonfinite, numbers,
    num_sketches, num_rows, largest_at, WIDE: tl.constexpr, REDUCED: tl.constexpr,
):  # fmt: skip
    """Make sketches, and put numbers one behind the other.

    All programs but the last make up to ``GATHERED`` entries of a sketch each.

    Args:
        table: int64 ``[num_sketches, GATHER_FIELDS]``: 0 for the local gradient and 1 for the
            reduced one; the first of the rows that are added up; the end; numbers in the result;
            where its first goes; the first column of this program.
        local: Sketches of rows, float32 ``[R, WIDE]``.
        reduced: The same of the reduced gradient.
        signs: With which entries are added up where the result is narrower, float32 ``[WIDE]``.
        sketches: The results, float32.
        squares: Squared norms, float64 ``[R]``.
        reduced_squares: The same of the reduced gradient.
        largest: Float32 ``[R]``.
        nonfinite: Int64 ``[R]``.
        numbers: Squared norms, those of the reduced gradient if there is one, and at ``largest_at``
            the largest of all and the sum of non-finite counts, float64.
        num_sketches: Rows of the table.
        num_rows: R.
        largest_at: Where the numbers of the whole go.
        WIDE: Width of the totals' sketches.
        REDUCED: Whether there is a reduced gradient.
    """
    program = tl.program_id(0)
    if program < num_sketches:
        fields = table + program * _GATHER_FIELDS
        source = local
        if tl.load(fields) != 0:
            source = reduced
        first = tl.load(fields + 1).to(tl.int32)
        stop = tl.load(fields + 2).to(tl.int32)
        width = tl.load(fields + 3).to(tl.int32)
        columns = tl.load(fields + 5).to(tl.int32) + tl.arange(0, _GATHERED)
        total = tl.zeros([_GATHERED], tl.float32)
        for start in range(first, stop, _ROWS):
            rows = start + tl.arange(0, _ROWS)
            for begin in range(0, WIDE, width):
                entries = begin + columns
                there = (columns < width) & (entries < WIDE)
                mask = (rows < stop)[:, None] & there[None, :]
                at = rows[:, None].to(tl.int64) * WIDE + entries[None, :]
                values = tl.sum(tl.load(source + at, mask=mask, other=0.0), axis=0)
                sign = tl.load(signs + entries, mask=there, other=1.0)
                total += values * tl.where(width < WIDE, sign, 1.0)
        tl.store(sketches + tl.load(fields + 4) + columns, total, mask=columns < width)
    else:
        top = tl.zeros([_AT_ONCE], tl.float32)
        bad = tl.zeros([_AT_ONCE], tl.int64)
        for start in range(0, num_rows, _AT_ONCE):
            rows = start + tl.arange(0, _AT_ONCE)
            mask = rows < num_rows
            tl.store(numbers + rows, tl.load(squares + rows, mask=mask), mask=mask)
            if REDUCED:
                behind = numbers + num_rows + rows
                tl.store(behind, tl.load(reduced_squares + rows, mask=mask), mask=mask)
            values = tl.load(largest + rows, mask=mask, other=0.0)
            either = (top != top) | (values != values)
            top = tl.where(either, float("nan"), tl.maximum(top, values))
            bad += tl.load(nonfinite + rows, mask=mask, other=0)
        nans = tl.sum((top != top).to(tl.int32))
        most = tl.where(nans > 0, float("nan"), tl.max(tl.where(top != top, 0.0, top)))
        tl.store(numbers + largest_at, most.to(tl.float64))
        tl.store(numbers + largest_at + 1, tl.sum(bad).to(tl.float64))
