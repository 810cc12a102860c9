import io
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from rankscope.evidence.update.audit import UpdateAudit
from rankscope.evidence.update.compare import UpdateMismatch, UpdateShare, judge_update
from rankscope.evidence.update.director import in_words

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


def train(make, name=None, change=None, *, dtype=torch.float32, steps=4):
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
                named[name].copy_(change(named[name], before[name]))
    audit.after(optimizer)
    share = UpdateShare.unpack(audit.share().pack())
    return judge_update([share]), share


def _everything(named, optimizer):
    kept, gradients = io.BytesIO(), [parameter.grad for parameter in named.values()]
    torch.save([named, gradients, optimizer.state_dict(), torch.get_rng_state()], kept)
    return kept.getvalue()


HEALTHY = {
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, 0.01, foreach=True),
    "Adam, amsgrad": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True, weight_decay=0.1),
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, 0.01),
    "Muon": lambda ps: torch.optim.Muon(ps[:2], 0.01),
    "by trust": lambda ps: Plain(ps, by_trust),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_sound_update_is_computed_again_bit_by_bit(kind):
    verdict, share = train(HEALTHY[kind])
    assert not share.declined
    assert len(verdict.compared) == (2 if kind == "Muon" else 3)
    assert (verdict.odd, verdict.unseen, verdict.error) == ((), (), 0.0)
    parts = tuple(replace(share.parts[0], name=f"part {number}") for number in range(8))
    for total, said in ((68, "8 of 68 parameters were compared. Of one"), (8, "8 of 8 parameters")):
        many = replace(share, parts=parts, num_parameters=total)
        [found] = in_words(judge_update([many]), [many], 5)
        assert said in found.explanation
        assert ("of one" in found.explanation.lower()) == (total > 8)


def test_rounding_at_random_is_sound_and_a_wrong_rate_beside_it_is_not():
    verdict, share = train(lambda ps: Plain(ps, at_random), dtype=torch.bfloat16)
    assert (verdict.odd, share.declined) == ((), {})

    def faster(new, old):
        return old + 6 * (new.float() - old.float())

    verdict, _ = train(lambda ps: Plain(ps, at_random), "embedding", faster, dtype=torch.bfloat16)
    assert [one.name for one in verdict.odd] == ["embedding"]


@pytest.mark.parametrize(
    ("rule", "why"),
    [(by_norm_of_all, "depends on the others"), (to_all_it_knows, "changes other tensors")],
)
def test_an_optimizer_that_couples_parameters_is_declined(rule, why):
    def make(ps):
        optimizer = Plain(ps, rule)
        optimizer.every = ps
        return optimizer

    verdict, share = train(make)
    assert why in share.declined["Plain"]
    assert verdict.odd == verdict.compared == ()


@pytest.mark.parametrize(
    ("name", "how", "factor", "change"),
    [
        ("matrix", UpdateMismatch.SCALE, 1.5, lambda new, old: old + 1.5 * (new - old)),
        ("norm", UpdateMismatch.NONE, 0.0, lambda new, old: old),
        ("embedding", UpdateMismatch.ROWS, 0.2, lambda new, old: torch.cat([old[:6], new[6:]])),
        ("matrix", UpdateMismatch.CHANGED, math.nan, lambda new, old: old + (new - old).T),
    ],
)
def test_a_wrong_update_is_found_and_described(name, how, factor, change):
    verdict, _ = train(lambda ps: torch.optim.AdamW(ps, 0.01), name, change)
    [odd] = verdict.odd
    assert (odd.name, odd.how) == (name, how)
    assert odd.factor == pytest.approx(factor, rel=0.02, nan_ok=True)
    assert {name, *verdict.compared} == set(SHAPES)
