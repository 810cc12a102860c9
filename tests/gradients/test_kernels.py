"""Every kernel against the definition in float64; and which is chosen, and replaced if it errs."""

import logging
import math

import pytest
import torch

from rankscope.gradients import kernels
from rankscope.gradients.kernels import choose_kernel
from rankscope.gradients.kernels.interface import period_signs
from rankscope.gradients.kernels.native import NativeKernel
from rankscope.gradients.kernels.plain import PlainKernel
from rankscope.gradients.totals import GradientTotals
from support.kernel_checks import CPU, SEED, WIDTH, expect, measured, needs_compiler, random
from support.sketch_oracle import truth

NATIVE = pytest.param("native", marks=needs_compiler)
KERNELS = ("torch", "torch, asynchronous", NATIVE)


def make_kernel(name: str, width: int):
    period = period_signs(SEED)
    if name == "native":
        return NativeKernel(width, period)
    return PlainKernel(CPU, width, period, waits=name == "torch")


@pytest.fixture(params=KERNELS)
def kernel(request):
    return make_kernel(request.param, WIDTH)


def test_totals_far_inside_of_a_parameter_follow_their_definition(kernel):
    gradient, start = random(1000), 10**9 + 7
    expect(measured(kernel, gradient, start=start), truth("weight", SEED, gradient, WIDTH, start))


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float16, 60_000.0),
        (torch.bfloat16, 1e-38),
        (torch.float32, 3e38),
        (torch.float32, 0.0),
    ],
)
def test_norms_hold_at_the_limits_of_a_dtype(kernel, dtype, scale):
    """Squares of such elements overflow or vanish in fp32."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(10 * WIDTH + 9, generator=generator, dtype=torch.float64) * 2 - 1
    gradient = (uniform * scale).to(dtype)
    totals = measured(kernel, gradient)
    exact = truth("weight", SEED, gradient, WIDTH)
    assert float(totals.squared_norms[1]) == pytest.approx(exact.squared_norm, rel=1e-6)
    assert float(totals.largest[1]) == exact.largest
    assert int(totals.nonfinite[1]) == 0


@pytest.mark.parametrize("name", ["torch", NATIVE])
def test_norm_of_64_million_elements(name):
    """Plain fp32 sums err by 1e-4; rounding adds up most where all elements are alike."""
    gradient = torch.full((64_000_000,), 0.3)
    exact = 64e6 * float(gradient[0].double()) ** 2
    kernel = make_kernel(name, 4093)
    totals = measured(kernel, gradient, width=4093)
    assert math.sqrt(float(totals.squared_norms[1]) / exact) == pytest.approx(1, abs=1e-6)


# Which is chosen -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("RANKSCOPE_NATIVE", raising=False)


def chosen(caplog) -> str:
    with caplog.at_level(logging.DEBUG, logger="rankscope"):
        kernel = choose_kernel(CPU, WIDTH, period_signs(SEED))
    gradient = random(20 * WIDTH + 9)
    expect(measured(kernel, gradient), truth("weight", SEED, gradient, WIDTH))
    assert len(caplog.records) == (kernel.name == "torch")
    return kernel.name


@needs_compiler
def test_the_native_kernel_is_chosen_where_there_is_a_compiler(caplog):
    assert chosen(caplog) == "native"


@needs_compiler
def test_a_kernel_that_errs_is_not_used(caplog, monkeypatch):
    class Wrong(NativeKernel):
        def measure(self, flat, signs, start, into, group):
            super().measure(flat, signs, start, into, group)
            if signs is None:
                into.squared_norms[group] *= 1 + 1e-5

    monkeypatch.setattr(kernels, "NativeKernel", Wrong)
    assert chosen(caplog) == "torch"
    assert "errs on torch.float32" in caplog.text


def test_a_kernel_that_fails_later_is_replaced_once(caplog):
    plain = PlainKernel(CPU, WIDTH, period_signs(SEED))

    class Broken(PlainKernel):
        def add(self, *args):
            raise RuntimeError("out of registers\nand more")

    broken = Broken(CPU, WIDTH, period_signs(SEED))
    gradient = random(3 * WIDTH)
    with caplog.at_level(logging.INFO, logger="rankscope"):
        safe = kernels.SafeKernel(broken, plain)
        expect(measured(safe, gradient, gradient), truth("weight", SEED, gradient.repeat(2), WIDTH))
        safe = kernels.SafeKernel(broken, plain)
        totals = GradientTotals.zeros(1, WIDTH, CPU)
        safe.measure(gradient, None, 0, totals, 0)
    assert float(totals.squared_norms) == pytest.approx(float(gradient.double().square().sum()))
    assert [record.message.count("out of registers") for record in caplog.records] == [1, 1]
    with pytest.raises(IndexError):  # nothing is hidden once it is plain torch that fails
        safe.measure(gradient, None, 0, totals, 1)
