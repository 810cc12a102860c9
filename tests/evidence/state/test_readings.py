"""Many parts of tensors that are read at once: in C, and by one launch of the Triton kernel."""

import importlib.util

import pytest
import torch

from rankscope.evidence.state.readings import PendingDigests
from rankscope.gradients.digest import digest_bits
from support import interpreted_digest
from support.interpreted import interpreter

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform"
)


@pytest.fixture(scope="module")
def process():
    with interpreter() as process:
        yield process


def test_parts_have_the_digests_of_single_tensors():
    base = torch.randn(70, 33)
    parts = [
        (base, 0, None), (base, 5, 700), (base.t(), 0, None), (base.bfloat16(), 1, 2),
        (base[:0], 0, None), (torch.tensor(1), 0, None), (base.to_sparse(), 0, None),
        (torch.randn(5, dtype=torch.complex64).conj(), 0, None), (base, 4000, 5000),
        (torch.nn.Parameter(base), 3, None), (torch.empty(3, device="meta"), 0, None),
    ]  # fmt: skip
    reading = PendingDigests()
    for part in parts:
        reading.add(*part)
    reading.add_word(17)
    digests, squares = reading.begin().read()
    expected = [digest_bits(*part).known % 2**64 for part in parts]
    assert digests == [*expected, 17]
    assert squares == [0.0] * len(digests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_squares(dtype):
    gradient = torch.randn(9001, dtype=dtype)
    cases = [(gradient, 0, None), (gradient, 17, 8000), (gradient.view(-1, 1).t(), 0, None)]
    cases.append((gradient[::3], 5, 2000))
    reading = PendingDigests()
    for case in cases:
        reading.add(*case, norm=True)
    _, squares = reading.begin().read()
    for (tensor, start, stop), square in zip(cases, squares, strict=True):
        exact = float(tensor.reshape(-1)[start:stop].double().square().sum())
        assert square == pytest.approx(exact, rel=1e-6)


@needs_triton
def test_the_kernel_yields_the_digests_of_single_tensors(process):
    assert process.submit(interpreted_digest.errors_of_digests).result() == []


@needs_triton
def test_the_kernel_yields_sums_of_squares(process):
    for found, exact in process.submit(interpreted_digest.squares).result():
        assert found == pytest.approx(exact, rel=1e-12)


@needs_triton
def test_samples_have_the_same_digests_by_the_kernel(process):
    assert process.submit(interpreted_digest.batches_that_differ).result() == []
