"""A few numbers that are copied with all else that a step measures on a device."""

import numpy as np
import pytest
import torch

from rankscope.gradients import host
from rankscope.gradients.host import FewNumbers, HostCopy, Share, begin_copies, copy_numbers


@pytest.fixture(autouse=True)
def nothing_open():
    begin_copies()
    yield
    begin_copies()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_numbers_arrive_in_their_shape_as_they_were(dtype):
    given = torch.tensor([[1.0, 2.0], [3.0, -4.0]]).to(dtype)
    few = FewNumbers(given, torch.float64)
    given.zero_()
    assert few.numpy().tolist() == [[1.0, 2.0], [3.0, -4.0]]
    assert few.numpy().dtype == np.float64


def test_a_scalar_and_integers():
    scalar = FewNumbers(torch.tensor(2.5, requires_grad=True), torch.float64)
    numbers = FewNumbers(torch.tensor([1 << 62, -3]), torch.int64)
    assert scalar.numpy().shape == ()
    assert float(scalar.numpy()) == 2.5
    assert numbers.numpy().tolist() == [1 << 62, -3]


def test_all_of_a_step_take_one_copy(monkeypatch):
    copies = []
    monkeypatch.setattr(
        host, "HostCopy", lambda tensor, **more: copies.append(1) or HostCopy(tensor, **more)
    )
    first = FewNumbers(torch.tensor([1.0, 2.0, 3.0]), torch.float64)
    share = Share(torch.device("cpu"))
    share.take(2).copy_(torch.tensor([7, 8]))
    last = FewNumbers(torch.tensor(9.0), torch.float64)
    begin_copies()
    assert first.numpy().tolist() == [1.0, 2.0, 3.0]
    assert share.numpy().tolist() == [7, 8]
    assert float(last.numpy()) == 9.0
    assert len(copies) == 1


def test_on_the_host_they_are_copied_at_once():
    given = torch.tensor([1.0, 2.0], dtype=torch.float64)
    copy, own = copy_numbers(given, torch.float64), copy_numbers(given, torch.float64, own=True)
    given[0] = 5
    assert isinstance(copy, HostCopy)
    assert copy.numpy().tolist() == [1.0, 2.0]
    assert own.numpy().tolist() == [5.0, 2.0]
