"""The gap between trainer and rollout: a mean over the tokens that count, and what has none."""

import logging
import math

import numpy as np
import pytest
import torch

from rankscope.bus.probe import StepEnd
from rankscope.evidence.rollouts.probe import RolloutProbe

END = StepEnd(0, True, frozenset(), 1)


def read(meter):
    gaps = meter.collect(END)
    assert gaps.ready
    return {name: value for name, value in gaps.read().values.items() if not math.isnan(value)}


def test_the_gap_is_the_mean_over_the_tokens_of_all_micro_batches():
    """Against a naive mean in float64; a later change of the tensors changes nothing."""
    generator = torch.Generator().manual_seed(0)
    meter, total, count = RolloutProbe(), 0.0, 0
    for width in (3, 7, 12):
        trainer = torch.randn(4, width, generator=generator).to(torch.bfloat16).requires_grad_()
        rollout = torch.randn(4, width, generator=generator)
        mask = torch.rand(4, width, generator=generator) < 0.6
        meter.give_rollout(trainer, rollout, mask.long())
        apart = np.abs(trainer.detach().double().numpy() - rollout.double().numpy())
        total, count = total + apart[mask.numpy()].sum(), count + int(mask.sum())
        rollout.zero_()
    assert read(meter) == {"rollout_gap": pytest.approx(total / count, rel=1e-6)}
    assert meter.collect(END) is None


def test_tokens_without_a_finite_value_do_not_count():
    """vLLM gives none where it could not score a token; without any there is no gap."""
    nan, inf = math.nan, math.inf
    meter = RolloutProbe()
    meter.give_rollout(
        torch.tensor([-1.0, -2.0, -3.0, -inf]), torch.tensor([-1.5, nan, -3.25, -inf])
    )
    assert read(meter) == {"rollout_gap": 0.375}
    meter.give_rollout(torch.tensor([-1.0]), torch.tensor([nan]))
    assert read(meter) == {}
    meter.give_rollout(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([False]))
    assert read(meter) == {}


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ((torch.zeros(2, 3), torch.zeros(2, 4)), "the shapes (2, 3), (2, 4)"),
        ((torch.zeros(2, 3), [[-1.0], [-2.0]]), "a value of type list"),
        ((torch.zeros(2), torch.zeros(2).to_sparse()), "not at hand"),
    ],
)
def test_what_cannot_be_compared_is_declined_in_one_line(given, what, caplog):
    meter = RolloutProbe()
    with caplog.at_level(logging.WARNING, "rankscope"):
        meter.give_rollout(*given)
        meter.give_rollout(*given)
    (line,) = caplog.messages
    assert what in line
    assert meter.collect(END) is None
