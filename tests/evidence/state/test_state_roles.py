"""The role of each parameter of a model."""

import torch
from torch import nn

from rankscope.evidence.state.parameter_roles import read_roles
from rankscope.evidence.state.roles import Role, role_word


def test_the_role_of_each_parameter_is_seen():
    layers = {name: nn.Linear(2, 2, bias=False) for name in ("held", "twice", "forgotten", "tied")}
    layers["frozen"] = nn.Linear(2, 2, bias=False).requires_grad_(False)
    layers["tied"].weight = layers["held"].weight
    model = nn.ModuleDict(layers)
    optimizer = torch.optim.SGD(layers[name].weight for name in ("held", "twice", "frozen"))
    optimizer.param_groups[0]["params"].append(layers["twice"].weight)
    found = read_roles(model, optimizer, left_out={"forgotten.weight", "frozen.weight"})
    held = Role.TRAINED | Role.OWNED
    assert dict(zip(found.roles.names, found.roles.words, strict=True)) == {
        "held.weight": held,
        "twice.weight": held | Role.TWICE,
        "forgotten.weight": Role.TRAINED | Role.LEFT_OUT,
        "tied.weight": role_word(held, "held.weight"),
        "frozen.weight": Role.OWNED | Role.LEFT_OUT,
    }
    assert found.left_out == {"forgotten.weight (2, 2)": layers["forgotten"].weight}
