import logging
import math

import pytest
import torch

from rankscope.evidence.loss import probe as loss
from rankscope.gradients import kernels
from rankscope.gradients.kernels import bits, choose_kernel, native
from rankscope.gradients.kernels.bits import native_sum
from rankscope.gradients.kernels.build import FOLDER, LEVELS
from rankscope.gradients.kernels.interface import period_signs
from rankscope.gradients.kernels.native import (
    NativeKernel,
    StaleLibraryError,
    count_labels,
    digest_samples,
    load,
)
from rankscope.gradients.kernels.plain import PlainKernel
from rankscope.gradients.totals import GradientTotals
from rankscope.lab.reductions import accumulator
from rankscope.wrappers import labels as labels_module
from rankscope.wrappers import samples, transfer
from rankscope.wrappers.facts import FLAGS_EVERY, PrecisionMeter
from support.kernel_checks import CPU, DTYPES, SEED, WIDTH, expect, measured, needs_compiler, random
from support.sketch_oracle import truth

NATIVE = pytest.param("native", marks=needs_compiler)


def make_kernel(name: str, width: int):
    period = period_signs(SEED)
    if name == "native":
        return NativeKernel(width, period)
    return PlainKernel(CPU, width, period, waits=name == "torch")


@pytest.fixture(params=["torch", "torch, asynchronous", NATIVE])
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
    totals = measured(make_kernel(name, 4093), gradient, width=4093)
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


CACHED = (native.load_once, native_sum, accumulator.native_functions, transfer._is_compiled,
          native._function)  # fmt: skip
USED = native.library_path().stem.removeprefix("kernels-")
RUNNABLE = list(LEVELS)[: list(LEVELS).index(USED) + 1]


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
    accumulator._check(accumulator._Native())
    content = random(9 * bits.ROW + 77)
    found = bits.NativeSum().at(content.data_ptr(), content.nbytes)
    assert found == bits.plain_sum([content], CPU)


def everything_in_plain_torch():
    """Use all that the library has, and return whether plain torch did it."""
    assert isinstance(choose_kernel(CPU, WIDTH, period_signs(SEED)), PlainKernel)
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
def test_without_a_library_plain_torch_does_all(
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


def digests_of(monkeypatch, batch, mask, native):
    if not native:
        monkeypatch.setattr(samples, "digest_samples", lambda *_: None)
    found = samples.digest_inputs((), {"input_ids": batch, "attention_mask": mask}).tolist()
    monkeypatch.undo()
    return found


@needs_compiler
@pytest.mark.parametrize("mask", [None, torch.bool, torch.int64])
@pytest.mark.parametrize("length", [1, samples.MAX_WORDS, samples.MAX_WORDS + 5])
def test_digests_of_samples_are_those_without_a_compiler(monkeypatch, mask, length):
    batch = torch.randint(-(2**62), 2**62, (3, length))
    present = None if mask is None else (torch.rand(3, length) < 0.7).to(mask)
    at = samples._weights(CPU).data_ptr()
    read = digest_samples(batch, present, at, samples.MAX_WORDS, samples._MIX)
    assert (read is None) == (mask is None and length > samples.MAX_WORDS)  # read at a stride
    native, plain = (digests_of(monkeypatch, batch, present, each) for each in (True, False))
    assert native == plain
    assert len(set(native)) == (3 if present is None or length > 1 else len(set(native)))


@needs_compiler
@pytest.mark.parametrize("shape", [(6,), (2, 3, 4), (2, 0)])
@pytest.mark.parametrize("shifted", [False, True])
def test_label_tokens_are_those_that_torch_counts(monkeypatch, shape, shifted):
    labels = torch.randint(-101, -98, shape)
    first = int(shifted and len(shape) > 1)
    assert count_labels(labels, loss.IGNORED_LABEL, first=first) is not None
    native = loss.count_label_tokens({"labels": labels}, shifted=shifted)
    monkeypatch.setattr(labels_module, "count_labels", lambda *_, **__: None)
    assert torch.equal(native, loss.count_label_tokens({"labels": labels}, shifted=shifted))


def test_a_new_setting_of_precision_is_seen_within_some_steps():
    meter = PrecisionMeter(torch.nn.Linear(1, 1), CPU)
    before = meter.code(1)
    torch.use_deterministic_algorithms(True)
    try:
        codes = [meter.code(step) for step in range(2, FLAGS_EVERY + 1)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(codes[:-1]) == {before} != {codes[-1]}
    with torch.autocast("cpu", torch.bfloat16):
        assert meter.code(FLAGS_EVERY + 1) not in (before, codes[-1])
