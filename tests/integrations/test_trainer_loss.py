"""What a trainer's loss is given to the scope as, without a trainer."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

MICRO, OWN, ITEMS = 4, 3, 10


class Taking:
    """A scope that keeps what it is given."""

    def loss(self, value, weight=None, *, factor=None, constant=None, spare=False):
        self.weight, self.factor = weight, factor


def given(loss, inputs, num_items, **trainer):
    """Return the weight and the factor with which a trainer's loss is given."""
    from rankscope.integrations.transformers import TrainerLoss  # which imports for seconds

    scope, model = Taking(), torch.nn.Linear(3, 3)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=2, unwrap_model=lambda model: model),
        model=model,
        args=SimpleNamespace(gradient_accumulation_steps=MICRO),
        **trainer,
    )
    compute_loss = TrainerLoss(trainer, scope).around(lambda *_: loss)
    assert compute_loss(model, inputs, False, num_items) is loss
    return scope.weight, scope.factor


def mean():
    return F.cross_entropy(torch.randn(OWN, 3, requires_grad=True), torch.zeros(OWN).long())


def test_a_loss_that_is_scaled_for_accumulation_is_brought_back():
    """As GRPO's, whose inputs have no labels."""
    loss = mean() / MICRO
    assert given(loss, {}, None, loss_is_scaled_for_ga=False) == (None, None)
    assert given(loss, {}, None, loss_is_scaled_for_ga=True) == (None, 1 / MICRO)
    short = {"loss_is_scaled_for_ga": True, "current_gradient_accumulation_steps": 3}
    assert given(loss, {}, None, **short) == (None, 1 / 3)


def test_what_a_scaled_loss_was_divided_by_is_taken_out_once():
    inputs, loss = {"labels": torch.zeros(OWN).long()}, mean() * OWN / ITEMS
    weight, found = given(loss, inputs, ITEMS, loss_is_scaled_for_ga=True)
    assert float(weight) == OWN
    assert float(found) == pytest.approx(OWN / ITEMS)
