"""Which kernel is chosen, and that plain torch takes over from one that errs or fails."""

import logging

import pytest

from rankscope.gradients import kernels
from rankscope.gradients.kernels import choose_kernel
from rankscope.gradients.kernels.interface import period_signs
from rankscope.gradients.kernels.native import NativeKernel
from rankscope.gradients.kernels.plain import PlainKernel
from rankscope.gradients.totals import GradientTotals
from support.kernel_checks import CPU, SEED, WIDTH, expect, measured, needs_compiler, random
from support.sketch_oracle import truth


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
