from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rankscope.agent.host_summary import as_columns
from rankscope.bus.finding import Severity
from rankscope.bus.messages import HeldValues, Layout
from rankscope.bus.probe import Job
from rankscope.bus.step import StepReport
from rankscope.evidence.optimizer import KEY, updates
from rankscope.evidence.optimizer.probe import (
    WINDOW,
    AutocastCheck,
    CopiesBefore,
    MissedGradients,
    OptimizerProbe,
    RestMeter,
)
from support.stepping import evidence_of, named_message, words
from support.streams import gathered


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(8, dtype=dtype) for _ in range(3))
        self.last = nn.Linear(8, 8, dtype=dtype)


def told(detector, number, **held):
    rows = HeldValues(Layout(2), KEY).combine(as_columns([named_message(number, {KEY: held})]), {})
    return evidence_of(detector, StepReport(replace(gathered(number, [[]]), **rows), {}))


def run(dtype=torch.bfloat16, lr=1e-4, num_updates=WINDOW + 2, kind=torch.optim.AdamW, **change):
    torch.manual_seed(0)
    net = Net(dtype)
    groups = [{"params": list(net.norms.parameters())}, {"params": list(net.last.parameters())}]
    optimizer = kind(groups, lr=lr)
    optimizer.param_groups[0].update(change)
    meter, detector, found = RestMeter(net, optimizer), updates.LostUpdates(), []
    for number in range(num_updates):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.param_groups[0]["lr"] *= 1.5 if change.get("rises") else 1.0
        optimizer.step()
        pending = meter.see_update()
        if pending is not None:
            found += told(detector, number, rounded=pending.read())
    return found


def test_a_kind_that_rests_is_named_with_numbers():
    [found] = run()
    assert found.severity is Severity.WARNING
    assert found.numbers["parameters"] == 3
    assert found.numbers["half_step"] == 2**-9
    assert "All parameters of the kind RMSNorm.weight (3 parameters in bfloat16" in words(found)
    assert "have not changed in 32 updates" in words(found)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"lr": 4e-3},
        {"rises": True, "lr": 1e-9},
        {"kind": torch.optim.Adagrad},
    ],
    ids=["float32", "a larger rate", "a warm-up", "another rule"],
)
def test_what_moves_or_is_not_explained_by_rounding_is_no_finding(options):
    assert run(**options) == []


def test_a_session_begins_once_however_many_steps_pass_without_an_update():
    net = Net(torch.float32)
    optimizer = torch.optim.AdamW(net.parameters())
    probe = OptimizerProbe(Job(SimpleNamespace(module=net), optimizer))
    begun = []
    for step in range(3):
        probe.begin_step(step, paused=False)
        begun.append(probe.collect(None) is not None)
    assert begun == [True, False, False]


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("right", []),
        ("zeroed", ["found no gradient: .grad was None in all of its 5 parameters", "is learnt."]),
        ("zeroed at first", ["in a row up to step 7", "Later calls find one."]),
        ("another's parameters", ["in a row up to step 7", "None of them is a parameter of the"]),
        ("gradients elsewhere", ["in a row up to step 7", "They have gradients in main_grad"]),
        ("trained by others", []),
    ],
)
def test_an_optimizer_that_finds_no_gradient_is_named_unless_parameters_change(way, said):
    net = Net(torch.float32)
    held = Net(torch.float32) if way == "another's parameters" else net
    optimizer = torch.optim.SGD(held.parameters(), lr=0.1)
    for parameter in net.parameters() if way == "gradients elsewhere" else ():
        parameter.main_grad = torch.ones_like(parameter)
    meter, detector, found = (
        MissedGradients(net, optimizer),
        updates.OptimizerWithoutGradients(),
        [],
    )
    for number in range(10):
        if way == "right" or (way == "zeroed at first" and number == 9):
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
        meter.before_update()
        optimizer.step()
        pending = meter.see_update()
        if way == "trained by others":
            with torch.no_grad():
                net.last.bias.add_(1.0)
        if pending is not None:
            found += told(detector, number, missed=pending.read())
    assert bool(found) is bool(said)
    for one in found:
        assert (one.severity, one.first_step) == (Severity.ERROR, 0)
    text = " ".join(map(words, found))
    assert all(part in text for part in said)


def loaded_before(net, copies):
    with torch.no_grad():
        net.last.weight.add_(1.0)
        for copy, weight in zip(copies, net.parameters(), strict=True):
            copy.copy_(weight)


def loaded_after(net, copies):
    with torch.no_grad():
        net.last.weight.add_(1.0)


@pytest.mark.parametrize(
    ("load", "written_back", "said"),
    [
        (lambda net, copies: None, True, None),
        (loaded_before, True, None),
        (loaded_after, True, "1 weight of 5 (last.weight) were not what the optimizer's copies"),
        (loaded_after, False, None),  # then nothing shows whose copies they are
    ],
)
def test_weights_that_older_copies_replace_are_named(load, written_back, said):
    torch.manual_seed(0)
    net = Net(torch.bfloat16)
    copies = [nn.Parameter(weight.detach().float()) for weight in net.parameters()]
    optimizer = torch.optim.SGD(copies, lr=1e-3)
    load(net, copies)
    before = CopiesBefore(net, optimizer)
    for copy in copies:
        copy.grad = torch.randn_like(copy)
    optimizer.step()
    if written_back:
        with torch.no_grad():
            for weight, copy in zip(net.parameters(), copies, strict=True):
                weight.copy_(copy)
    names = {id(weight): name for name, weight in net.named_parameters()}
    replaced = before.see_update(names)
    assert bool(replaced) is (said is not None)
    if said is not None:
        [found] = told(updates.ReplacedWeights(), 0, replaced=replaced)
        assert found.severity is Severity.WARNING
        assert said in words(found)
    assert before.see_update(names) == {}  # of the first update alone


def test_an_optimizer_of_the_model_itself_has_no_copies():
    net = Net(torch.bfloat16)
    before = CopiesBefore(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    loaded_after(net, [])
    assert before.see_update({}) == {}


@pytest.mark.parametrize(
    ("around", "cache", "said"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_copies_that_autocast_keeps_over_updates_are_named(around, cache, said):
    """The oracle is whether a forward pass changes with the weights."""
    net = nn.Linear(4, 4)
    meter, detector, found, old = AutocastCheck(net), updates.StaleCopies(), [], False
    half = torch.autocast("cpu", torch.bfloat16, cache_enabled=cache)
    outer, inner = (half, nullcontext()) if around else (nullcontext(), half)
    inputs, before = torch.ones(2, 4), None
    with outer:
        for number in range(6):
            with inner:
                pending = meter.before_forward(number)
                outputs = net(inputs)
            old |= before is not None and torch.equal(outputs, before)
            before = outputs.detach()
            with torch.no_grad():
                net.weight.add_(1.0)
            if pending is not None:
                found += told(detector, number, stale=pending.read())
    assert old is said
    assert [one.severity for one in found] == [Severity.ERROR] * 3 * said
    assert all("used those from before the update" in words(one) for one in found)


def test_stale_copies_are_not_looked_for_where_nothing_is_updated():
    meter = AutocastCheck(nn.Linear(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert [meter.before_forward(3) for _ in range(4)] == [None] * 4
