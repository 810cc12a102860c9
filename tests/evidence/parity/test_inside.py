"""Outputs of layers, and their gradients, as a recording takes them."""

import torch
from torch import nn

from rankscope.bus.parity import OUTPUT, OUTPUT_GRADIENT
from rankscope.evidence.parity.inside import LayerOutputs
from support.models import PassedOn


def test_an_output_that_the_loss_leaves_alone_has_no_gradient():
    torch.manual_seed(0)
    heads = nn.ModuleDict({"used": nn.Linear(3, 2), "alone": nn.Linear(3, 2)})
    taken = []
    LayerOutputs(heads, lambda *found: taken.append(found), lambda: True)
    batch = torch.randn(4, 3)
    used, _ = PassedOn.apply(*(head(batch) for head in heads.values()))
    used.sum().backward()
    assert [found[:2] for found in taken] == [
        (OUTPUT, "used"),
        (OUTPUT, "alone"),
        (OUTPUT_GRADIENT, "used"),
    ]
    assert all(isinstance(tensor, torch.Tensor) for _, _, tensor in taken)
