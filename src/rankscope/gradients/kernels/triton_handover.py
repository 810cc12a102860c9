"""Gathers a gradient's measurements in one launch, to be copied to the host."""

# mypy: ignore-errors
# (Triton compiles these functions and gives their names types of its own.)

import triton
import triton.language as tl

COLUMNS = 256  # of a sketch, made by one program
FIELDS = 6
_COLUMNS = tl.constexpr(COLUMNS)
_FIELDS = tl.constexpr(FIELDS)
_ROWS = tl.constexpr(8)  # added up at once
_AT_ONCE = tl.constexpr(256)


@triton.jit
def gather(
    table, local, reduced, signs, sketches, squares, reduced_squares, largest, nonfinite, numbers,
    num_sketches, num_rows, largest_at, WIDE: tl.constexpr, REDUCED: tl.constexpr,
):  # fmt: skip
    """Make sketches, and put numbers one behind the other.

    All programs but the last make up to ``COLUMNS`` entries of a sketch each.

    Args:
        table: int64 ``[num_sketches, FIELDS]``: 0 for the local gradient and 1 for the reduced one;
            the first of the rows that are added up; the end; numbers in the result; where its first
            goes; the first column of this program.
        local: Sketches of rows, float32 ``[R, WIDE]``.
        reduced: The same of the reduced gradient.
        signs: With which entries are added up where the result is narrower, float32 ``[WIDE]``.
        sketches: The results, float32.
        squares: Squared norms, float64 ``[R]``.
        reduced_squares: The same of the reduced gradient.
        largest: Float32 ``[R]``.
        nonfinite: Int64 ``[R]``.
        numbers: Squared norms, those of the reduced gradient if there is one, and at
            ``largest_at`` the largest of all and the sum of non-finite counts, float64.
        num_sketches: Rows of the table.
        num_rows: R.
        largest_at: Where the numbers of the whole go.
        WIDE: Width of the totals' sketches.
        REDUCED: Whether there is a reduced gradient.
    """
    program = tl.program_id(0)
    if program < num_sketches:
        fields = table + program * _FIELDS
        source = local
        if tl.load(fields) != 0:
            source = reduced
        first = tl.load(fields + 1).to(tl.int32)
        stop = tl.load(fields + 2).to(tl.int32)
        width = tl.load(fields + 3).to(tl.int32)
        columns = tl.load(fields + 5).to(tl.int32) + tl.arange(0, _COLUMNS)
        total = tl.zeros([_COLUMNS], tl.float32)
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
