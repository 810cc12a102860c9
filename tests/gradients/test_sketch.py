import math
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rankscope.bus.groups import group_parameters
from rankscope.errors import UnsupportedError, UsageError
from rankscope.gradients.kernels.flat import flat_parts
from rankscope.gradients.sketch import NormMeter, Sketcher
from rankscope.gradients.totals import GradientTotals, fold
from support.sketch_oracle import first_position, truth

CPU = torch.device("cpu")
WIDTH = 1021
ONE = group_parameters(["weight"])


def sparse_rows_with_mean(generator: torch.Generator) -> Tensor:
    gradient = torch.zeros(2048, 64)
    rows = torch.randperm(2048, generator=generator)[:150]
    mean = torch.randn(64, generator=generator)
    gradient[rows] = torch.randn(150, 64, generator=generator) + mean
    return gradient


def outer(generator: torch.Generator, num_out: int, num_in: int, *, positive: bool) -> Tensor:
    """Return the gradient of a weight, of positive activations or of such with mean zero."""
    delta = torch.randn(num_out, generator=generator)
    hidden = torch.randn(num_in, generator=generator)
    return torch.outer(delta, hidden.relu() if positive else hidden)


STRUCTURES: tuple[Callable[[torch.Generator], Tensor], ...] = (
    lambda generator: torch.randn(60_000, generator=generator),
    lambda generator: torch.randn(60_000, generator=generator) + 1,
    lambda generator: outer(generator, 64, 4096, positive=True),
    sparse_rows_with_mean,
    lambda generator: outer(generator, 128, 1000, positive=False),
)


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def totals_of(sketcher: Sketcher, **gradients: torch.Tensor) -> GradientTotals:
    totals = sketcher.new_totals()
    for name, gradient in gradients.items():
        sketcher.measure(name, gradient, totals)
    return totals


def sketch(gradient: torch.Tensor, width: int = WIDTH, seed: int = 0) -> torch.Tensor:
    return totals_of(Sketcher(CPU, ONE, width, seed), weight=gradient).sketches[0]


def pairwise(vectors, estimates) -> np.ndarray:
    found, exact = ([cosine(*two) for two in combinations(of, 2)] for of in (estimates, vectors))
    return np.subtract(found, exact)


def expect_unbiased(errors_SP: np.ndarray, width: float) -> None:
    assert np.sqrt(np.mean(errors_SP**2)) <= 1.25 / math.sqrt(width)
    means_S = errors_SP.mean(1)  # pairs of one seed are not independent
    assert abs(means_S.mean()) <= 3.5 * means_S.std(ddof=1) / math.sqrt(len(means_S))


@pytest.mark.parametrize(
    ("structure", "narrow"),
    [*((structure, None) for structure in STRUCTURES), (STRUCTURES[0], 251)],
)
def test_cosines_are_unbiased_with_the_stated_error(structure, narrow):
    errors = []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        gradients = [structure(generator) for _ in range(4)]
        width = 4093 if narrow else WIDTH
        sketches = torch.stack([sketch(gradient, width, seed) for gradient in gradients])
        errors.append(pairwise(gradients, fold(sketches, narrow, seed) if narrow else sketches))
    expect_unbiased(np.array(errors), narrow or WIDTH)


def test_folding_is_linear_and_follows_its_definition():
    wide = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    narrow = fold(wide, 61, seed=5)
    columns = fold(torch.eye(WIDTH), 61, seed=5)  # row c: where entry c goes, and with what sign
    assert torch.equal(columns.abs().sum(1), torch.ones(WIDTH))
    assert torch.equal(columns.abs().argmax(1), torch.arange(WIDTH) % 61)
    assert abs(float(columns.sum())) < 4 * math.sqrt(WIDTH)
    torch.testing.assert_close(narrow, wide @ columns)
    torch.testing.assert_close(fold(3 * wide[:1] - wide[1:2], 61, 5), 3 * narrow[:1] - narrow[1:2])
    assert not torch.equal(fold(wide, 61, seed=6), narrow)


def layouts(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    wider = torch.zeros(600, 1000)
    wider[:, 50:950] = matrix
    coordinates = matrix.to_sparse()
    twice = torch.sparse_coo_tensor(
        coordinates.indices().repeat(1, 2), coordinates.values().repeat(2) / 2, matrix.shape
    )
    backwards = matrix.view(30, 20, 900).permute(2, 1, 0).contiguous()
    return {
        "contiguous": matrix,
        "transposed": matrix.t().contiguous().t(),
        "a slice": wider[:, 50:950],
        "reversed dimensions": backwards.permute(2, 1, 0),
        "sparse": coordinates,
        "sparse, not coalesced": twice,
        "sparse rows": matrix.to_sparse(1),
        "requires grad": nn.Parameter(matrix),
    }


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_layouts_of_memory_do_not_matter():
    generator = torch.Generator().manual_seed(2)
    matrix = torch.randn(600, 900, generator=generator)
    matrix[torch.rand(600, generator=generator) < 0.5] = 0
    expected = truth("weight", 0, matrix, WIDTH, first_position("weight", 0, WIDTH))
    for layout, gradient in layouts(matrix).items():
        totals = totals_of(Sketcher(CPU, ONE, WIDTH), weight=gradient)
        np.testing.assert_allclose(
            totals.sketches[0].numpy(), expected.sketch, rtol=1e-4, atol=1e-4, err_msg=layout
        )
        assert float(totals.squared_norms[0]) == pytest.approx(expected.squared_norm, rel=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_no_layout_is_copied_whole():
    matrix = torch.randn(600, 900)
    tall = torch.randn(2, 300_000).t()  # 600,000 elements, with rows of two
    wide = torch.randn(900_000, 2).t()  # a single row is longer than what may be copied
    for gradient in (*layouts(matrix).values(), tall, wide):
        parts = list(flat_parts(gradient))
        ends = [position + len(part) for position, part in parts]
        assert [position for position, _ in parts] == [0, *ends[:-1]]
        assert ends[-1] == gradient.numel()
        own = gradient.data_ptr() if gradient.layout == torch.strided else None
        assert all(len(p) <= 1 << 18 or p.data_ptr() == own for _, p in parts)


@pytest.mark.parametrize("meter", [Sketcher, NormMeter])
def test_a_gradient_on_another_device_is_an_error_that_is_told(meter):
    sketcher = meter(CPU, ONE, WIDTH)
    totals = sketcher.new_totals()
    elsewhere = torch.ones(30, 30, device="meta")  # the compiled kernel would read at address 0
    for _ in range(2):  # the second time, all is prepared
        with pytest.raises(UnsupportedError, match=r"a gradient on cpu.*got one on meta"):
            sketcher.measure("weight", elsewhere, totals)
        with pytest.raises(UnsupportedError, match="got one on meta"):
            sketcher.measure_norms([("weight", elsewhere)], totals)
        sketcher.measure("weight", torch.ones(30, 30), totals)
    assert float(totals.squared_norms[0]) == 2 * 30 * 30


@pytest.mark.parametrize("width", [0, 1, 4096, 8191])
def test_widths_that_cannot_work_are_refused(width):
    with pytest.raises(UsageError, match=f"prime other than 8191, got {width}"):
        Sketcher(CPU, ONE, width)
