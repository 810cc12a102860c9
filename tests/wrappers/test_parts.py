"""A gradient known by its parts alone: its sketch is exact, its norm an unbiased estimate."""

import math

import pytest
import torch

from rankscope.bus.groups import Groups
from rankscope.gradients.sketch import Sketcher
from rankscope.wrappers.parts import GradientParts

NUM_ELEMENTS = 3000
SEEDS = range(24)


def make_parts(width: int, seed: int = 0) -> tuple[GradientParts, Sketcher]:
    groups = Groups(("a", "b"), {"a": 0, "b": 1})
    sketcher = Sketcher(torch.device("cpu"), groups, width, seed)
    return GradientParts(sketcher), sketcher


def independent(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(NUM_ELEMENTS, generator=generator) for _ in range(3)]


def similar(generator: torch.Generator) -> list[torch.Tensor]:
    common = torch.randn(NUM_ELEMENTS, generator=generator)
    return [common + 0.3 * part for part in independent(generator)]


def estimate(width: int, seed: int, gradients: list[torch.Tensor]) -> float:
    parts, _ = make_parts(width, seed)
    for gradient in gradients:
        parts.measure("a", gradient)
        parts.close()
    return float(parts.totals().squared_norms.sum())


def relative_errors(width: int, draw) -> torch.Tensor:
    errors = []
    for seed in SEEDS:
        gradients = draw(torch.Generator().manual_seed(seed))
        truth = float(sum(gradient.double() for gradient in gradients).square().sum())
        errors.append(estimate(width, seed, gradients) / truth - 1)
    return torch.tensor(errors, dtype=torch.float64)


@pytest.mark.parametrize(("width", "draw"), [(61, independent), (509, similar)])
def test_the_squared_norm_is_unbiased_with_the_stated_error(width, draw):
    errors = relative_errors(width, draw)
    bound = math.sqrt(2 / width)
    assert errors.square().mean().sqrt() < bound
    assert abs(errors.mean()) < 3.5 * errors.std() / math.sqrt(len(SEEDS))


def test_the_sketch_is_that_of_the_sum():
    parts, sketcher = make_parts(251)
    gradients = independent(torch.Generator().manual_seed(1))
    for gradient in gradients:
        parts.measure("b", gradient)
        parts.close()
    expected = sketcher.new_totals()
    sketcher.measure("b", sum(gradients), expected)
    torch.testing.assert_close(parts.totals().sketches, expected.sketches, rtol=1e-5, atol=1e-4)
    norms = torch.stack([gradient.double().square().sum() for gradient in gradients])
    torch.testing.assert_close(parts.part_squared_norms(), norms, rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", range(2))
def test_parts_that_cancel_leave_no_negative_norm(seed):
    gradient = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(seed))
    squared_norm = estimate(61, seed, [gradient, -gradient])
    assert 0 <= squared_norm < float(gradient.square().sum())


def test_what_is_not_finite_stays_visible():
    parts, _ = make_parts(61)
    gradient = torch.ones(NUM_ELEMENTS)
    parts.measure("a", gradient)
    parts.close()
    gradient[7] = torch.inf
    parts.measure("a", gradient)
    parts.close()
    totals = parts.totals()
    assert totals.nonfinite.tolist() == [1, 0]
    assert totals.largest[0] == torch.inf
    assert not totals.squared_norms[0].isfinite()
