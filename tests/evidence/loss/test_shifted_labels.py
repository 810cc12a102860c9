"""Which models shift their labels by one, whatever is wrapped around them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rankscope.evidence.loss.probe import LossMeter
from rankscope.wrappers.labels import shifts_labels
from support.collected import to_arrays


@pytest.mark.parametrize(
    ("name", "attributes", "shifts"),
    [
        ("LlamaForCausalLM", {}, True),
        ("PeftModelForCausalLM", {}, True),
        ("GPT2LMHeadModel", {}, True),
        ("BertForMaskedLM", {}, False),
        ("T5ForConditionalGeneration", {"encodes": True}, False),
        ("LlavaForConditionalGeneration", {"encodes": False}, True),
        ("Odd", {}, False),
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


class AdapterForCausalLM(Adapter):
    pass


class TinyForCausalLM(nn.Module):
    """Predicts the next of seven tokens, and divides by the number of tokens that it is given."""

    def __init__(self):
        super().__init__()
        self.head = nn.Embedding(7, 7)

    def forward(self, labels, num_items_in_batch):
        logits, targets = self.head(labels)[:, :-1], labels[:, 1:]
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        return {"loss": total / num_items_in_batch}


def compiled(model):
    return torch.compile(model, backend="eager")


WRAPPED = {
    "adapted": Adapter,
    "compiled": compiled,
    "compiled inside its adapter": lambda model: Adapter(compiled(model)),
    "compiled with its adapter": lambda model: compiled(Adapter(model)),
    "adapted twice": lambda model: Adapter(Adapter(model)),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_models_that_shift_their_labels_are_known_inside_what_wraps_them(wrap):
    assert shifts_labels(wrap(TinyForCausalLM()))
    assert not shifts_labels(wrap(nn.Linear(2, 2)))


def test_the_model_inside_is_believed_before_the_name_around_it():
    T5ForConditionalGeneration = type("T5ForConditionalGeneration", (nn.Module,), {})
    assert not shifts_labels(AdapterForCausalLM(T5ForConditionalGeneration()))
    assert shifts_labels(AdapterForCausalLM(nn.Linear(2, 2)))


def test_a_wrapper_that_cannot_say_what_it_holds_is_taken_by_its_name():
    for broken in (ValueError("no base model"), None, "a name"):
        adapter = AdapterForCausalLM(nn.Linear(2, 2))
        adapter.__dict__["base_model"] = broken
        assert shifts_labels(adapter)
    endless = Adapter(nn.Linear(2, 2))
    endless.__dict__["get_base_model"] = lambda: endless
    assert not shifts_labels(endless)


@pytest.mark.parametrize("wrap", [lambda model: model, Adapter, compiled])
def test_a_wrapped_model_has_the_loss_of_its_own_label_tokens(wrap):
    torch.manual_seed(0)
    bare = TinyForCausalLM()
    labels, num_workers = torch.randint(7, (4, 12)), 2
    model, total = wrap(bare), torch.tensor(num_workers * 4 * 11)
    meter = LossMeter(shifted=shifts_labels(model))
    inputs = {"labels": labels, "num_items_in_batch": total}
    output = model(**inputs)
    meter.see(output, inputs)
    (output["loss"] * num_workers).backward()
    losses, multipliers = meter.collect()
    (values,), (weights,) = to_arrays(losses)
    assert weights.tolist() == [44]
    assert values[0] == pytest.approx(bare(labels, 44)["loss"].item())
    assert multipliers.numpy()[0] == pytest.approx(1)
