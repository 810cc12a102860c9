import logging
import math

import numpy as np
import pytest
import torch

from rankscope.bus.detector import RunFacts
from rankscope.bus.finding import Severity
from rankscope.bus.probe import StepEnd
from rankscope.bus.step import StepReport
from rankscope.evidence.rollouts.judge import DifferentRollouts
from rankscope.evidence.rollouts.probe import RolloutProbe
from rankscope.verdict.diagnosis import Diagnosis
from support.stepping import evidence_of
from support.streams import gathered

FIRST = 100


def report(step, gaps_W):
    return StepReport(gathered(step, [[]] * len(gaps_W), rollout_gap=gaps_W), {})


def engines(width, *, size=0.013, spread=0.3, seed=0):
    """Yield gaps as engines in bf16 have them: each step's tokens differ."""
    rng = np.random.default_rng(seed)
    while True:
        yield size * np.exp(spread * rng.standard_normal(width))


def told_of(detector, stream, steps, changed=lambda step, gaps_W: gaps_W, first=0):
    steps = range(first, first + steps)
    return evidence_of(detector, *(report(step, changed(step, next(stream))) for step in steps))


def stale(workers):
    def changed(step, gaps_W):
        if step >= FIRST:
            gaps_W[workers] *= 0.2 / 0.013
        return gaps_W

    return changed


@pytest.mark.parametrize("width", [2, 8])
def test_a_worker_with_stale_weights_is_named_within_40_steps(width):
    detector, stream = DifferentRollouts(width), engines(width)
    assert told_of(detector, stream, FIRST, stale([1])) == []
    told = told_of(detector, stream, 40, stale([1]), first=FIRST)
    assert {(one.cause, one.ranks) for one in told} == {("rollout.worker_outlier", (1,))}
    assert (told[0].severity, told[0].first_step) == (Severity.WARNING, FIRST)
    assert told[-1].numbers["gap"] == pytest.approx(0.2, rel=0.5)
    assert told[-1].numbers["others"] < 0.03


def test_a_worker_that_gets_the_weights_again_has_healed():
    def changed(step, gaps_W):
        return stale([2])(step, gaps_W) if step < FIRST + 40 else gaps_W

    told = told_of(DifferentRollouts(4), engines(4), FIRST + 140, changed)
    assert told[0].status == "open"
    assert told[-1].status == "closed"
    gaps = [one.numbers["gap"] for one in told]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 0.1


@pytest.mark.parametrize(("width", "size", "spread"), [(2, 0.013, 0.3), (4, 1e-7, 1.0)])
def test_healthy_engines_are_silent(width, size, spread):
    """Of 1,000 steps; their gaps are those of bf16, or of fp32 on one host."""
    stream = engines(width, size=size, spread=spread, seed=width)
    assert told_of(DifferentRollouts(width), stream, 1000) == []


def test_data_of_another_entropy_are_no_fault():
    """One worker's prompts make its engine differ one and a half times as much."""

    def changed(step, gaps_W):
        return gaps_W * [1, 1, 1.5, 1]

    assert told_of(DifferentRollouts(4), engines(4, spread=0.1), 1000, changed) == []


def test_a_gap_that_is_gross_on_all_workers_is_a_note_after_4_steps():
    diagnosis, stream = Diagnosis(RunFacts(4)), engines(4, spread=0.1)
    events = []
    for step in range(40):
        gaps_W = next(stream) * (20 if step >= 10 else 1)
        if step % 2 == 0:  # rollouts are drawn for two steps
            events += diagnosis.observe(report(step, gaps_W))
        else:
            events += diagnosis.observe(report(step, np.full(4, np.nan)))
    (first, *_) = events
    assert (first.cause, first.severity) == ("rollout.gap", Severity.NOTE)
    assert (first.first_step, first.last_step) == (10, 16)
    assert {one.cause for one in events} == {"rollout.gap"}


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
    trained, drawn = [-1.0, -2.0, -3.0, -inf], [-1.5, nan, -3.25, -inf]
    meter.give_rollout(torch.tensor(trained), torch.tensor(drawn))
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
