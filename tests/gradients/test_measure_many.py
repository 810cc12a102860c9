import math

import numpy as np
import pytest
import torch

from rankscope.bus.groups import cut_sections, group_parameters
from rankscope.gradients.kernels.interface import period_signs
from rankscope.gradients.kernels.plain import PlainKernel
from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import GradientTotals
from support import interpreted_digest
from support.interpreted import interpreter, measure_interpreted
from support.kernel_checks import CPU, DTYPES, needs_compiler, needs_triton
from support.sketch_oracle import first_position, truth

WIDTH = 251
SEED = 5
SIZES = {
    "a.long": 300 * WIDTH + 7,  # long enough for every way of reading
    "a.short": 3,
    "b.row": WIDTH,
    "b.rows": 70 * WIDTH,
    "c.none": 0,
    "c.one": 1,
    "c.some": 20 * WIDTH + 1,
}
GROUPS = group_parameters(SIZES, lambda name: name.split(".")[0])
SECTIONS = cut_sections(SIZES, GROUPS, section_elements=90 * WIDTH)


def make(dtype=torch.float32, offset=0):
    """Return gradients that begin at any address."""
    generator = torch.Generator().manual_seed(1)
    made = {}
    for number, (name, size) in enumerate(SIZES.items()):
        memory = torch.randn(size + number + offset, generator=generator).mul_(1e-3)
        made[name] = memory.to(dtype)[number + offset :]
    return made


def sketcher_of(kernel, sections=None):
    sketcher = Sketcher(CPU, GROUPS, WIDTH, SEED, sections)
    if kernel == "torch":
        sketcher._kernel = PlainKernel(CPU, WIDTH, period_signs(SEED))
    return sketcher


def measured(kernel, gradients, *, sections=None):
    if kernel.startswith("triton"):
        options = {"width": WIDTH, "seed": SEED, "num_processors": int(kernel.split()[1])}
        return measure_interpreted(PROCESS[0], Sketcher, GROUPS, sections, gradients, **options)
    sketcher = sketcher_of(kernel, sections)
    totals = sketcher.new_totals()
    sketcher.measure_many([(name, part, 0) for name, part in gradients.items()], totals)
    return totals


PROCESS = []


@pytest.fixture(scope="module", autouse=True)
def process():
    with interpreter() as process:
        PROCESS[:] = [process]
        yield
        PROCESS.clear()


NATIVE = pytest.param("native", marks=needs_compiler)


def expect(totals: GradientTotals, gradients, ranges) -> None:
    """Compare each row with the truth about the elements that lie in it."""
    for row in range(len(totals.squared_norms)):
        sketch, squares, largest, nonfinite = np.zeros(WIDTH), 0.0, 0.0, 0
        for name, gradient in gradients.items():
            for number, start, stop in ranges[name]:
                if number != row or start == stop:
                    continue
                first = first_position(name, SEED, WIDTH) + start
                true = truth(name, SEED, gradient.flatten()[start:stop], WIDTH, first)
                sketch += true.sketch
                squares += true.squared_norm
                largest = np.maximum(largest, true.largest)
                nonfinite += true.nonfinite
        scale = math.sqrt(squares / WIDTH) if math.isfinite(squares) else 1.0
        np.testing.assert_allclose(totals.sketches[row], sketch, rtol=1e-5, atol=1e-5 * scale)
        np.testing.assert_allclose(totals.squared_norms[row], squares, rtol=1e-6)
        np.testing.assert_equal(float(totals.largest[row]), float(largest))
        assert int(totals.nonfinite[row]) == nonfinite


def whole():
    return {name: [(GROUPS.index_of[name], 0, size)] for name, size in SIZES.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "offset", "dtype"),
    [
        *(("torch", 0, dtype) for dtype in DTYPES),
        *(pytest.param("native", 1, dtype, marks=needs_compiler) for dtype in DTYPES),
    ],
)
def test_each_row_is_what_its_gradients_are(kernel, offset, dtype):
    gradients = make(dtype, offset=offset)
    expect(measured(kernel, gradients), gradients, whole())


@pytest.mark.parametrize("kernel", ["torch", NATIVE, pytest.param("triton 9", marks=needs_triton)])
def test_sections_and_types_and_values_that_are_not_finite(kernel):
    gradients = make()
    gradients["a.long"] = gradients["a.long"].bfloat16()
    gradients["c.some"] = gradients["c.some"].half()
    gradients["c.one"] = gradients["c.one"].double()
    gradients["b.rows"][[5, 40 * WIDTH]] = torch.tensor([math.nan, -math.inf])
    assert len(SECTIONS.ranges["a.long"]) > 2
    expect(measured(kernel, gradients, sections=SECTIONS), gradients, SECTIONS.ranges)


def one_by_one(kernel, gradients):
    sketcher = sketcher_of(kernel)
    totals = sketcher.new_totals()
    for name, part in gradients.items():
        sketcher.measure(name, part, totals)
    return totals


def test_whatever_changes_from_call_to_call_is_noticed():
    """Memory, lengths, types, layouts, where one begins, and which there are."""
    sketcher = sketcher_of("native")
    totals = sketcher.new_totals()
    changes = [
        {},
        {"a.long": make()["a.long"].double()},
        {"b.rows": make()["b.rows"].view(70, WIDTH).t().contiguous().t()},
        {"b.rows": make()["b.rows"].view(70, WIDTH)[:, ::2]},
        {"c.some": make()["c.some"][:40]},
        {"c.some": make()["c.some"].half()},
        {"b.row": make()["b.row"].view(1, -1).to_sparse()},
        {"b.row": torch.nn.Parameter(make()["b.row"])},
        {},
    ]
    for number, change in enumerate(changes):
        gradients = make() | change
        expected = one_by_one("native", gradients)
        for _ in range(2):
            totals.reset()
            named = [(name, gradient, 0) for name, gradient in gradients.items()]
            sketcher.measure_many(named, totals)
            for one, other in zip(totals.tensors, expected.tensors, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=str(number))


@needs_triton
def test_the_kernel_yields_the_digests_of_single_tensors():
    assert PROCESS[0].submit(interpreted_digest.errors_of_digests).result() == []


@needs_triton
def test_the_kernel_yields_sums_of_squares():
    for found, exact in PROCESS[0].submit(interpreted_digest.squares).result():
        assert found == pytest.approx(exact, rel=1e-12)


@needs_triton
def test_samples_have_the_same_digests_by_the_kernel():
    assert PROCESS[0].submit(interpreted_digest.batches_that_differ).result() == []
