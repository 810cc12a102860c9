"""Which models shift their labels by one, whatever is wrapped around them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rankscope.wrappers.labels import shifts_labels


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
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        return {"loss": total / num_items_in_batch}


def compiled(model):
    return torch.compile(model, backend="eager")


WRAPPED = {
    "adapted": Adapter,
    "compiled inside its adapter": lambda model: Adapter(compiled(model)),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_models_that_shift_their_labels_are_known_inside_what_wraps_them(wrap):
    assert shifts_labels(wrap(TinyForCausalLM()))
    assert not shifts_labels(wrap(nn.Linear(2, 2)))
