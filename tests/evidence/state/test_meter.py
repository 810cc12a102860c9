import copy
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankscope.bus.groups import group_parameters
from rankscope.bus.replicas import StateKind, differences
from rankscope.errors import UnsupportedError
from rankscope.evidence.state import readings
from rankscope.evidence.state.meter import StateMeter
from rankscope.evidence.state.readings import PendingDigests
from rankscope.evidence.state.slot import odd_factors
from rankscope.gradients.digest import PendingDigest, digest_bits
from rankscope.gradients.kernels.bits import signed
from rankscope.gradients.sketch import NormMeter, Sketcher
from rankscope.wrappers.optimizers import JointOptimizer
from support.state import Model, look, make, of, reductions, train


@pytest.mark.parametrize(
    ("kind", "name", "fault"),
    [
        (StateKind.PARAMETER, "embed.weight[", lambda m, o: m.embed.weight[4321, 7]),
        (StateKind.STATISTICS, "norm.running_var", lambda m, o: m.norm.running_var[5]),
        (StateKind.OPTIMIZER, "embed.weight[", lambda m, o: o.state[m.embed.weight]["exp_avg"][9]),
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
        seen |= reductions(meter.take().digests()[0])
    assert seen == {"0.weight": False, "0.bias": False, "1.weight": True, "1.bias": False}


@pytest.mark.parametrize(
    ("reduced", "applied", "found"),
    [
        ([4.0, 1.0, 9.0, 0.0], [1.0, 0.25, 81.0, 0.0], (6.0, (2,))),
        ([1.0] * 5, [1.0, 1.0, 9.0, 1.0, 0.25], (3.0, (2, 4))),
        ([1.0] * 5, [1.0, 1.0, 2.25, 1.0, 0.0], (0.0, (4,))),
        ([1.0] * 5, [4.0, 4.0, 16.0, 4.0, 1.44], (2.0, (2, 4))),
        ([1.0] * 6, [4.0, 4.0, 16.0, 4.0, 1.44, 9.0], (math.nan, ())),
    ],
)
def test_of_several_factors_the_one_furthest_from_that_of_most_is_told(reduced, applied, found):
    factor, odd = odd_factors(reduced, applied)
    assert (factor, odd) == (pytest.approx(found[0], nan_ok=True), found[1])


def test_old_gradients_of_an_optimizer_that_rests_count_for_no_factor():
    """A GAN clips the generator's gradient by its norm; the discriminator's is of its own step."""
    model = nn.ModuleDict({n: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for n in "gd"})
    turns = {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in model.items()}
    meter = StateMeter(model, JointOptimizer(list(turns.values())), replicated=True, num_slots=1)
    seen = []
    for step, name in enumerate("dgdg"):
        meter.begin_step(step)
        turns[name].zero_grad()
        model[name](torch.ones(1, 4)).sum().backward()
        meter.see_reduced()
        nn.utils.clip_grad_norm_(model[name].parameters(), 0.1)
        meter.before_update(turns[name])
        turns[name].step()
        meter.after_update(turns[name], complete=True)
        pending = meter.take()
        seen.append((pending.digests()[1], pending.changed))
    assert [changed for _, changed in seen] == [()] * 4
    assert [values["applied_odd"] for values, _ in seen] == [1.0] * 4
    assert max(values["applied_spread"] for values, _ in seen) < 1e-5


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
    monkeypatch.setattr(readings, "lies_in_memory", lambda *_: [].pop())  # it raises
    state, _ = train(model, optimizer, meter, 1)
    assert len(set(of(state, StateKind.PARAMETER).values())) == 1
    state, values = look(StateMeter(None, optimizer, replicated=True), 0)
    assert state.names == ()
    assert values == {}
    told, about_the_model = [record.getMessage() for record in caplog.records]  # once a meter
    assert told.endswith("is not compared between workers: RuntimeError: sharded elsewhere")
    assert "between workers: AttributeError" in about_the_model


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


def _free(tensor):
    tensor.untyped_storage().resize_(0)


def _replace(tensor):
    tensor.data = torch.full((3, 5), 2.0)


def _turn_about(tensor):
    tensor.data = tensor.data.t()


CHANGES = {
    "gradient gone": lambda m, o: setattr(m.weight, "grad", None),
    "gradient transposed in place": lambda m, o: _turn_about(m.weight.grad),
    "gradient sparse": lambda m, o: setattr(m.weight, "grad", m.weight.grad.to_sparse()),
    "gradient freed": lambda m, o: _free(m.weight.grad),
    "parameter replaced": lambda m, o: setattr(m, "weight", nn.Parameter(torch.ones(4, 4))),
    "state of another size": lambda m, o: _replace(o.state[m.weight]["exp_avg"]),
    "state loaded": lambda m, o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "state forgotten": lambda m, o: o.state.clear(),
    "state freed": lambda m, o: _free(o.state[m.weight]["exp_avg"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_between_two_steps_of_a_turn_is_read_as_it_is(change):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    meter = StateMeter(model, optimizer, replicated=True, num_slots=1)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    moments = ("see_locals", "see_reduced", "before_update", "see_state")

    def seen(meter, step):
        shown = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        meter.begin_step(step)
        for moment in moments:
            given = {"see_locals": [shown], "before_update": [optimizer]}.get(moment, [])
            getattr(meter, moment)(*given)
        return meter.take().digests()

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


def test_parts_have_the_digests_of_single_tensors():
    base = torch.randn(70, 33)
    parts = [
        (base, 0, None), (base, 5, 700), (base.t(), 0, None), (base.bfloat16(), 1, 2),
        (base[:0], 0, None), (torch.tensor(1), 0, None), (base.to_sparse(), 0, None),
        (torch.randn(5, dtype=torch.complex64).conj(), 0, None), (base, 4000, 5000),
        (torch.nn.Parameter(base), 3, None), (torch.empty(3, device="meta"), 0, None),
    ]  # fmt: skip
    reading = PendingDigests()
    for part in parts:
        reading.add(*part)
    reading.add_word(17)
    digests, squares = reading.begin().read()
    assert digests == [*[digest_bits(*part).known % 2**64 for part in parts], 17]
    assert squares == [0.0] * len(digests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_squares(dtype):
    gradient = torch.randn(9001, dtype=dtype)
    cases = [(gradient, 0, None), (gradient, 17, 8000), (gradient.view(-1, 1).t(), 0, None)]
    cases.append((gradient[::3], 5, 2000))
    reading = PendingDigests()
    for case in cases:
        reading.add(*case, norm=True)
    _, squares = reading.begin().read()
    for (tensor, start, stop), square in zip(cases, squares, strict=True):
        exact = float(tensor.reshape(-1)[start:stop].double().square().sum())
        assert square == pytest.approx(exact, rel=1e-6)


CPU = torch.device("cpu")
FREED = "whose memory has been freed"


def free(gradient: torch.Tensor) -> torch.Tensor:
    gradient.untyped_storage().resize_(0)
    return gradient


@pytest.mark.parametrize(("meter", "transposed"), [(Sketcher, False), (NormMeter, True)])
def test_it_is_not_measured(meter, transposed):
    sketcher = meter(CPU, group_parameters(["weight"]), 1021)
    totals = sketcher.new_totals()
    for _ in range(2):  # the second time, all is prepared
        sketcher.measure("weight", torch.ones(50, 60), totals)
    freed = free(torch.ones(60, 50).t() if transposed else torch.ones(50, 60))
    with pytest.raises(UnsupportedError, match=FREED):
        sketcher.measure("weight", freed, totals)
    with pytest.raises(UnsupportedError, match=FREED):
        sketcher.measure_norms([("weight", freed)], totals)
    assert float(totals.squared_norms[0]) == 2 * 50 * 60


def test_its_norm_is_unknown_where_state_is_compared():
    model = nn.Linear(50, 60, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = StateMeter(model, optimizer, replicated=True)
    for step in range(3):
        meter.begin_step(step)
        optimizer.zero_grad()
        model(torch.ones(2, 50)).sum().backward()
        meter.see_reduced()
        if step == 1:
            free(model.weight.grad)
        meter.before_update(optimizer)
        meter.see_state()
        _, values = meter.take().digests()
        known = "applied_scale" in values and math.isfinite(values["applied_scale"])
        assert known == (step != 1)
