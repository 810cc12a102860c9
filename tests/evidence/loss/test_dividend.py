"""The multiplier of a loss that is logged per token, where another tensor is trained on."""

import pytest
import torch

from rankscope.evidence.loss.probe import LossMeter


def multiplier(trained, given):
    meter = LossMeter(shifted=False)
    meter.give(given, 10.0)
    trained.backward()
    _, found = meter.collect()
    return None if found is None else found.numpy().tolist()


@pytest.fixture
def total():
    return torch.ones(10, requires_grad=True).sum()


def test_a_sum_that_is_trained_on_and_logged_per_token(total):
    assert multiplier(total, total / 10) == [10.0]
    assert multiplier(3 * torch.ones(2, requires_grad=True).sum(), total / 10) is None


def test_a_sum_that_is_divided_otherwise(total):
    assert multiplier(4 * total / 40, total / torch.tensor(10.0)) == pytest.approx([1.0])
