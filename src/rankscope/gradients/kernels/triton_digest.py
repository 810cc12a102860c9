"""Digests of many parts of an accelerator's memory, and of a batch's samples, as Triton kernels.

Of memory, each program reads one chunk of a part, whole rows of ``ROW`` words and perhaps the last,
shorter one. It writes the chunk's weighted sum (:mod:`rankscope.gradients.kernels.bits`) and, if
wanted, the sum of its squares; nothing is added up between programs, so that the result does not
depend on their order.
"""

# mypy: ignore-errors
# (Triton compiles these functions and gives their names types of its own.)

import triton
import triton.language as tl

COLUMNS = 5
"""Numbers that describe a chunk: address, bytes, first row's multiplier, unit, and numbers."""

_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _halves(address, places, left, unit):
    """Return lower and upper halves of words, in int32; what lies behind the end is 0.

    Args:
        address: Of the row, in bytes.
        places: Of the words in it.
        left: Bytes from the row's address to the part's end.
        unit: Bytes of which both address and ``left`` are multiples: 4, 2 or 1.
    """
    low = tl.zeros_like(places)
    high = tl.zeros_like(places)
    if unit == 4:
        whole = address.to(tl.pointer_type(tl.int32))
        low = tl.load(whole + 2 * places, mask=8 * places < left, other=0)
        high = tl.load(whole + 2 * places + 1, mask=8 * places + 4 < left, other=0)
    elif unit == 2:
        halves = address.to(tl.pointer_type(tl.int16))
        for i in tl.static_range(2):
            at = 4 * places + i
            byte = 8 * places + 2 * i
            word = tl.load(halves + at, mask=byte < left, other=0).to(tl.int32)
            low |= (word & 0xFFFF) << (16 * i)
            word = tl.load(halves + at + 2, mask=byte + 4 < left, other=0).to(tl.int32)
            high |= (word & 0xFFFF) << (16 * i)
    else:
        single = address.to(tl.pointer_type(tl.int8))
        for i in tl.static_range(4):
            at = 8 * places + i
            word = tl.load(single + at, mask=at < left, other=0).to(tl.int32)
            low |= (word & 0xFF) << (8 * i)
            word = tl.load(single + at + 4, mask=at + 4 < left, other=0).to(tl.int32)
            high |= (word & 0xFF) << (8 * i)
    return low, high


@triton.jit
def _square_of_halves(half, numbers):
    """Return the squares, in float64, of the one or two numbers in each half of a word."""
    if numbers == 1:
        value = half.to(tl.float32, bitcast=True).to(tl.float64)
        square = value * value
    elif numbers == 2:
        first = (half << 16).to(tl.float32, bitcast=True).to(tl.float64)
        second = (half & -65536).to(tl.float32, bitcast=True).to(tl.float64)
        square = first * first + second * second
    else:
        first = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float64)
        second = (half >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float64)
        square = first * first + second * second
    return square


@triton.jit
def digest_chunks(
    chunks, first_keys, second_keys, multipliers, sums, squares, SQUARES: tl.constexpr
):
    """Write sum and sum of squares of each chunk.

    Args:
        chunks: int64 ``[C, COLUMNS]``.
        first_keys: int64 ``[ROW]``, of the words.
        second_keys: int64 ``[ROW]``, of their upper halves.
        multipliers: int64, one per row.
        sums: int64 ``[C]``, modulo 2^64.
        squares: float64 ``[C]``; 0 where chunks hold no numbers.
        SQUARES: Whether to write them.
    """
    chunk = tl.program_id(0)
    described = chunks + chunk * _COLUMNS
    address = tl.load(described)
    count = tl.load(described + 1)
    first_row = tl.load(described + 2)
    unit = tl.load(described + 3).to(tl.int32)
    numbers = tl.load(described + 4).to(tl.int32)
    places = tl.arange(0, 512)
    first = tl.load(first_keys + places)
    second = tl.load(second_keys + places)
    total = tl.zeros([512], tl.int64)
    square = tl.zeros([512], tl.float64)
    rows = (count + 4095) // 4096
    for row in range(rows):
        low, high = _halves(address + row * 4096, places, count - row * 4096, unit)
        upper = high.to(tl.int64)
        word = (low.to(tl.int64) & 0xFFFFFFFF) | (upper << 32)
        total += (word * first + upper * second) * tl.load(multipliers + first_row + row)
        if SQUARES:
            if numbers == 4:
                value = word.to(tl.float64, bitcast=True)
                square += value * value
            elif numbers > 0:
                square += _square_of_halves(low, numbers) + _square_of_halves(high, numbers)
    tl.store(sums + chunk, tl.sum(total))
    if SQUARES:
        tl.store(squares + chunk, tl.sum(square))


_AT_ONCE = tl.constexpr(1024)  # words of a sample


@triton.jit
def digest_rows(
    words, mask, weights, digests, length, row_step, word_step, mask_step, places, mix,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Write a digest of each row, as ``native.digest_samples`` does; a program does one.

    Args:
        words: Integers of any size.
        mask: Which of them count: those that are not 0; ``words`` again if all do.
        weights: int64 ``[places]``.
        digests: int64 ``[rows]``.
        length: Words in a row.
        row_step: Elements from one row to the next.
        word_step: Elements from one word to the next.
        mask_step: Elements from one row of the mask to the next.
        places: How many weights there are.
        mix: An odd number.
        MASKED: Whether there is a mask.
    """
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([_AT_ONCE], tl.int64)
    before = tl.zeros([1], tl.int64)  # words that count in front of these
    for start in range(0, length, _AT_ONCE):
        at = start + tl.arange(0, _AT_ONCE)
        inside = at < length
        here = words + row * row_step + at.to(tl.int64) * word_step
        word = tl.load(here, mask=inside, other=0).to(tl.int64)
        place = at.to(tl.int64)
        counts = inside
        if MASKED:
            counts = inside & (tl.load(mask + row * mask_step + at, mask=inside, other=0) != 0)
            ones = counts.to(tl.int64)
            place = (before + tl.cumsum(ones, 0) - ones) % places
            before += tl.sum(ones, 0)
        weight = tl.load(weights + place, mask=counts, other=0)
        total += word * weight
    digest = tl.sum(total, 0)
    digest = (digest ^ (digest >> 29)) * mix
    tl.store(digests + row, digest ^ (digest >> 32))
