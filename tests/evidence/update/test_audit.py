"""Updates that are computed again, against what the optimizers themselves do; and what is found."""

import copy
import math

import pytest
import torch
from torch import nn

from rankscope.evidence.update.audit import MOST, UpdateAudit, choose
from rankscope.evidence.update.compare import UpdateMismatch, UpdateShare, judge_update
from rankscope.evidence.update.probe import _names

SHAPES = {"embedding": (30, 8), "matrix": (8, 8), "norm": (8,)}


class Plain(torch.optim.Optimizer):
    """Gradient descent by a rule for all parameters of a group at once."""

    def __init__(self, parameters, rule, **more):
        super().__init__(parameters, {"lr": 0.1, **more})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.rule(self, group["params"], group["lr"])


def by_norm_of_all(optimizer, parameters, lr):
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    for parameter in parameters:
        parameter.sub_(lr * parameter.grad / norm)


def by_place(optimizer, parameters, lr):
    for place, parameter in enumerate(parameters):
        parameter.sub_(lr * 0.9**place * parameter.grad)


def by_identity(optimizer, parameters, lr):
    for parameter in parameters:
        parameter.sub_(lr * optimizer.rates.get(id(parameter), 1.0) * parameter.grad)


def by_trust(optimizer, parameters, lr):
    for parameter in parameters:
        parameter.sub_(lr * parameter.norm() / parameter.grad.norm() * parameter.grad)


def to_all_it_knows(optimizer, parameters, lr):
    for parameter in optimizer.every:
        parameter.sub_(lr)


def at_random(optimizer, parameters, lr):
    """Round to bfloat16 at random, without a bias."""
    for parameter in parameters:
        moved = (parameter.float() - lr * parameter.grad.float()).view(torch.int32)
        moved += torch.randint(2**16, moved.shape, dtype=torch.int32)
        parameter.copy_((moved & -(2**16)).view(torch.float32))


def train(make, change=None, *, dtype=torch.float32, steps=4, optimizer=None):
    """Train some parameters, audit the last step, and return the verdict and the share."""
    torch.manual_seed(0)
    named = {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in SHAPES.items()}
    optimizer = make(list(named.values()))
    for group in optimizer.param_groups:
        group.setdefault("weight_decay", 0.0)
    audit = None
    for step in range(steps):
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape).to(dtype)
        if step == steps - 1:
            names = {id(parameter): name for name, parameter in named.items()}
            audit = UpdateAudit(step, [optimizer], names, {}, None)
            seen = _everything(named, optimizer)
            audit.before(optimizer)
            assert _everything(named, optimizer) == seen  # of the training, all bits stay
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        optimizer.step()
        if change is not None:
            with torch.no_grad():
                change({name: (p, before[name]) for name, p in named.items()})
    audit.after(optimizer)
    share = UpdateShare.unpack(audit.share().pack())
    return judge_update([share]), share


def _everything(named, optimizer):
    held = [copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()]
    held += [(name, p.detach().clone(), p.grad.clone()) for name, p in named.items()]
    return repr([_plain(one) for one in held])


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


HEALTHY = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, 0.01),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, 0.01, foreach=True),
    "AdamW, rate in a tensor": lambda ps: torch.optim.AdamW(ps, torch.tensor(0.01)),
    "Adam, amsgrad": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True, weight_decay=0.1),
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, 0.01),
    "Muon": lambda ps: torch.optim.Muon(ps[:2], 0.01),
    "NAdam": lambda ps: torch.optim.NAdam(ps, 0.01),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.01),
    "by trust": lambda ps: Plain(ps, by_trust),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_sound_update_is_computed_again_bit_by_bit(kind):
    verdict, share = train(HEALTHY[kind])
    assert not share.declined
    assert len(verdict.compared) == (2 if kind == "Muon" else 3)
    assert (verdict.odd, verdict.unseen, verdict.error) == ((), (), 0.0)


def test_rounding_at_random_is_sound_and_a_wrong_rate_beside_it_is_not():
    verdict, share = train(lambda ps: Plain(ps, at_random), dtype=torch.bfloat16)
    assert (verdict.odd, share.declined) == ((), {})

    def faster(named):
        parameter, before = named["embedding"]
        parameter.copy_(before + 6 * (parameter.float() - before.float()))

    verdict, _ = train(lambda ps: Plain(ps, at_random), faster, dtype=torch.bfloat16)
    assert [one.name for one in verdict.odd] == ["embedding"]


def test_updates_below_half_an_ulp_are_counted():
    def make(ps):
        return torch.optim.SGD(ps, 1e-6)

    verdict, _ = train(make, dtype=torch.bfloat16)
    assert dict(verdict.resting)["norm"] == 1.0
    assert verdict.odd == ()


DECLINED = {
    "the norm of all": (by_norm_of_all, "depends on the others"),
    "the place": (by_place, "depends on the others"),
    "other tensors": (to_all_it_knows, "changes other tensors"),
}


@pytest.mark.parametrize("kind", DECLINED)
def test_an_optimizer_that_couples_parameters_is_declined(kind):
    rule, why = DECLINED[kind]

    def make(ps):
        optimizer = Plain(ps, rule)
        optimizer.every = ps
        return optimizer

    verdict, share = train(make)
    assert why in share.declined["Plain"]
    assert verdict.odd == verdict.compared == ()


def test_an_optimizer_inside_another_is_declined():
    def make(ps):
        optimizer = Plain(ps, by_trust)
        optimizer.inner = [torch.optim.SGD(ps, 0.1)]
        return optimizer

    _, share = train(make)
    assert share.declined["Plain"] == "it wraps another optimizer"


def test_settings_by_identity_belong_to_the_copy_too():
    def make(ps):
        optimizer = Plain(ps, by_identity)
        optimizer.rates = {id(p): 0.5**n for n, p in enumerate(ps)}
        return optimizer

    verdict, share = train(make)
    assert not share.declined
    assert (len(verdict.compared), verdict.odd) == (3, ())


def scaled(named):
    parameter, before = named["matrix"]
    parameter.copy_(before + 1.5 * (parameter - before))


def decayed(named):
    for parameter, _ in named.values():
        parameter.mul_(1 - 0.01 * 0.01)


def undone(named):
    parameter, before = named["norm"]
    parameter.copy_(before)


def without_rows(named):
    parameter, before = named["embedding"]
    parameter[:6] = before[:6]


def turned(named):
    parameter, before = named["matrix"]
    parameter.copy_(before + (parameter - before).T)


FAULTS = {
    "scaled": (scaled, ["matrix"], UpdateMismatch.SCALE, 1.5),
    "decayed twice": (decayed, list(SHAPES), UpdateMismatch.DECAY, 1.0),
    "undone": (undone, ["norm"], UpdateMismatch.NONE, 0.0),
    "some rows": (without_rows, ["embedding"], UpdateMismatch.ROWS, 0.2),
    "another direction": (turned, ["matrix"], UpdateMismatch.CHANGED, math.nan),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_wrong_update_is_found_and_described(kind):
    change, names, how, factor = FAULTS[kind]
    verdict, _ = train(lambda ps: torch.optim.AdamW(ps, 0.01), change)
    assert [one.name for one in verdict.odd] == names
    assert {one.how for one in verdict.odd} == {how}
    for one in verdict.odd:
        assert one.factor == pytest.approx(factor, rel=0.02, nan_ok=True)
    assert set(verdict.compared) == set(SHAPES).difference(names)


def test_a_rate_that_a_step_changes_on_its_way_is_found_for_the_groups_after_it():
    def halving(optimizer, parameters, lr):
        for parameter in parameters:
            parameter.sub_(lr * parameter.grad)
        lr.mul_(0.5)  # the same tensor in all groups

    def make(ps):
        rate = torch.tensor(0.1)
        groups = [{"params": ps[:1], "lr": rate}, {"params": ps[1:], "lr": rate}]
        return Plain(groups, halving)

    verdict, _ = train(make, steps=1)
    assert verdict.compared == ("embedding",)
    assert [(one.name, one.how, round(one.factor, 5)) for one in verdict.odd] == [
        ("matrix", UpdateMismatch.SCALE, 0.5),
        ("norm", UpdateMismatch.SCALE, 0.5),
    ]


def test_master_weights_that_are_not_copied_back_are_found():
    torch.manual_seed(0)
    model = {name: nn.Parameter(torch.randn(4, 4).bfloat16()) for name in ("first", "second")}
    masters = {name: p.detach().float().requires_grad_() for name, p in model.items()}
    optimizer = torch.optim.AdamW(masters.values(), 0.1)
    names, copies = _names(model, [optimizer])
    assert names[id(masters["second"])] == "second"
    audit = UpdateAudit(0, [optimizer], names, copies, None)
    for master in masters.values():
        master.grad = torch.randn(4, 4)
    audit.before(optimizer)
    optimizer.step()
    audit.after(optimizer)
    with torch.no_grad():
        model["first"].copy_(masters["first"])
    verdict = judge_update([audit.share()])
    assert [(one.name, one.how) for one in verdict.odd] == [("second", UpdateMismatch.NOT_COPIED)]


def test_weights_that_move_before_the_update_or_after_it_are_told_apart():
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, 0.1)
    audit = UpdateAudit(0, [optimizer], dict(zip(map(id, parameters), "ab", strict=True)), {}, None)
    for parameter in parameters:
        parameter.grad = torch.randn(4, 4)
    with torch.no_grad():
        parameters[0].add_(0.1)
    audit.before(optimizer)
    optimizer.step()
    audit.after(optimizer)
    with torch.no_grad():
        parameters[1].mul_(1.5)
    verdict = judge_update([audit.share()])
    assert [(one.name, one.how) for one in verdict.odd] == [("a", UpdateMismatch.MOVED)]
    assert [name for name, _ in verdict.later] == ["b"]


def test_parameters_of_a_large_model_are_chosen_in_turn_one_of_each_kind():
    blocks = [nn.Parameter(torch.empty(2**11, 2**10)) for _ in range(4)]
    norms = [nn.Parameter(torch.empty(2**10)) for _ in range(4)]
    optimizer = torch.optim.SGD([*blocks, *norms], 0.1)
    names = {
        id(p): f"{kind}{n}" for kind in "bn" for n, p in enumerate({"b": blocks, "n": norms}[kind])
    }
    drawn = [[one.name for one in choose(optimizer, names, turn)[0]] for turn in range(5)]
    assert drawn == [[f"n{n}", f"b{n}"] for n in (0, 1, 2, 3, 0)]
    apart = torch.optim.SGD([nn.Parameter(torch.empty(2**11 + n, 2**10)) for n in range(12)], 0.1)
    first, second = ([one.parameter.shape[0] for one in choose(apart, {}, t)[0]] for t in (0, 1))
    assert len(first) == len(second) == MOST
    assert len({*first, *second}) == 12
