"""The sketch against float64 truth: norms, cosines, and the structures that break weak signs."""

import numpy as np
import pytest
import torch

from rankscope.capture import GradientMeasure, Sketcher
from rankscope.errors import UsageError

CPU = torch.device("cpu")
WIDTH = 1021
SEEDS = range(20)


def measured(sketcher: Sketcher, *gradients: torch.Tensor) -> GradientMeasure:
    measure = sketcher.new_measure()
    for number, gradient in enumerate(gradients):
        sketcher.measure(f"parameter {number}", gradient, measure)
    return measure


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def normal(generator):
    return torch.randn(200, 300, generator=generator)


def constant_plus_noise(generator):
    return normal(generator) + 1


def positive_activations(generator):
    delta, hidden = torch.randn(256, generator=generator), torch.randn(1021, generator=generator)
    return torch.outer(delta, hidden.relu())


def sparse_rows_with_mean(generator):
    gradient = torch.zeros(2048, 64)
    rows = torch.randperm(2048, generator=generator)[:150]
    mean = torch.randn(64, generator=generator)
    gradient[rows] = torch.randn(150, 64, generator=generator) + mean
    return gradient


def zero_mean_activations(generator):
    return torch.outer(
        torch.randn(128, generator=generator), torch.randn(1000, generator=generator)
    )


@pytest.mark.parametrize(
    "structure",
    [normal, constant_plus_noise, positive_activations, sparse_rows_with_mean,
     zero_mean_activations],
)  # fmt: skip
def test_cosines_are_unbiased_with_the_stated_error(structure):
    errors = []
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        a, b = structure(generator), structure(generator)
        sketcher = Sketcher(CPU, WIDTH, seed)
        sketches = [measured(sketcher, g).sketch for g in (a, b)]
        errors.append((cosine(*sketches) - cosine(a, b)) / (1 - cosine(a, b) ** 2))
    rms = np.sqrt(np.mean(np.square(errors)))
    assert rms <= 1.25 / WIDTH**0.5 * 1.2  # 20 seeds: the RMS itself is known to about 16 %
    assert abs(np.mean(errors)) <= 3.5 * rms / len(errors) ** 0.5


def test_the_error_falls_with_the_square_root_of_the_width():
    generator = torch.Generator().manual_seed(0)
    a, b = normal(generator), normal(generator)
    rms = {}
    for width in (61, 967):
        sketchers = [Sketcher(CPU, width, seed) for seed in range(60)]
        errors = [
            cosine(measured(s, a).sketch, measured(s, b).sketch) - cosine(a, b) for s in sketchers
        ]
        rms[width] = np.sqrt(np.mean(np.square(errors)))
    assert rms[61] / rms[967] == pytest.approx((967 / 61) ** 0.5, rel=0.35)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (7,), (1021,), (1022,), (300, 257), (3, 5, 7, 11)])
def test_norm_and_sketch_follow_their_definition(dtype, shape):
    """Against the definition written out element by element."""
    sketcher = Sketcher(CPU, WIDTH, seed=3)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    measure = measured(sketcher, gradient)
    signs = sketcher._signs["parameter 0"]
    flat = gradient.double().flatten().numpy()
    expected = np.zeros(WIDTH)
    for element, value in enumerate(flat):
        row, column = divmod(element, WIDTH)
        period = sketcher._period[(element + signs.shift) % 8191]
        expected[column] += value * float(signs.rows[row]) * float(period)
    np.testing.assert_allclose(measure.sketch.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert float(measure.squared_norm) == pytest.approx(float(flat @ flat), rel=1e-6)


def test_signs_are_balanced_and_differ_between_parameters():
    sketcher = Sketcher(CPU, WIDTH)
    ones = torch.ones(WIDTH * 400)
    first, second = sketcher.new_measure(), sketcher.new_measure()
    sketcher.measure("a", ones, first)
    sketcher.measure("b", ones, second)
    assert abs(float(first.sketch.mean())) < 4 * (400 / WIDTH) ** 0.5
    assert abs(cosine(first.sketch, second.sketch)) < 5 / WIDTH**0.5


def test_sketches_are_linear_and_split_over_parameters():
    sketcher = Sketcher(CPU, WIDTH)
    generator = torch.Generator().manual_seed(5)
    a = [torch.randn(500, 70, generator=generator), torch.randn(900, generator=generator)]
    b = [torch.randn(500, 70, generator=generator), torch.randn(900, generator=generator)]
    total = measured(sketcher, *(x + 2 * y for x, y in zip(a, b, strict=True))).sketch
    parts = measured(sketcher, *a).sketch + 2 * measured(sketcher, *b).sketch
    torch.testing.assert_close(total, parts, rtol=1e-4, atol=1e-4)


def test_layouts_of_memory_do_not_matter():
    sketcher = Sketcher(CPU, WIDTH)
    gradient = torch.randn(64, 80, generator=torch.Generator().manual_seed(2))
    transposed = gradient.t().contiguous().t()
    sparse = gradient.to_sparse()
    expected = measured(sketcher, gradient).sketch
    torch.testing.assert_close(measured(sketcher, transposed).sketch, expected)
    torch.testing.assert_close(measured(sketcher, sparse).sketch, expected)


def test_norm_of_64_million_elements_where_plain_fp32_fails():
    gradient = torch.randn(64_000_000, generator=torch.Generator().manual_seed(0)).add_(0.5)
    exact = float(gradient.to(torch.float64).square_().sum().sqrt_())
    measure = measured(Sketcher(CPU), gradient)
    assert float(measure.squared_norm.sqrt()) == pytest.approx(exact, rel=1e-6)
    plain = float(torch.linalg.vector_norm(gradient))
    assert abs(plain / exact - 1) > 1e-5


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_non_finite_elements_show_in_both_totals(value):
    gradient = torch.ones(5000)
    gradient[4321] = value
    measure = measured(Sketcher(CPU, WIDTH), gradient)
    assert not torch.isfinite(measure.squared_norm)
    assert not torch.isfinite(measure.sketch).all()


def test_measuring_touches_no_generator_and_no_gradient():
    state, gradient = torch.get_rng_state(), torch.randn(3000)
    torch.set_rng_state(state)
    before = gradient.clone()
    measured(Sketcher(CPU), gradient)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("width", [0, 1, 4096, 8191])
def test_widths_that_cannot_work_are_refused(width):
    with pytest.raises(UsageError, match=f"prime other than 8191, got {width}"):
        Sketcher(CPU, width)
