"""The role of each parameter of a model."""

import torch
from torch import nn

from rankscope.evidence.state.plan import read_roles, replaced_parameters
from rankscope.evidence.state.roles import Role, role_word


def test_the_role_of_each_parameter_is_seen():
    layers = {name: nn.Linear(2, 2, bias=False) for name in ("held", "twice", "forgotten", "tied")}
    layers["frozen"] = nn.Linear(2, 2, bias=False).requires_grad_(False)
    layers["tied"].weight = layers["held"].weight
    model = nn.ModuleDict(layers)
    optimizer = torch.optim.SGD(layers[name].weight for name in ("held", "twice", "frozen"))
    optimizer.param_groups[0]["params"].append(layers["twice"].weight)
    roles, left_out = read_roles(model, optimizer, left_out={"forgotten.weight", "frozen.weight"})
    held = Role.TRAINED | Role.OWNED
    assert dict(zip(roles.names, roles.words, strict=True)) == {
        "held.weight": held,
        "twice.weight": held | Role.TWICE,
        "forgotten.weight": Role.TRAINED | Role.LEFT_OUT,
        "tied.weight": role_word(held, "held.weight"),
        "frozen.weight": Role.OWNED | Role.LEFT_OUT,
    }
    assert left_out == {"forgotten.weight (2, 2)": layers["forgotten"].weight}


def test_only_tensors_that_never_get_a_gradient_replace_parameters():
    model = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("own", "lost", "unused")})
    for name in ("own", "lost"):
        model[name](torch.ones(3)).sum().backward()
    others = [nn.Parameter(p.detach().clone()) for p in model["lost"].parameters()]
    optimizer = torch.optim.SGD([*model["own"].parameters(), *others], lr=0.1, momentum=0.9)
    assert list(replaced_parameters(model, optimizer)) == ["lost.weight", "lost.bias"]
    others[0].grad = torch.ones(2, 3)
    assert list(replaced_parameters(model, optimizer)) == ["lost.bias"]
    optimizer.step()
    others[0].grad = None
    assert list(replaced_parameters(model, optimizer)) == ["lost.bias"], "it was updated before"
    optimizer.add_param_group({"params": [model["lost"].bias]})
    assert replaced_parameters(model, optimizer) == {}
    without = torch.optim.SGD(model["own"].parameters(), lr=0.1)
    assert replaced_parameters(model, without) == {}, "left out, and nothing in their place"
