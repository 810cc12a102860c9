"""Traces against their definition, written out in float64, and what two of them tell of a pair."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from rankscope.bus.probe import StepEnd
from rankscope.bus.replicas import TRACE_WIDTH, StateKind
from rankscope.evidence.state.trace import TraceMeter, TraceReader
from rankscope.gradients.digest import digest_tensor
from rankscope.gradients.sketch import DEFAULT_WIDTH
from support.sketch_oracle import first_position, truth

CPU = torch.device("cpu")
P, R = StateKind.PARAMETER, StateKind.REDUCED


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@functools.cache
def reader():
    return TraceReader(CPU)


def read(*tensors, name="w", kind=P):
    return reader().read((kind, name, tensor) for tensor in tensors).read()


def expected_sketch(name, tensor):
    first = first_position(name, 0, DEFAULT_WIDTH)
    wide = truth(name, 0, tensor, DEFAULT_WIDTH, start=first).sketch
    coins = torch.randint(2, (DEFAULT_WIDTH,), generator=torch.Generator().manual_seed(0))
    sketch = np.zeros(TRACE_WIDTH)
    np.add.at(sketch, np.arange(DEFAULT_WIDTH) % TRACE_WIDTH, wide * (2 * coins.numpy() - 1))
    return sketch


TENSORS = {
    "matrix": random(70, 130),
    "bfloat16": random(300, dtype=torch.bfloat16),
    "transposed": random(90, 40).T,
    "more than a piece": random((1 << 18) + 77),
    "integers": torch.arange(-4, 5),
}


@pytest.mark.parametrize("what", TENSORS)
def test_every_number_is_what_its_definition_says(what):
    tensor = TENSORS[what]
    trace = read(tensor)
    assert (trace.kinds, trace.names, trace.initial) == ((P,), ("w",), None)
    assert trace.digests_N.tolist() == [int(digest_tensor(tensor))]
    length = float(tensor.double().norm())
    assert trace.norms_N[0] == pytest.approx(length, rel=1e-6)
    assert trace.sketches_NK.shape == (1, TRACE_WIDTH)
    expected = expected_sketch("w", tensor)
    np.testing.assert_allclose(trace.sketches_NK[0], expected, atol=1e-6 * length)


def distance(a, b, name):
    one, other = read(a, name=name), read(b, name=name)
    return float(np.linalg.norm(one.sketches_NK.astype(float) - other.sketches_NK))


@pytest.mark.parametrize(("size", "share"), [(40, 1e-1), (3000, 1e-5)])
def test_the_distance_of_two_runs_follows_from_their_sketches(size, share):
    tensor = random(size)
    ratios = []
    for seed in range(1, 7):
        moved = (tensor.double() + share * random(size, seed=seed).double()).float()
        true = float((moved.double() - tensor.double()).norm())
        ratios.append(distance(tensor, moved, f"layers.{seed}.weight") / true)
    assert np.abs(np.array(ratios) - 1).max() < 0.33  # one tensor: 61 numbers err by 9 %
    assert abs(math.sqrt(np.mean(np.square(ratios))) - 1) < 0.15  # many: less


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def test_what_cannot_be_read_spoils_its_own_row_alone():
    meta = torch.empty(3, device="meta")
    bad = [meta, freed(random(9)), freed(random(9, 3).T), nn.UninitializedParameter()]
    trace = read(*bad, random(3), torch.tensor([True, False]))
    assert np.isnan(trace.norms_N).tolist() == [True] * 4 + [False] * 2


def test_a_tensor_may_change_at_once():
    tensor = random(100)
    expected = read(tensor.clone())
    pending = reader().read([(P, "w", tensor)])
    tensor.zero_()
    np.testing.assert_array_equal(pending.read().sketches_NK, expected.sketches_NK)


def traced_after(num_updates):
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trained = dict(model.named_parameters())
    meter = TraceMeter(model, trained, CPU, optimizer, every=1, leave_out=lambda seconds: None)
    for number in range(num_updates + 1):
        if number == num_updates:
            meter.begin_step(number, paused=False)
        model(random(8, 6, seed=number)).square().sum().backward()
        optimizer.step()
    end = StepEnd(num_updates, comparable=True, idle=frozenset(), num_passes=1)
    return meter.collect(end).copies[0].read()


def test_an_optimizer_that_was_loaded_is_digested_at_the_start():
    traces = [traced_after(num_updates) for num_updates in (1, 1, 2)]
    rows = [n for n, kind in enumerate(traces[0].kinds) if kind is StateKind.OPTIMIZER]
    assert {traces[0].names[row] for row in rows} == {"weight", "bias"}
    first, again, other = (trace.digests_N[rows] for trace in traces)
    assert (first == again).all()
    assert (first != other).all()
    assert np.isnan(traces[0].norms_N[rows]).all()
