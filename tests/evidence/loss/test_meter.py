import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rankscope.evidence.loss.probe import LossMeter, read_losses
from rankscope.wrappers.backward_loss import unscaled
from rankscope.wrappers.labels import problem_of, shifts_labels
from support.collected import to_arrays


@pytest.fixture
def meter():
    return LossMeter(shifted=False)


def collected(meter):
    losses, weights = to_arrays(meter.collect()[0])
    return [loss.tolist() for loss in losses], [weight.tolist() for weight in weights]


def test_losses_are_picked_up_from_objects_and_mappings(meter):
    labels = torch.tensor([[1, -100, 3]])
    meter.see(SimpleNamespace(loss=torch.tensor(2.0)), {"labels": labels})
    meter.see({"loss": torch.tensor([3.0])}, {"labels": labels})
    assert collected(meter) == ([[2.0], [3.0]], [[2.0], [2.0]])
    assert collected(meter) == ([], [])


def test_given_losses_win_and_unknown_weights_are_nan(meter):
    meter.give(torch.tensor([1.0, 2.0]), torch.tensor([3, 4]))
    meter.give(5.0)
    meter.see(SimpleNamespace(loss=torch.tensor(9.0)), {})
    losses, weights = to_arrays(meter.collect()[0])
    assert [loss.tolist() for loss in losses] == [[1.0, 2.0], [5.0]]
    assert weights[0].tolist() == [3.0, 4.0]
    assert np.isnan(weights[1]).all()


@pytest.mark.parametrize(
    ("value", "weight", "words"),
    [
        (torch.ones(2, 2), None, "a scalar or one loss per sample, got shape (2, 2); reduce it"),
        (torch.ones(2), torch.ones(3), "one weight per loss, got 3 weights for 2 losses"),
        ("x", None, "numbers or a tensor of them as value, got str"),
        (None, None, "numbers or a tensor of them as value, got NoneType"),
        (1.0, {"tokens": 2}, "numbers or a tensor of them as weight, got dict"),
        (torch.ones(2) * 1j, None, "numbers or a tensor of them as value, got torch.complex64"),
    ],
)
def test_what_is_no_loss_is_said(value, weight, words):
    assert problem_of(value, weight).startswith(f"loss() expected {words}")


@pytest.mark.parametrize("value", [2.5, 3, [1.0, 2.0], torch.ones(2), np.float32(1), None])
def test_numbers_are_a_loss_or_its_weight(value):
    assert problem_of(value if value is not None else 1.0, value, factor=2, constant=None) == ""


@pytest.mark.parametrize("factor", [1.0, 8.0, 1 / 3])
def test_a_factor_inside_a_given_loss_is_told_apart_from_its_mean_over_tokens(meter, factor):
    """As of a training step that returns a multiple of a mean, of which a framework calls back."""
    labels = torch.tensor([1, -100, 3, 0])
    mean = F.cross_entropy(torch.randn(4, 5, requires_grad=True), labels)
    loss = mean * factor
    meter.give(loss)
    loss.backward()
    micro, multipliers = meter.collect()
    values, weights = to_arrays(micro)
    assert values[0].tolist() == pytest.approx([mean.item()])
    assert weights[0].tolist() == [3.0]
    assert multipliers.numpy().tolist() == pytest.approx([factor])


def losses_of_samples(size=3):
    return nn.Linear(4, 1)(torch.randn(size, 4)).square().flatten()


def scale_of(meter):
    scale = meter.collect()[1]
    return None if scale is None else float(scale.numpy().sum())


@pytest.mark.parametrize(("factor", "given"), [(65536.0, False), (1 / 3, True), (0.0, True)])
def test_a_factor_between_a_loss_and_its_backward_pass(meter, factor, given):
    loss = losses_of_samples().mean()
    if given:
        meter.give(loss)
    else:
        meter.see(SimpleNamespace(loss=loss), {})
    (loss * factor).backward()
    assert scale_of(meter) == np.float32(factor)
    assert scale_of(meter) is None


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        (lambda losses: losses.mean(), 1.0),
        (lambda losses: losses.sum(), 5.0),
        (lambda losses: 512 * (losses @ torch.tensor([0.5, 0.25, 0.0, 0.0, 0.25])), 512.0),
    ],
)
def test_one_loss_per_sample(meter, reduce, expected):
    losses = losses_of_samples(size=5)
    meter.give(losses)
    reduce(losses).backward()
    assert scale_of(meter) == pytest.approx(expected, rel=1e-6)


class Noted(torch.autograd.Function):
    """Returns a value; in the backward pass, its gradient or none."""

    @staticmethod
    def forward(ctx, value, nodes, defined):
        nodes.append(weakref.ref(ctx))
        ctx.defined = defined
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.defined else None, None, None


def test_a_loss_whose_gradient_is_undefined_does_not_stop_the_backward_pass(meter):
    parameter = torch.ones(2, requires_grad=True)
    loss = parameter.sum()
    meter.give(loss)
    (Noted.apply(loss, [], False) + parameter.sum()).backward()
    assert parameter.grad.tolist() == [1.0, 1.0]
    assert scale_of(meter) is None


def test_a_meter_keeps_no_graph_alive(meter):
    nodes = []
    loss = Noted.apply(torch.ones(2, requires_grad=True), nodes, True).sum()
    meter.give(loss)
    meter.see({"loss": loss}, {})
    loss.backward()
    assert nodes[0]() is not None
    del loss
    assert nodes[0]() is None
    assert scale_of(meter) == 1.0


@pytest.mark.parametrize(
    ("make", "micro", "scheduled", "value", "scale"),
    [
        (lambda x: x.exp().mean(), 2, math.nan, math.exp(1.5), 2.0),  # the divisor is missing
        (lambda x: x.exp().sum() / 3, 1, math.nan, math.exp(1.5), 1.0),
        (lambda x: x.exp().sum() / 6, 2, math.nan, math.exp(1.5), 1.0),
        (lambda x: x.exp().sum() / 2 * 65536, 2, math.nan, 3 * math.exp(1.5), 65536.0),
        (lambda x: x.exp().sum(), 2, 0.5, 3 * math.exp(1.5), 2.0),  # divided afterwards
        (lambda x: x.exp().sum(), 2, 1.0, 6 * math.exp(1.5), 1.0),
    ],
    ids=["mean", "sum over its terms", "its share of all", "scaled", "schedule", "no schedule"],
)
def test_a_loss_of_unknown_make_is_that_of_backward(meter, make, micro, scheduled, value, scale):
    for forward in range(micro):
        x = torch.full((3,), 1.5, requires_grad=True)
        root = make(x)
        loss, factor, constant, *_ = unscaled(root, {})
        meter.give(loss, None, forward, factor=factor, constant=constant, spare=True)
        root.backward()
    parts = read_losses(*meter.collect(), 1.0, scheduled).arrays
    assert np.frombuffer(parts["losses_U"]).tolist() == [pytest.approx(value)] * micro
    assert np.frombuffer(parts["multipliers_M"]).sum() == pytest.approx(scale)


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [0, -100, 2, 3]])
def test_a_cross_entropy_with_smoothed_labels_is_a_mean_over_its_labels(labels):
    logits = torch.ones(4, 5, requires_grad=True).exp()
    found = unscaled(F.cross_entropy(logits, torch.tensor(labels), label_smoothing=0.1) * 2, {})
    assert (found.constant, found.factor) == (None, 2.0)
    assert float(found.tokens) == len([each for each in labels if each >= 0])
    other = unscaled(0.9 * F.cross_entropy(logits, torch.tensor(labels)) + 0.3 * logits.sum(), {})
    assert other.tokens is None


KEPT = torch.tensor([1.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    "make",
    [
        lambda losses: losses[KEPT.bool()].mean(),
        lambda losses: torch.masked_select(losses, KEPT.bool()).mean() / 2 * 1024,
        lambda losses: (losses * KEPT).sum() / KEPT.sum(),
        lambda losses: (losses * KEPT).sum() / KEPT.sum().clamp(min=1) / 2,
    ],
    ids=["selection", "masked_select", "mask", "clamped"],
)
def test_label_tokens_of_a_masked_loss_are_counted(make):
    losses = torch.ones(4, requires_grad=True).exp()
    found = unscaled(make(losses), {})
    count = found.tokens if found.summed is None else found.summed[0]
    assert float(count) == 3


LABELS = torch.tensor([4, -100, 0, 2])


def per_token(logits, **more):
    return F.cross_entropy(logits, LABELS[: len(logits)], reduction="none", **more)


def in_chunks(logits):
    chunks = zip(logits.split(3), LABELS.split(3), strict=True)
    return torch.cat([F.cross_entropy(*chunk, reduction="none") for chunk in chunks])


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda logits: per_token(logits).sum() / 3, 3),
        (lambda logits: per_token(logits).view(2, 2).sum() / (LABELS >= 0).sum() / 2, 3),
        (lambda logits: in_chunks(logits).sum() / torch.tensor(3), 3),
        (lambda logits: per_token(logits).sum() * 2 / torch.tensor(3) / 2, 3),
        (lambda logits: per_token(logits, weight=torch.ones(5)).sum() / 3, None),
        (lambda logits: (in_chunks(logits) + 1).sum() / 3, None),
        (lambda logits: F.mse_loss(logits, logits.detach(), reduction="none").sum() / 3, None),
    ],
    ids=["one per token", "viewed", "chunks", "factors", "weights", "shifted", "squares"],
)
def test_label_tokens_of_losses_per_token_are_counted(make, count):
    logits = torch.randn(4, 5, requires_grad=True)
    summed = unscaled(make(logits), {}).summed
    assert (None if summed is None else float(summed[0])) == count


@pytest.mark.parametrize(("first", "width", "count"), [(1, 3, 4), (0, 4, 5), (0, 2, None)])
def test_label_tokens_of_losses_that_the_model_returns_are_those_of_its_labels(first, width, count):
    labels = torch.tensor([[-100, 1, 2, -100], [3, 1, 1, -100]])
    of_model = torch.randn(2, width, requires_grad=True) * 1.0
    found = unscaled((-of_model).sum() / torch.tensor(9), {of_model.grad_fn: None}, labels).summed
    assert (None if found is None else float(found[0])) == count
    number = torch.randn((), requires_grad=True) * 1.0
    assert unscaled(number.sum(), {number.grad_fn: None}, labels[0]).summed is None


@pytest.mark.parametrize(
    ("name", "attributes", "shifts"),
    [
        ("LlamaForCausalLM", {}, True),
        ("BertForMaskedLM", {}, False),
        ("T5ForConditionalGeneration", {"encodes": True}, False),
        ("LlavaForConditionalGeneration", {"encodes": False}, True),
    ],
)
def test_models_that_shift_their_labels_are_known(name, attributes, shifts):
    model = type(name, (nn.Module,), {})()
    if attributes:
        model.config = SimpleNamespace(is_encoder_decoder=attributes["encodes"])
        model.loss_type = "ForConditionalGeneration"
    assert shifts_labels(model) is shifts


class Adapter(nn.Module):
    """What ``get_peft_model`` returns without a task type, as far as it matters here."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def forward(self, **inputs):
        return self.base_model(**inputs)

    def get_base_model(self):
        if isinstance(self.base_model, Exception):
            raise self.base_model
        return self.base_model


class TinyForCausalLM(nn.Module):
    """Predicts the next of seven tokens, and divides by the number of tokens that it is given."""

    def __init__(self):
        super().__init__()
        self.head = nn.Embedding(7, 7)

    def forward(self, labels, num_items_in_batch):
        logits, targets = self.head(labels)[:, :-1], labels[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return {"loss": total / num_items_in_batch}


@pytest.mark.parametrize("wrap", [Adapter, lambda m: Adapter(torch.compile(m, backend="eager"))])
def test_models_that_shift_their_labels_are_known_inside_what_wraps_them(wrap):
    assert shifts_labels(wrap(TinyForCausalLM()))
    assert not shifts_labels(wrap(nn.Linear(2, 2)))
