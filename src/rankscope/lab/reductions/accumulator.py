"""Sums of numbers whose bits depend neither on the order of the summands nor on their grouping.

Each summand is rounded *by itself* to a multiple of ``QUANTUM`` = 2^-68 and written in two digits,

    x  =  high · 2^-16  +  low · 2^-68,        high = round(x · 2^16),   |low| <= 2^51,

which are added up as integers of 64 bits, each for itself. Integers are associative, so nothing
depends on order or grouping; and no carry passes between the digits before the end, so that they
can be added by vector units and by any collective. The end is the only rounding of a sum: to the
nearest float, ties to even.

Errors: a multiple of 2^-68 enters exactly, as does each float32 of 2^-45 (3e-14) and
more; smaller ones err by at most 2^-69 (2e-21) each. So n summands ``x`` of float32 err by at
most ``2^-24 |sum x| + n 2^-69``, which is below ``(n - 1) 2^-24 sum |x|``, the bound of
summation in any order, for n >= 3 as soon as ``sum |x| >= 2^-43``.

Range: n summands of magnitude 2^40 at most with ``n · max |x| <= 2^46``. What lies outside makes
the result infinite, a NaN among the summands makes it NaN, for all elements of the tensor: never a
wrong number.

The idea of rounding each summand against a grid that is fixed in advance is that of Demmel and
Nguyen, "Parallel Reproducible Summation" (2015), and of Ahrens, Demmel and Nguyen, "Algorithms for
Efficient Reproducible Floating Point Summation" (2020): they keep floating-point bins whose grid
follows the largest summand; one window of fixed-point digits suffices for gradients, and its
integers need no renormalization while they are filled. The rounding to odd before a second
rounding is Boldo and Melquiond's, "Emulation of FMA and Correctly Rounded Sums: Proved Algorithms
Using Rounding to Odd" (2008).

Legend of shapes: N elements, P accumulators added together, 2 digits (high, low).
"""

import functools

import torch
from torch import Tensor

from rankscope.gradients.kernels.launch import log_fallback
from rankscope.gradients.kernels.native import compiled

QUANTUM = 2.0**-68
LARGEST = 2.0**40  # largest magnitude of a summand
LARGEST_TOTAL = 2.0**46  # of the number of summands times the largest magnitude
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_HIGH_UNITS = 2.0**16
_LOW_BITS = 52
_LOW_UNITS = 2.0**_LOW_BITS
_ROOM = 1 << 11  # low digits of 2^51 and less that may be added before they could overflow
_BLOCK = 1 << 14  # elements that plain torch works on at a time on a CPU: they fit its cache


class Accumulator:
    """The sum of tensors of one shape; ``digits``, int64 ``[N, 2]``, hold it."""

    def __init__(self, digits: Tensor) -> None:
        self.digits = digits
        self.bounds = torch.zeros(3, dtype=torch.float64, device=digits.device)
        """Number of summands, the largest of ``-x`` and the largest of ``x``; NaN if there is one.

        Bounds of accumulators are added by :func:`add_bounds`.
        """
        self._num_added = 0  # that the low digits hold since they were last normalized

    @classmethod
    def zeros(cls, num_elements: int, device: torch.device | str = "cpu") -> "Accumulator":
        """Return the sum of nothing, for tensors of so many elements."""
        return cls(torch.zeros(num_elements, 2, dtype=torch.int64, device=device))

    @property
    def empty(self) -> bool:
        """Whether there are no summands; then the digits may hold anything."""
        return self._num_added == 0

    def clear(self) -> None:
        """Forget all summands."""
        if not self.empty:
            self._num_added = 0
            self.bounds.zero_()

    @torch.no_grad()
    def deposit(self, values: Tensor) -> None:
        """Add a summand: N elements of any shape, of one of ``DTYPES``."""
        if self._num_added >= _ROOM:
            self.normalize()
        flat = values.detach().reshape(-1)
        fresh = self.empty
        native = native_functions() if flat.device.type == "cpu" else None
        (_deposit if native is None else native.deposit)(flat, self.digits, self.bounds, fresh)
        self.bounds[0] += 1
        self._num_added += 1

    def make_room(self, num_accumulators: int) -> None:
        """Prepare for being added to others, so many in all; the value stays the same."""
        if self._num_added * num_accumulators > _ROOM:
            self.normalize()

    def normalize(self) -> None:
        """Carry from the low digits to the high ones; the value stays the same."""
        carry = (self.digits[:, 1] + (1 << _LOW_BITS - 1)) >> _LOW_BITS
        self.digits[:, 0] += carry
        self.digits[:, 1] -= carry << _LOW_BITS
        self._num_added = 1

    @torch.no_grad()
    def value(self, dtype: torch.dtype = torch.float32, divisor: int = 1) -> Tensor:
        """Return the sum, divided and rounded once, ``[N]``; see :func:`convert`."""
        result = torch.zeros(len(self.digits), dtype=dtype, device=self.digits.device)
        if not self.empty:
            convert(self.digits[None], result, divisor)
            result += verdicts(self.bounds[None]).to(dtype)
        return result


def add_bounds(bounds_P3: Tensor) -> Tensor:
    """Return the bounds of the sum of accumulators, from ``[P, ..., 3]`` of each of them."""
    return torch.cat([bounds_P3[..., :1].sum(0), bounds_P3[..., 1:].amax(0)], dim=-1)


def verdicts(bounds: Tensor) -> Tensor:
    """Return the term of bounds in a sum: float64 ``[...]`` from ``[..., 3]``, to be added to it.

    0 for a sum within the range, else NaN or an infinity of the sign of what left the range (NaN if
    it was left on both sides).
    """
    count, below, above = bounds.unbind(-1)
    limit = (LARGEST_TOTAL / count.clamp(min=1.0)).clamp(max=LARGEST)
    infinite = torch.full_like(count, torch.inf)
    up = torch.where(above <= limit, 0.0, infinite + above)
    return up - torch.where(below <= limit, 0.0, infinite + below)


@torch.no_grad()
def convert(digits_PN2: Tensor, into: Tensor, divisor: int = 1) -> None:
    """Add up accumulators' digits and write the sum, divided and rounded once.

    For a divisor that is a power of two the result is correctly rounded, to nearest with ties to
    even, and else within 0.51 units in the last place. In float64 it is rounded to odd.

    Args:
        digits_PN2: Digits of P accumulators, each prepared by ``make_room(P)``, P <= 2048;
            contiguous but for the first dimension.
        into: ``[N]``, contiguous, of one of ``DTYPES``.
        divisor: What the sum is divided by.
    """
    twice = into.dtype in (torch.bfloat16, torch.float16)
    cpu = into.device.type == "cpu"
    native = native_functions() if cpu and into.dtype != torch.float64 else None
    if native is not None:
        single = torch.empty_like(into, dtype=torch.float32) if twice else into
        native.convert(digits_PN2, single, divisor, odd=twice)
        if twice:
            into.copy_(single)
        return
    block = _BLOCK if cpu else max(into.numel(), 1)
    for first in range(0, into.numel(), block):
        columns = slice(first, first + block)
        total = digits_PN2[:, columns].sum(0)
        wide = _to_double(total).div_(divisor)
        into[columns] = _cut_to_odd(wide).float() if twice else wide


def _deposit(values_N: Tensor, digits_N2: Tensor, bounds: Tensor, fresh: bool) -> None:
    """Add a summand in plain torch, which gives the same bits as the native function."""
    block = _BLOCK if values_N.device.type == "cpu" else max(values_N.numel(), 1)
    for first in range(0, values_N.numel(), block):
        wide = values_N[first : first + block].double()
        lowest, highest = wide.aminmax()
        bounds[1:] = torch.maximum(bounds[1:], torch.stack([-lowest, highest]))
        units = torch.where(wide.abs() <= LARGEST, wide, 0.0).mul_(_HIGH_UNITS)
        high = units.round()
        low = units.sub_(high).mul_(_LOW_UNITS).round_()
        digits = torch.stack([high.to(torch.int64), low.to(torch.int64)], dim=1)
        into = digits_N2[first : first + block]
        if fresh:
            into.copy_(digits)
        else:
            into.add_(digits)


def _to_double(digits_N2: Tensor) -> Tensor:
    """Return float64 ``[N]``, rounded to odd where it would need more bits than it has.

    The odd last bit, so far behind those of float32, makes a later rounding to it a correct one.
    """
    high, low = digits_N2.unbind(1)
    carry = (low + (1 << _LOW_BITS - 1)) >> _LOW_BITS
    high = high + carry
    low = low - (carry << _LOW_BITS)
    large = high.double() * _LOW_UNITS
    small = low.double()
    total = large + small
    lost = small - (total - large)
    bits = total.view(torch.int64)
    away = torch.where((lost > 0) == (total > 0), 1, -1)  # from zero, or towards it
    odd = bits + torch.where((lost != 0) & (bits & 1 == 0), away, 0)
    size = torch.where(high < 0, -high, high)
    size -= (torch.where(high < 0, -low, low) < 0).to(torch.int64)
    coarse = size >> 11 << 1 | ((size & 2047 != 0) | (low != 0)).to(torch.int64)
    coarse_total = torch.where(high < 0, -1.0, 1.0) * coarse.double() * (_LOW_UNITS * 2.0**10)
    fits = (high >= -(1 << 53)) & (high < 1 << 53)
    return torch.where(fits, odd.view(torch.float64), coarse_total).mul_(QUANTUM)


def _cut_to_odd(wide_N: Tensor) -> Tensor:
    """Return float64 values cut to the 24 bits of float32, the last one set if any was lost."""
    bits = wide_N.view(torch.int64)
    lost = bits & (1 << 29) - 1
    odd: Tensor = ((bits ^ lost) | ((lost != 0).to(torch.int64) << 29)).view(torch.float64)
    return odd


@functools.cache
def native_functions() -> "_Native | None":
    """Return the functions in C, or None where they cannot be had or err."""
    try:
        native = _Native()
        _check(native)
    except Exception as error:  # whatever it is, training goes on, a little slower
        log_fallback("gradients are accumulated", error)
        return None
    return native


class _Native:
    """The functions in C, on one thread, without holding the interpreter's lock."""

    def __init__(self) -> None:
        self._deposit = compiled("deposit")
        self._convert = compiled("convert")

    def deposit(self, values_N: Tensor, digits_N2: Tensor, bounds: Tensor, fresh: bool) -> None:
        kind = (torch.float32, torch.bfloat16, torch.float16, torch.float64).index(values_N.dtype)
        values_N = values_N.contiguous()
        self._deposit(
            kind, values_N.data_ptr(), values_N.numel(), digits_N2.data_ptr(), fresh,
            bounds.data_ptr() + 8,
        )  # fmt: skip

    def convert(self, digits_PN2: Tensor, into: Tensor, divisor: int, *, odd: bool) -> None:
        parts = len(digits_PN2)
        stride = digits_PN2.stride(0) // 2
        self._convert(
            digits_PN2.data_ptr(), parts, stride, into.numel(), divisor, odd, into.data_ptr()
        )


def _check(native: _Native) -> None:
    """Compare with plain torch on numbers of all magnitudes; ArithmeticError if bits differ."""
    generator = torch.Generator(device="cpu").manual_seed(8)
    exponents = torch.randint(-100, 30, (2, 1009), generator=generator, device="cpu").float()
    numbers = torch.randn(2, 1009, generator=generator, dtype=torch.float32, device="cpu")
    numbers *= exponents.exp2()
    for dtype in DTYPES:
        digits = [torch.zeros(1009, 2, dtype=torch.int64, device="cpu") for _ in range(2)]
        bounds = [torch.zeros(3, dtype=torch.float64, device="cpu") for _ in range(2)]
        for row in numbers.to(dtype):
            native.deposit(row, digits[0], bounds[0], False)
            _deposit(row, digits[1], bounds[1], False)
        for odd in (False, True):
            values = torch.empty(1009, dtype=torch.float32, device="cpu")
            native.convert(digits[0][None], values, 3, odd=odd)
            wide = _to_double(digits[1]).div_(3)
            expected = (_cut_to_odd(wide) if odd else wide).float()
            if not (torch.equal(digits[0], digits[1]) and torch.equal(values, expected)):
                raise ArithmeticError("the native accumulator errs")
        if not torch.allclose(bounds[0], bounds[1], rtol=0.0, equal_nan=True):
            raise ArithmeticError("the native accumulator's bounds err")
