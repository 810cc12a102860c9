"""How a model's state is dealt out to the slots of a cycle."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rankscope.bus.replicas import StateKind
from rankscope.evidence.state.meter import StateMeter
from rankscope.evidence.state.plan import DigestSchedule, survey
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
    total = 4 * (sum(sizes) + sum(buffers))
    assert max(sum(i.bytes for i in items) for items in slots) <= 4 * max(
        total / num_slots, 1 << 18
    )


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
