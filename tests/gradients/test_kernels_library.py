"""The compiled library: every level of it against the truth, and a training without it."""

import logging

import pytest
import torch

from rankscope.gradients.kernels import bits, choose_kernel, native
from rankscope.gradients.kernels.bits import native_sum
from rankscope.gradients.kernels.build import FOLDER, LEVELS
from rankscope.gradients.kernels.interface import period_signs
from rankscope.gradients.kernels.native import NativeKernel, StaleLibraryError, load
from rankscope.gradients.kernels.plain import PlainKernel
from rankscope.lab.reductions import accumulator
from rankscope.wrappers import transfer
from rankscope.wrappers.reduced_product import NativeDot, check_dot, choose_dot, plain_dot
from support.kernel_checks import CPU, DTYPES, SEED, WIDTH, expect, measured, needs_compiler, random
from support.sketch_oracle import truth

CACHED = (native.load_once, native_sum, accumulator.native_functions, transfer._is_compiled,
          native._function)  # fmt: skip
USED = native.library_path().stem.removeprefix("kernels-")
RUNNABLE = list(LEVELS)[: list(LEVELS).index(USED) + 1]


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    monkeypatch.delenv("RANKSCOPE_NATIVE", raising=False)


@pytest.fixture
def fresh():
    """Forget before and after a test what a process finds out once."""
    for cached in CACHED:
        cached.cache_clear()
    yield
    for cached in CACHED:
        cached.cache_clear()


def use_level(level, monkeypatch):
    opened = load(FOLDER / f"kernels-{level}.so")
    monkeypatch.setattr(native, "load_once", lambda: opened)
    return NativeKernel(WIDTH, period_signs(SEED))


@needs_compiler
@pytest.mark.parametrize("level", RUNNABLE)
def test_every_level_that_this_processor_has_is_right(level, monkeypatch):
    kernels = [use_level(each, monkeypatch) for each in ("default", level)]
    for dtype in DTYPES:
        for size, start in ((3, 500), (5 * WIDTH - 1, 1), (90 * WIDTH + 17, 2 * WIDTH - 5)):
            gradient = random(size, dtype)
            default, totals = (measured(kernel, gradient, start=start) for kernel in kernels)
            expect(totals, truth("weight", SEED, gradient, WIDTH, start))
            assert torch.equal(totals.sketches, default.sketches)
    check_dot(NativeDot())
    accumulator._check(accumulator._Native())
    content = random(9 * bits.ROW + 77)
    found = bits.NativeSum().at(content.data_ptr(), content.nbytes)
    assert found == bits.plain_sum([content], CPU)


def everything_in_plain_torch():
    """Use all that the library has, and return whether plain torch did it."""
    assert isinstance(choose_kernel(CPU, WIDTH, period_signs(SEED)), PlainKernel)
    assert choose_dot(CPU) is plain_dot
    assert native_sum() is None
    assert accumulator.native_functions() is None
    assert not transfer._is_compiled()
    assert native.count_labels(torch.zeros(4, dtype=torch.int64), -100, first=0) is None


@pytest.mark.parametrize(
    ("name", "found", "level", "said"),
    [
        ("library_path", FOLDER / "kernels-none.so", logging.INFO, "kernels-none.so is missing; "),
        pytest.param("hash_sources", "others", logging.WARNING, "", marks=needs_compiler),
    ],
)
def test_without_a_library_of_these_sources_plain_torch_does_all_and_one_line_says_so(
    fresh, monkeypatch, caplog, name, found, level, said
):
    monkeypatch.setattr(native, name, lambda: found)
    with caplog.at_level(logging.INFO, logger="rankscope"):
        everything_in_plain_torch()
    [record] = caplog.records
    assert record.levelno == level
    assert f"{said}run `python {FOLDER}/build.py`" in record.message
    if name == "hash_sources":
        with pytest.raises(StaleLibraryError):
            native.compiled("dot")
