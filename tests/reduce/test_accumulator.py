import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.lab.reductions import accumulator
from rankscope.lab.reductions.accumulator import DTYPES, Accumulator, native_functions
from support.kernel_checks import needs_compiler

EPSILON = 2.0**-24
SIXTEEN_BITS = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[pytest.param("native", marks=needs_compiler), "plain"], autouse=True)
def arithmetic(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(accumulator, "native_functions", lambda: None)
    else:
        assert native_functions() is not None


def sum_of(summands: Tensor) -> Accumulator:
    total = Accumulator.zeros(summands[0].numel())
    for summand in summands:
        total.deposit(summand)
    return total


def bits(values: Tensor) -> list[int]:
    return values.contiguous().view(torch.uint8).tolist()


finite = st.floats(-(2.0**39), 2.0**39, width=32)


def nearest(value: Fraction) -> float:
    """Return the nearest float32, ties to even, by exact arithmetic."""
    guess = np.float32(float(value))
    around = (guess, *(np.nextafter(guess, np.float32(end)) for end in (-np.inf, np.inf)))
    return float(
        min(around, key=lambda f: (abs(Fraction(float(f)) - value), f.view(np.uint32) & 1))
    )


@settings(max_examples=50, deadline=None, database=None)
@given(st.lists(finite, min_size=1, max_size=12))
def test_it_is_the_sum_of_rounded_summands_rounded_once(summands):
    grid = Fraction(accumulator.QUANTUM)
    exact = sum((round(Fraction(x) / grid) for x in summands), 0) * grid
    for use in (native_functions, lambda: None):
        before, accumulator.native_functions = accumulator.native_functions, use
        try:
            total = Accumulator.zeros(1)
            for x in summands:
                total.deposit(torch.tensor([x]))
            assert total.value().item() == nearest(exact)
            assert total.value(divisor=8).item() == nearest(exact / 8)
            error = abs(Fraction(total.value(divisor=3).item()) - exact / 3)
            assert error <= abs(exact / 3) * Fraction(1.02 * EPSILON)
        finally:
            accumulator.native_functions = before


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_summed_exactly_and_rounded_once(dtype):
    summands = torch.randn(9, 400, generator=torch.Generator().manual_seed(2)).mul(100.0).to(dtype)
    exact = summands.double().sum(0)  # of few values with few bits: exact but for float64
    result = sum_of(summands).value(dtype)
    assert result.dtype == dtype
    if dtype in SIXTEEN_BITS:
        single = np.array([nearest_of(float(x), dtype) for x in exact], np.float32)
        assert result.float().tolist() == single.tolist()
    else:
        torch.testing.assert_close(result.double(), exact, rtol=2.0**-24, atol=1e-13)


def nearest_of(value: float, dtype: torch.dtype) -> float:
    """Return the nearest number of 16 bits by looking at its neighbours."""
    guess = torch.tensor([value], dtype=torch.float64).to(dtype).view(torch.int16)
    around = torch.cat([guess - 1, guess, guess + 1])
    candidates = around.view(dtype).double().tolist()
    distances = [(abs(Fraction(c) - Fraction(value)), int(b) & 1)
                 for c, b in zip(candidates, around.tolist(), strict=True)]  # fmt: skip
    return candidates[distances.index(min(distances))]


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_sixteen_bits_are_not_rounded_twice(dtype):
    half = 2.0 ** (-8 if dtype == torch.bfloat16 else -11)  # a tie between 1 and its successor
    assert sum_of(torch.tensor([[1.0], [half], [2.0**-40]])).value(dtype).item() == 1.0 + 2 * half
    assert sum_of(torch.tensor([[1.0], [half]])).value(dtype).item() == 1.0


@pytest.mark.parametrize(
    ("summands", "expected"),
    [
        ([math.inf], math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([accumulator.LARGEST * 2, 5.0], math.inf),
        ([2.0**40] * 65, math.inf),
    ],
)
def test_what_leaves_the_range_marks_the_whole_tensor(summands, expected):
    rows = torch.ones(len(summands), 1000)
    rows[:, 700] = torch.tensor(summands)
    forward, backward = sum_of(rows).value(), sum_of(rows.flip(0)).value()
    assert torch.equal(forward.nan_to_num(7.0), backward.nan_to_num(7.0))
    assert torch.equal(forward.nan_to_num(7.0), torch.full((1000,), expected).nan_to_num(7.0))


def test_many_summands_of_several_workers_do_not_overflow_the_low_digits():
    x = 2.0**-16 * 0.49999997  # the low digit is as large as it gets
    sums = [sum_of(torch.full((4000, 1), x)) for _ in range(3)]
    exact = Fraction(float(np.float32(x))) * 4000
    assert sums[0].value().item() == np.float32(exact)
    for each in sums:
        each.make_room(3)
    together = torch.empty(1)
    accumulator.convert(torch.stack([each.digits for each in sums]), together)
    assert together.item() == np.float32(3 * exact)
    assert accumulator.add_bounds(torch.stack([each.bounds for each in sums]))[0] == 12_000


@needs_compiler
def test_plain_torch_and_c_give_the_same_bits():
    native = native_functions()
    assert native is not None
    random = torch.Generator().manual_seed(4)
    for dtype in DTYPES:
        exponents = torch.randint(-140, 41, (5, 3001), generator=random).float()
        rows = (torch.randn(5, 3001, generator=random) * exponents.exp2()).to(dtype)
        results = []
        for deposit in (native.deposit, accumulator._deposit):
            digits = torch.full((3001, 2), 77, dtype=torch.int64)
            bounds = torch.zeros(3, dtype=torch.float64)
            for number, row in enumerate(rows):
                deposit(row, digits, bounds, number == 0)
            results.append((digits, bounds))
        assert torch.equal(results[0][0], results[1][0])
        assert bits(results[0][1]) == bits(results[1][1])
