"""Digests of the samples of a batch on an accelerator, as one Triton kernel."""

# mypy: ignore-errors
# (Triton compiles these functions and gives their names types of its own.)

import triton
import triton.language as tl

_AT_ONCE = tl.constexpr(1024)


@triton.jit
def digest_rows(
    words, mask, weights, digests, length, row_step, word_step, mask_step, places, mix,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Write a digest of each row, as :func:`digest_samples` does; a program does one.

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
        total += (word + 1) * weight
    digest = tl.sum(total, 0)
    digest = (digest ^ (digest >> 29)) * mix
    tl.store(digests + row, digest ^ (digest >> 32))
