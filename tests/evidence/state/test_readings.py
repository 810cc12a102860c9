"""Many parts of tensors that are read at once; the Triton kernel is in ``test_measure_many.py``."""

import pytest
import torch

from rankscope.evidence.state.readings import PendingDigests
from rankscope.gradients.digest import digest_bits


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
