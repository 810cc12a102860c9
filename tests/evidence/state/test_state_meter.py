"""Exact digests of a model's state: what is read, and what is told of it."""

import copy
import math
import random
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankscope.bus.replicas import StateKind, differences
from rankscope.evidence.state import readings
from rankscope.evidence.state.meter import StateMeter
from rankscope.evidence.state.slot import odd_factors
from rankscope.gradients.digest import PendingDigest, digest_bits
from rankscope.gradients.kernels.bits import signed
from support.state import KINDS, Model, look, make, of, reductions, train


@pytest.mark.parametrize(
    ("kind", "name", "fault"),
    [
        (StateKind.PARAMETER, "embed.weight[", lambda m, o: m.embed.weight[4321, 7]),
        (StateKind.PARAMETER, "layers.3.bias", lambda m, o: m.layers[3].bias[63]),
        (StateKind.STATISTICS, "norm.running_var", lambda m, o: m.norm.running_var[5]),
        (StateKind.OPTIMIZER, "embed.weight[", lambda m, o: o.state[m.embed.weight]["exp_avg"][9]),
        (StateKind.OPTIMIZER, "norm.bias", lambda m, o: o.state[m.norm.bias]["step"]),
        (StateKind.APPLIED, "layers.0.weight", lambda m, o: m.layers[0].weight.grad[1, 1]),
    ],
)
def test_one_changed_element_is_found_in_one_rotation_and_named(kind, name, fault):
    (one, first, meter), (other, second, suspect) = make(), make()
    for step in range(2):
        train(one, first, meter, step)
        train(other, second, suspect, step)
    with torch.no_grad():
        fault(other, second).add_(1.0)
    found = set()
    for step in range(2, 2 + 64):
        own, _ = look(meter, step)
        digests_WD = np.stack([own.digests_D, look(suspect, step)[0].digests_D])
        unchanged_WD = np.zeros_like(digests_WD, bool)
        for difference in differences(own, digests_WD, unchanged_WD, np.zeros(2, np.int64)):
            found.add((difference.kind, difference.name))
    kinds = {kind, StateKind.REDUCED} if kind is StateKind.APPLIED else {kind}
    assert {kind for kind, _ in found} == kinds
    assert all(found_name.startswith(name) for _, found_name in found)
    assert len({found_name for _, found_name in found}) == 1
    if name.endswith("["):
        start, stop = found.pop()[1][len(name) : -1].split(":")
        place = 4321 * 64 + 7 if kind is StateKind.PARAMETER else 9 * 64
        assert int(start) <= place < int(stop)


def test_what_the_reduction_left_alone_is_told():
    model, optimizer, meter = make()
    state, _ = train(model, optimizer, meter, 0)
    assert set(reductions(state).values()) == {True}

    def twice(name, gradient):
        meter.see_local(name, gradient)  # an earlier micro-batch: the last call counts
        return gradient if name.startswith("layers.0") else gradient + 1

    seen = {}
    for step in range(1, 65):
        seen |= reductions(train(model, optimizer, meter, step, local=twice)[0])
    assert {name for name, unchanged in seen.items() if unchanged} == {
        "layers.0.weight", "layers.0.bias"
    }  # fmt: skip


def test_gradients_that_nobody_reduces_count_as_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters())
    mine = model[1].weight
    meter = StateMeter(model, optimizer, replicated=True, reduces=lambda p: p is not mine)
    seen = {}
    for step in range(4):
        meter.begin_step(step)
        model(torch.ones(1, 4)).sum().backward()
        meter.see_reduced()  # no local gradient was ever seen
        seen |= reductions(meter.collect().read()[0])
    assert seen == {"0.weight": False, "0.bias": False, "1.weight": True, "1.bias": False}


def test_the_scale_between_reduction_and_optimizer():
    model, optimizer, meter = make()
    _, values = train(model, optimizer, meter, 0)
    assert values["applied_scale"] == 1.0
    assert values["reduced_digest"] == values["applied_digest"]

    def clip():
        for parameter in model.parameters():
            parameter.grad *= 0.25

    _, values = train(model, optimizer, meter, 1, between=clip)
    assert values["applied_scale"] == pytest.approx(0.25)
    assert values["reduced_digest"] != values["applied_digest"]
    meter.begin_step(2)  # a scaler skips the optimizer's call
    meter.see_reduced()
    meter.see_state()
    state, values = meter.collect().read()
    assert not {"applied_scale", "applied_digest"} & values.keys()
    assert set(of(state, StateKind.APPLIED).values()) == {0}
    assert of(state, StateKind.APPLIED).keys() == of(state, StateKind.PARAMETER).keys()


@pytest.mark.parametrize(
    ("reduced", "applied", "found"),
    [
        ([4.0, 1.0, 9.0, 0.0], [1.0, 0.25, 81.0, 0.0], (6.0, (2,))),
        ([1.0] * 5, [1.0, 1.0, 9.0, 1.0, 0.25], (3.0, (2, 4))),
        ([1.0] * 5, [1.0, 1.0, 2.25, 1.0, 0.0], (0.0, (4,))),
        ([1.0] * 5, [4.0] * 5, (1.0, ())),
        ([1.0] * 5, [4.0, 4.0, 16.0, 4.0, 1.44], (2.0, (2, 4))),
        ([1.0] * 6, [4.0, 4.0, 16.0, 4.0, 1.44, 9.0], (math.nan, ())),
        ([1.0] * 2, [1.0, 4.0], (math.nan, ())),
    ],
)
def test_of_several_factors_the_one_furthest_from_that_of_most_is_told(reduced, applied, found):
    factor, odd = odd_factors(reduced, applied)
    assert (factor, odd) == (pytest.approx(found[0], nan_ok=True), found[1])


def test_missing_and_sparse_gradients():
    model = nn.ModuleDict({"a": nn.Embedding(50, 4, sparse=True), "b": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model.parameters())
    meter = StateMeter(model, optimizer, replicated=True)
    results = []
    for step in range(4):
        optimizer.zero_grad()
        model["a"](torch.tensor([3, step % 2])).sum().backward()
        meter.begin_step(step)
        meter.see_reduced()
        meter.see_applied()
        results.append(meter.collect().read())
    digests = [of(state, StateKind.REDUCED) for state, _ in results]
    assert digests[0] == digests[2]
    assert digests[0]["a.weight"] != digests[1]["a.weight"]
    assert digests[0]["b.weight"] == digests[0]["b.bias"] == 0
    assert results[0][1]["applied_scale"] == 1.0


def test_parameters_with_one_owner_are_not_compared():
    model, optimizer, _ = make()
    meter = StateMeter(model, optimizer, replicated=False)
    state, values = train(model, optimizer, meter, 0)
    assert set(state.kinds) == {StateKind.STATISTICS}
    assert values.keys() == {"state_layout", "buffer_digest"}
    assert set(state.names) == {name for name, _ in model.named_buffers()}


def test_without_an_optimizer_what_it_does_is_unknown():
    model, optimizer, _ = make()
    meter = StateMeter(model, None, replicated=True)
    state, values = train(model, optimizer, meter, 0)
    assert set(state.kinds) == {StateKind.PARAMETER, StateKind.REDUCED, StateKind.STATISTICS}
    assert values.keys() == {"state_layout", "param_digest", "reduced_digest", "buffer_digest"}


def test_frozen_parameters_are_compared_by_themselves():
    model, _, meter = make()
    model.layers.requires_grad_(False)
    kinds = {}
    for step in range(64):
        state, _ = look(meter, step)
        for kind, name in zip(state.kinds, state.names, strict=True):
            kinds.setdefault(name, set()).add(kind)
    assert kinds["layers.0.weight"] == {StateKind.PARAMETER}
    assert kinds["norm.weight"] == set(KINDS)


def test_adapters_and_replaced_parameters_enter_at_the_next_rotation():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    meter = StateMeter(model, optimizer, replicated=True)
    (before, old), (_, unchanged) = look(meter, 0), look(meter, 1)
    assert old["state_layout"] == unchanged["state_layout"]
    assert of(before, StateKind.OPTIMIZER) == {"0.weight": 0, "0.bias": 0}
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    optimizer.add_param_group({"params": [model[0].weight]})
    model.append(nn.Linear(4, 2))
    (after, new) = look(meter, 2)
    assert set(after.names) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert new["state_layout"] != old["state_layout"]
    assert of(after, StateKind.OPTIMIZER)["1.weight"] == 0, "another worker's optimizer may hold it"
    expected = digest_bits(torch.ones(4, 4)).known % 2**64
    assert of(after, StateKind.PARAMETER)["0.weight"] % 2**64 == expected


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_parameters_without_a_shape_as_yet_are_listed():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    meter = StateMeter(model, None, replicated=True)
    state, before = look(meter, 0)
    assert set(state.names) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    model(torch.ones(2, 3))
    assert look(meter, 0)[1]["state_layout"] != before["state_layout"]


def test_optimizer_state_of_all_kinds_counts():
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    meter = StateMeter(model, optimizer, replicated=True)
    found = set()
    states = [
        None, {}, {"a": 1}, {"a": 2}, {"b": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": [1, 2]},
        {"a": [2, 1]}, {"a": {"b": 1}}, {"a": torch.ones(3)}, {"a": torch.ones(2)},
        {"a": torch.ones(3), "b": torch.tensor(4.0)}, {"a": torch.ones(3), "b": torch.tensor(5.0)},
        {"a": object()},
    ]  # fmt: skip
    for state in states:
        if state is not None:
            optimizer.state[model.weight] = state
        for _ in range(2):
            found.add(of(look(meter, 0)[0], StateKind.OPTIMIZER)["weight"])
    assert len(found) == len(states)
    optimizer.state[model.weight] = {"b": 1, "a": 2}
    one = look(meter, 0)[1]["optimizer_digest"]
    optimizer.state[model.weight] = {"a": 2, "b": 1}
    assert look(meter, 0)[1]["optimizer_digest"] == one


def test_looking_at_the_optimizer_creates_no_state():
    _, optimizer, meter = make()
    for step in range(64):
        look(meter, step)
    assert len(optimizer.state) == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_state_that_an_optimizer_shards_is_not_compared():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Model()
        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        meter = StateMeter(model, sharded, replicated=True)
        state, values = train(model, sharded, meter, 0)
    finally:
        dist.destroy_process_group()
    assert StateKind.OPTIMIZER not in state.kinds
    assert "optimizer_digest" not in values
    assert StateKind.APPLIED in state.kinds


def test_nothing_that_cannot_be_read_raises_and_it_is_told(monkeypatch, caplog):
    class Stubborn:
        param_groups = ()

        @property
        def state(self):
            raise RuntimeError("sharded elsewhere")

    model, optimizer, _ = make()
    stubborn = Stubborn()
    stubborn.param_groups = optimizer.param_groups
    meter = StateMeter(model, stubborn, replicated=True)
    state, values = look(meter, 0)
    assert values.keys() >= {"param_digest", "optimizer_digest"}
    monkeypatch.setattr(
        readings, "lies_in_memory", lambda *_: (_ for _ in ()).throw(RuntimeError("no bits"))
    )
    state, _ = train(model, optimizer, meter, 1)
    assert len(set(of(state, StateKind.PARAMETER).values())) == 1
    broken = StateMeter(None, optimizer, replicated=True)
    state, values = look(broken, 0)
    assert state.names == ()
    assert values == {}
    told, about_the_model = [record.getMessage() for record in caplog.records]  # once a meter
    assert told.endswith("is not compared between workers: RuntimeError: sharded elsewhere")
    assert "between workers: AttributeError" in about_the_model


def test_a_step_that_is_cut_short_leaves_nothing_behind():
    _, _, meter = make()
    assert meter.collect().read()[1] == {}
    meter.begin_step(0)
    meter.see_reduced()
    state, values = meter.collect().read()
    assert set(state.kinds) == {StateKind.REDUCED, StateKind.APPLIED}
    assert values.keys() == {"state_layout", "reduced_digest"}
    assert meter.collect().read()[0].names == ()
    meter.begin_step(1)
    meter.see_state()
    meter.begin_step(1)
    assert set(meter.collect().read()[0].kinds) == {StateKind.REDUCED, StateKind.APPLIED}


def test_digests_that_a_device_still_computes_give_the_same(monkeypatch):
    """As on an accelerator: numbers stay tensors until they are read."""

    def results():
        model, optimizer, meter = make()

        def clip():
            for parameter in model.parameters():
                parameter.grad *= 0.5

        return [train(model, optimizer, meter, step, between=clip) for step in range(20)]

    expected = results()

    def pending(tensor, *part):
        known = torch.tensor(signed(digest_bits(tensor, *part).known))
        return PendingDigest(5, [(1, known), (-5, torch.tensor(1))])

    squares = readings._squares
    monkeypatch.setattr(readings, "lies_in_memory", lambda _: False)
    monkeypatch.setattr(readings, "digest_bits", pending)
    monkeypatch.setattr(readings, "_squares", lambda *part: map(torch.tensor, squares(*part)))
    for (state, values), (known, known_values) in zip(results(), expected, strict=True):
        assert state.kinds == known.kinds
        np.testing.assert_array_equal(state.digests_D, known.digests_D)
        np.testing.assert_array_equal(state.unchanged_D, known.unchanged_D)
        scale = known_values.pop("applied_scale", 0.0)
        assert values.pop("applied_scale", 0.0) == pytest.approx(scale)
        assert values == known_values


def _shrink(tensor):
    tensor.untyped_storage().resize_(4)


def _free(tensor):
    tensor.untyped_storage().resize_(0)


def _transpose(tensor):
    tensor.data = tensor.data.clone().t()


def _replace(tensor):
    tensor.data = torch.full((3, 5), 2.0)


def _turn_about(tensor):
    tensor.data = tensor.data.t()


CHANGES = {
    "gradients anew": lambda m, o: [setattr(p, "grad", p.grad.clone()) for p in m.parameters()],
    "gradient gone": lambda m, o: setattr(m.weight, "grad", None),
    "gradient transposed": lambda m, o: _transpose(m.weight.grad),
    "gradient transposed in place": lambda m, o: _turn_about(m.weight.grad),
    "gradient sparse": lambda m, o: setattr(m.weight, "grad", m.weight.grad.to_sparse()),
    "gradient of another size": lambda m, o: _replace(m.weight.grad),
    "gradient freed": lambda m, o: _free(m.weight.grad),
    "gradient cut off": lambda m, o: _shrink(m.weight.grad),
    "parameter replaced": lambda m, o: setattr(m, "weight", nn.Parameter(torch.ones(4, 4))),
    "parameter of another type": lambda m, o: m.double(),
    "parameter gone": lambda m, o: setattr(m, "weight", None),
    "state of another size": lambda m, o: _replace(o.state[m.weight]["exp_avg"]),
    "state loaded": lambda m, o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "state forgotten": lambda m, o: o.state.clear(),
    "state has more": lambda m, o: o.state[m.weight].update(more=torch.ones(2)),
    "state is called otherwise": lambda m, o: o.state.update(
        {m.weight: dict(zip("abc", o.state[m.weight].values(), strict=True))}
    ),
    "state is a number": lambda m, o: o.state[m.weight].update(exp_avg=3.0),
    "state freed": lambda m, o: _free(o.state[m.weight]["exp_avg"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_between_two_steps_of_a_turn_is_read_as_it_is(change):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    meter = StateMeter(model, optimizer, replicated=True, num_slots=1)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    moments = ("see_locals", "see_reduced", "see_applied", "see_state")

    def seen(meter, step):
        shown = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        meter.begin_step(step)
        for moment in moments:
            getattr(meter, moment)(*([shown] if moment == "see_locals" else []))
        return meter.collect().read()

    seen(meter, 0)
    seen(meter, 1)
    with torch.no_grad():
        change(model, optimizer)
    for step in (2, 3):
        (found, values), (state, expected) = (
            seen(each, step)
            for each in (meter, StateMeter(model, optimizer, replicated=True, num_slots=1))
        )
        assert found.names == state.names
        np.testing.assert_array_equal(found.digests_D, state.digests_D)
        np.testing.assert_array_equal(found.unchanged_D, state.unchanged_D)
        assert values == expected


def test_as_long_as_tensors_are_alike_they_are_not_looked_at_one_by_one(monkeypatch):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    meter = StateMeter(model, optimizer, replicated=True, num_slots=1)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state, values = look(meter, 0)
    monkeypatch.setattr(readings, "lies_in_memory", None)  # to call it raises
    again, same = look(meter, 1)
    np.testing.assert_array_equal(again.digests_D, state.digests_D)
    assert same == values


def test_nothing_that_is_read_again_and_again_is_held():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    meter = StateMeter(model, optimizer, replicated=True)
    for step in range(3):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        look(meter, step)
    held = [model.weight, model.weight.grad, optimizer.state[model.weight]["exp_avg"]]
    gone = [weakref.ref(tensor.untyped_storage()) for tensor in held]
    references = [weakref.ref(tensor) for tensor in held]
    optimizer.state.clear()
    optimizer.param_groups.clear()
    del held, model.weight
    assert [reference() for reference in references] == [None] * 3
    assert [reference() for reference in gone] == [None] * 3


def test_the_training_keeps_all_its_bits():
    outcomes = []
    for watched in (False, True):
        model, optimizer, meter = make()
        for number in (random, np.random):
            number.seed(0)
        idle = StateMeter(nn.Module(), None, replicated=True)
        for step in range(12):
            train(model, optimizer, meter if watched else idle, step)
        tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
        for parameter in model.parameters():
            tensors += optimizer.state[parameter].values()
        tensors.append(torch.get_rng_state())
        outcomes.append((copy.deepcopy(tensors), random.getstate(), np.random.get_state()[1]))  # noqa: NPY002
    (plain, *plain_rng), (seen, *seen_rng) = outcomes
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert plain_rng[0] == seen_rng[0]
    np.testing.assert_array_equal(plain_rng[1], seen_rng[1])
