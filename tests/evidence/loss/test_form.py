from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional as F

from rankscope.evidence.loss.probe import LossMeter
from rankscope.wrappers.backward_loss import unscaled
from rankscope.wrappers.loss_form import LossForm, read_form

OWN, ITEMS, WORKERS = 3, 11, 4
LABELS = torch.tensor([1, 2, -100, 3])


def logits():
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()


def summed():
    return F.cross_entropy(logits(), LABELS, reduction="sum")


def by_hand():
    picked = -F.log_softmax(logits(), dim=-1).gather(1, LABELS.clamp(min=0)[:, None])[:, 0]
    return picked.masked_fill(LABELS == -100, 0)


def smoothed():
    spread = -F.log_softmax(logits(), dim=-1).sum(-1).masked_fill(LABELS == -100, 0).sum()
    items = torch.tensor(ITEMS)
    return 0.9 * (by_hand().sum() / items) + 0.1 * (spread / (items * 7))


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value / ITEMS

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ITEMS


@pytest.mark.parametrize(
    ("make", "divided"),
    [
        (lambda: summed() / torch.tensor(ITEMS), True),
        (lambda: summed() / ITEMS, True),
        (lambda: summed() / torch.tensor(ITEMS).clamp(min=1), True),
        (smoothed, True),
        (lambda: F.cross_entropy(logits(), LABELS), False),
        (lambda: by_hand().sum() / (LABELS != -100).sum(), False),
        (lambda: F.mse_loss(logits(), torch.zeros(4, 7)), False),
    ],
)
def test_sums_over_all_and_means_over_own_are_told_apart(make, divided):
    assert read_form(make(), OWN, torch.tensor(ITEMS), WORKERS) == LossForm(divided, False)
    loss = make() * WORKERS
    assert read_form(loss, torch.tensor(OWN), ITEMS, WORKERS) == LossForm(divided, True)
    loss = make()
    loss *= WORKERS  # as Trainer does, in place
    assert read_form(loss, OWN, ITEMS, WORKERS) == LossForm(divided, True)
    loss.backward()
    assert loss.grad_fn is not None


@pytest.mark.parametrize(
    ("divide", "multiplier"),
    [
        (lambda total: total / ITEMS, OWN / ITEMS),
        (Opaque.apply, OWN / ITEMS),
        (lambda total: total / (LABELS != -100).sum(), 1.0),
    ],
    ids=["divided", "not seen", "mean by hand"],
)
def test_a_model_that_ignores_the_number_of_tokens_is_taken_at_its_word(divide, multiplier):
    """Trainer gives it to every model that takes any argument."""
    meter = LossMeter(shifted=False)
    inputs = {"labels": LABELS, "num_items_in_batch": torch.tensor(ITEMS)}
    for _ in range(2):
        found = divide(summed())
        meter.see({"loss": found}, inputs)
        found.backward()
        (micro,), multipliers = meter.collect()
        mean = F.cross_entropy(logits(), LABELS).item()
        assert micro.values.numpy() == pytest.approx(mean, rel=1e-5)
        assert multipliers.numpy() == pytest.approx(multiplier)


@contextmanager
def kept():
    """Yield the tensors that autograd has saved meanwhile and is asked for later."""
    asked = []

    def ask(saved):
        asked.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, ask):
        yield asked


def test_nothing_that_a_model_has_saved_is_asked_for():
    """To ask may run a checkpointed layer again, and means in it are none of the loss."""
    with kept() as of_layer:
        hidden = logits()
        hidden = hidden * torch.rsqrt((hidden * hidden).mean(-1, keepdim=True)) * hidden.mean()
    assert read_form(Opaque.apply(hidden.sum()), OWN, ITEMS, WORKERS) is None
    loss = F.cross_entropy(hidden, LABELS, reduction="sum") / ITEMS
    assert read_form(loss, OWN, ITEMS, WORKERS) == LossForm(True, False)
    assert of_layer == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: summed() / torch.tensor(ITEMS),
        lambda: F.cross_entropy(logits(), LABELS, weight=torch.ones(7), reduction="sum"),
    ],
)
def test_what_a_hook_of_the_training_has_packed_is_left_to_it(make):
    """Offloading gives each tensor back once: to the backward pass."""
    with kept() as of_loss:
        loss = make() * WORKERS
    read_form(loss, OWN, torch.tensor(ITEMS), WORKERS)
    unscaled(loss, {})
    unscaled(make(), {})
    assert of_loss == []


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
