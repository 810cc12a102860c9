import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rankscope.bus.replicas import StateKind
from rankscope.evidence.state import roles as state_roles
from rankscope.evidence.state.meter import StateMeter
from rankscope.evidence.state.plan import DigestSchedule, read_roles, replaced_parameters, survey
from support.state import KINDS, look, make


def covered(plan):
    """Return how often each element of each kind is read in a cycle."""
    counts = {}
    for step in range(plan.length):
        for item in plan.items(step):
            for part in item.slices:
                for kind in item.kinds:
                    size = max(1, part.length)
                    count = counts.setdefault((kind, part.place.name), np.zeros(size, np.int32))
                    count[part.start : part.stop] += 1
    return counts


def expected_kinds(model, buffer=StateKind.STATISTICS):
    parameters = {(kind, name) for name, _ in model.named_parameters() for kind in KINDS}
    return parameters | {(buffer, name) for name, _ in model.named_buffers()}


def schedule_of(model, num_slots, max_items):
    options = {"replicated": True, "called": True, "kept": True}
    return DigestSchedule(survey(model), **options, num_slots=num_slots, max_items=max_items)


@pytest.mark.parametrize("num_slots", [2, 64])
def test_everything_has_its_slot_once_in_a_cycle(num_slots):
    model, _, _ = make()
    plan = schedule_of(model, num_slots, 32)
    counts = covered(plan)
    assert counts.keys() == expected_kinds(model)
    parameters = [count for (kind, _), count in counts.items() if kind is not StateKind.STATISTICS]
    assert all((count == 1).all() for count in parameters)
    assert plan.length <= num_slots


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.integers(0, 3_000_000), min_size=1, max_size=120),
    st.lists(st.integers(0, 300_000), max_size=40),
    st.sampled_from([(64, 32), (8, 32), (64, 12), (16, 5)]),
)
def test_any_model_is_dealt_out(sizes, buffers, limits):
    num_slots, max_items = limits
    model = nn.ParameterList(torch.empty(size, device="meta") for size in sizes)
    for number, size in enumerate(buffers):
        model.register_buffer(f"b{number}", torch.empty(size, device="meta"))
    plan = schedule_of(model, num_slots, max_items)
    counts = covered(plan)
    assert counts.keys() == expected_kinds(model, StateKind.BUFFER)
    assert all((count >= 1).all() for count in counts.values())
    slots = [plan.items(step) for step in range(plan.length)]
    assert all(sum(len(item.kinds) for item in items) <= max_items for items in slots)
    assert plan.length <= num_slots
    most = 4 * max(4 * (sum(sizes) + sum(buffers)) / num_slots, 1 << 18)
    assert max(sum(item.bytes for item in items) for items in slots) <= most


def test_many_small_parameters_share_a_digest():
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(600))
    meter = StateMeter(model, torch.optim.SGD(model.parameters()), replicated=True)
    names = look(meter, 0)[0].names
    assert "0.weight … 1.weight (3 tensors)" in names
    assert len(names) <= 32
    before = look(meter, 0)[0]
    with torch.no_grad():
        model[1].weight[1, 0] += 1
    after = look(meter, 0)[0]
    changed = np.flatnonzero(before.digests_D != after.digests_D)
    assert [after.names[d] for d in changed] == ["0.weight … 1.weight (3 tensors)"]


NAMES = ("embedding.weight", "block.weight", "block.bias", "head.weight")
PLAIN = state_roles.Role.TRAINED | state_roles.Role.OWNED
FREE = (StateKind.PARAMETER, StateKind.REDUCED)
HELD = (StateKind.PARAMETER, StateKind.OPTIMIZER, StateKind.REDUCED)


def messages(*words_WN, left_out=({}, {}, {})):
    return [
        state_roles.Roles(NAMES, tuple(words), alone).to_json(named=rank == 0)
        for rank, (words, alone) in enumerate(zip(words_WN, left_out, strict=False))
    ]


def test_what_differs_is_named_with_all_words():
    plain = (int(PLAIN), int(PLAIN), int(PLAIN), state_roles.role_word(PLAIN, NAMES[0]))
    frozen = (plain[0], int(state_roles.Role.OWNED), *plain[2:])
    untied = (*plain[:3], int(PLAIN))
    found = state_roles.role_differences(messages(plain, frozen, untied))
    assert {d.kind for d in found} == {StateKind.ROLE}
    assert [d.name for d in found] == ["block.weight", "head.weight"]
    assert found[0].digests_W.tolist() == [plain[1], frozen[1], plain[1]]
    assert found[1].digests_W.tolist() == [plain[3], plain[3], untied[3]]


def test_parameters_that_are_not_reduced_are_compared_where_all_have_them():
    words = (PLAIN,) * 4
    alone = ({"a (2,)": 1, "b (2,)": 5, "c (1,)": 1}, {"a (2,)": 1, "b (2,)": 6}, {"a (2,)": 1})
    assert state_roles.role_differences(messages(words, words, words, left_out=alone)) == ()
    [found] = state_roles.role_differences(messages(words, words, left_out=alone))
    assert (found.kind, found.name) == (StateKind.LEFT_OUT, "b (2,)")
    assert found.digests_W.tolist() == [5, 6]


class Training:
    """Digests of two parameters in turns: ``own`` is held by the optimizer, ``other`` may be."""

    def __init__(self, *, kinds=FREE):
        self.unchanged, self.kinds, self.found = state_roles.UnchangedParameters(), kinds, []

    def step(self, step, *, own, other, gradient, updates=False):
        kinds = (*HELD, *self.kinds)
        digests = dict.fromkeys(self.kinds, 0)
        digests |= {StateKind.PARAMETER: other, StateKind.REDUCED: gradient}
        values = [own, 7, 1000 + step, *digests.values()]
        names = ["own"] * len(HELD) + ["other"] * len(self.kinds)
        found = self.unchanged.see(step, kinds, names, values, updates=updates)
        self.found += [(step, *one) for one in found]


def test_a_parameter_that_no_optimizer_holds_is_told_after_two_turns_and_then_rarely():
    training = Training()
    for step in range(20):
        training.step(step, own=step, other=1, gradient=500 + step)
    found = [(step, name, rests) for step, name, _, rests in training.found]
    assert found == [(step, "other", True) for step in (2, 4, 8, 16)]
    assert all(not role & state_roles.Role.OWNED for *_, role, _ in training.found)
    training.step(20, own=20, other=2, gradient=1)
    assert training.found[-1][::3] == (20, False)
    [difference] = state_roles.unchanged_differences([training.found[-1][1:]], 3)
    assert not difference.unchanged_W.any()
    assert len(difference.digests_W) == 3


@pytest.mark.parametrize(
    "values",
    [
        {"own": lambda step: 0, "other": lambda step: 1, "gradient": lambda step: 500 + step},
        {"own": lambda step: step, "other": lambda step: 1, "gradient": lambda step: 0},
        {"own": lambda step: step, "other": lambda step: step // 2, "gradient": lambda s: 500 + s},
    ],
    ids=["nothing is updated", "no gradient", "updates every other step"],
)
def test_nothing_is_told_where_rest_is_no_fault(values):
    training = Training()
    for step in range(40):
        training.step(step, **{name: value(step) for name, value in values.items()})
    assert training.found == []


@pytest.mark.parametrize("kinds", [HELD, FREE], ids=["held", "not held"])
def test_nothing_that_changes_is_told_after_32_updates(kinds):
    training = Training(kinds=kinds)
    for step in range(3):  # a warm-up from 0
        training.step(step, own=0, other=1, gradient=500 + step)
    for step in range(3, 40):
        training.step(step, own=0, other=1, gradient=500 + step, updates=True)
    found = [(step, name, rests) for step, name, _, rests in training.found]
    assert found == [(34, "own", True), (34, "other", True)]
    assert all(role & state_roles.Role.ALL_REST for *_, role, _ in training.found)
    training.step(40, own=0, other=2, gradient=1, updates=True)
    assert training.found[-1][::3] == (40, False)
    for step in range(41, 80):
        training.step(step, own=0, other=2, gradient=500 + step, updates=True)
    assert training.found[-1][:2] == (72, "other")


def test_a_replaced_parameter_counts_once_all_workers_have_seen_it_rest():
    def roles(*replaced_W):
        return [state_roles.Roles(NAMES, (1,) * 4, {}, of).to_json(named=True) for of in replaced_W]

    before = roles({"block.weight": 1, "block.bias": 2}, {"block.weight": 3, "block.bias": 2})
    now = roles({"block.weight": 1, "block.bias": 2}, {"block.weight": 3, "block.bias": 4})
    assert state_roles.replaced_differences((), now) == ()
    [found] = state_roles.replaced_differences(before, now)
    assert (found.kind, found.name) == (StateKind.RESTING, "block.weight")
    assert np.all(found.digests_W & state_roles.Role.REPLACED)


def names_of(*starts_W):
    return [found.name for found in state_roles.alike_shards(starts_W)]


def test_all_matrices_have_to_begin_alike_on_all_ranks():
    one, other = [["a", "0", 1], ["b", "0", 2]], [["a", "1", 1], ["b", "1", 2]]
    assert names_of(one, other) == ["a", "b"]
    assert names_of(one, [["a", "1", 1], ["b", "1", 3]]) == []  # one that repeats on purpose
    assert names_of(one, [["a", "1", 1]]) == []  # one alone that is known


def test_replicas_of_a_shard_are_not_compared_with_each_other():
    one, other = [["a", "0", 1], ["b", "0", 2]], [["a", "1", 3], ["b", "1", 4]]
    assert names_of(one, one) == []
    assert names_of(one, one, other, other) == []


def test_the_role_of_each_parameter_is_seen():
    layers = {name: nn.Linear(2, 2, bias=False) for name in ("held", "twice", "forgotten", "tied")}
    layers["frozen"] = nn.Linear(2, 2, bias=False).requires_grad_(False)
    layers["tied"].weight = layers["held"].weight
    model = nn.ModuleDict(layers)
    optimizer = torch.optim.SGD(layers[name].weight for name in ("held", "twice", "frozen"))
    optimizer.param_groups[0]["params"].append(layers["twice"].weight)
    roles, left_out = read_roles(model, optimizer, left_out={"forgotten.weight", "frozen.weight"})
    held = state_roles.Role.TRAINED | state_roles.Role.OWNED
    assert dict(zip(roles.names, roles.words, strict=True)) == {
        "held.weight": held,
        "twice.weight": held | state_roles.Role.TWICE,
        "forgotten.weight": state_roles.Role.TRAINED | state_roles.Role.LEFT_OUT,
        "tied.weight": state_roles.role_word(held, "held.weight"),
        "frozen.weight": state_roles.Role.OWNED | state_roles.Role.LEFT_OUT,
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
