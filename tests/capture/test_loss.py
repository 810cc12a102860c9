from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rankscope.capture import LossMeter
from rankscope.capture.loss import to_arrays
from rankscope.errors import UsageError


def collected(meter):
    losses, weights = to_arrays(meter.collect())
    return [loss.tolist() for loss in losses], [weight.tolist() for weight in weights]


def test_losses_are_picked_up_from_objects_and_mappings():
    meter = LossMeter(shifted=False)
    labels = torch.tensor([[1, -100, 3]])
    meter.see(SimpleNamespace(loss=torch.tensor(2.0)), {"labels": labels})
    meter.see({"loss": torch.tensor([3.0])}, {"labels": labels})
    assert collected(meter) == ([[2.0], [3.0]], [[2.0], [2.0]])
    assert collected(meter) == ([], [])


def test_causal_models_do_not_count_the_first_label():
    meter = LossMeter(shifted=True)
    labels = torch.tensor([[1, -100, 3], [4, 5, 6]])
    meter.see(SimpleNamespace(loss=torch.tensor(2.0)), {"labels": labels})
    assert collected(meter)[1] == [[3.0]]


def test_outputs_without_a_scalar_loss_are_left_alone():
    meter = LossMeter(shifted=False)
    for output in (torch.ones(3), None, (1, 2), {"loss": torch.ones(2)}, SimpleNamespace(loss=1.0)):
        meter.see(output, {})
    assert collected(meter) == ([], [])


def test_given_losses_win_and_unknown_weights_are_nan():
    meter = LossMeter(shifted=False)
    meter.give(torch.tensor([1.0, 2.0]), torch.tensor([3, 4]))
    meter.give(5.0)
    meter.see(SimpleNamespace(loss=torch.tensor(9.0)), {})
    losses, weights = to_arrays(meter.collect())
    assert [loss.tolist() for loss in losses] == [[1.0, 2.0], [5.0]]
    assert weights[0].tolist() == [3.0, 4.0]
    assert np.isnan(weights[1]).all()


def test_a_loss_is_read_when_it_is_given_and_keeps_no_graph():
    meter = LossMeter(shifted=False)
    value = torch.tensor(1.0, requires_grad=True)
    loss = value * 2
    meter.give(loss)
    with torch.no_grad():
        loss.add_(5)
    assert collected(meter)[0] == [[2.0]]


@pytest.mark.parametrize(
    ("value", "weight"),
    [(torch.ones(2, 2), None), (torch.ones(2), torch.ones(3)), (1.0, torch.ones(2))],
)
def test_wrong_shapes_are_refused(value, weight):
    with pytest.raises(UsageError, match=r"loss\(\) expected"):
        LossMeter(shifted=False).give(value, weight)
