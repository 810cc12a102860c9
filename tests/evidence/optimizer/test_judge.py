"""What is said of an optimizer that a session does not begin with as it should.

The optimizers are torch's own. Several in one process stand for those of several ranks.
"""

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from rankscope.agent.message import StepMessage
from rankscope.agent.summary import as_columns
from rankscope.bus.finding import Severity
from rankscope.bus.messages import HeldValues
from rankscope.bus.replicas import StateKind
from rankscope.bus.step import StepReport
from rankscope.evidence.optimizer import KEY
from rankscope.evidence.optimizer.judge import (
    AHEAD,
    BEHIND,
    FRESH,
    PRECISION,
    RESUMED,
    SCHEDULE,
    SETTINGS,
    OptimizerStart,
    first_update_factor,
)
from rankscope.evidence.optimizer.probe import PendingHoldings
from rankscope.record.states import pack_state, unpack_state
from support.stepping import evidence_of, words
from support.streams import gathered


class Rank:
    """A model and its optimizer on one rank; shards differ from rank to rank."""

    def __init__(self, rank=0, **options):
        torch.manual_seed(rank)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3))
        groups = [{"params": list(layer.parameters())} for layer in self.model]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, **options)

    def train(self, num_steps):
        for step in range(num_steps):
            for number, parameter in enumerate(self.model.parameters()):
                generator = torch.Generator().manual_seed(100 * step + number)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            self.optimizer.step()
        return self

    def held(self):
        names = {id(p): name for name, p in self.model.named_parameters()}
        return PendingHoldings(self.optimizer, lambda p: names[id(p)]).read()

    def states(self):
        return [self.optimizer.state[p] for p in self.model.parameters()]


def message_of(kind, held):
    """Return what a rank sends in a step."""
    return StepMessage(0, names=np.frombuffer(json.dumps({KEY: {kind: held}}).encode(), np.uint8))


def step_of(number, kind, ranks, lr=0.01):
    messages = as_columns([message_of(str(kind), one.held()) for one in ranks])
    rows = HeldValues(KEY).combine(messages, {})
    one = gathered(number, [[]] * len(ranks), lr=[lr] * len(ranks))
    return StepReport(replace(one, **rows), {})


def after_restart(ranks, change, *, saved=True):
    """Return what is said of ranks that go on after a change."""
    detector = OptimizerStart()
    assert evidence_of(detector, step_of(0, StateKind.STARTED, ranks)) == []
    for rank in ranks:
        rank.train(3)
    if saved:
        assert evidence_of(detector, step_of(2, StateKind.SAVED, ranks)) == []
    detector.close()
    resumed = OptimizerStart()
    resumed.restore(unpack_state(pack_state(detector.state())))
    again = copy.deepcopy(ranks)
    change(again)
    return evidence_of(resumed, step_of(3, StateKind.STARTED, again))


def emptied(ranks):
    for rank in ranks:
        rank.optimizer.state.clear()


def zeroed(ranks):
    for rank in ranks:
        for state in rank.states():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()


def group_lost(ranks):
    for rank in ranks:
        for parameter in rank.model[1].parameters():
            del rank.optimizer.state[parameter]


def swapped(ranks):
    for rank in ranks:
        for state in rank.states():
            state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def both_squares(ranks):
    for rank in ranks:
        for state in rank.states():
            state["exp_avg"] = state["exp_avg_sq"].clone()


def permuted(ranks):
    for rank in ranks:
        first, second = rank.states()[0], rank.states()[2]
        for key in ("exp_avg", "exp_avg_sq"):
            first[key], second[key] = second[key], first[key]


def uncounted(ranks):
    for rank in ranks:
        for state in rank.states():
            state["step"].zero_()


def of_rank_zero(ranks):
    for rank in ranks[1:]:
        for state, source in zip(rank.states(), ranks[0].states(), strict=True):
            state["exp_avg"] = source["exp_avg"].clone()


def rounded(ranks):
    for rank in ranks:
        for state in rank.states():
            state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16().float()


def stepped(ranks):
    """Make an update with zero gradients and a rate of 0 after loading."""
    for rank in ranks:
        for group in rank.optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in rank.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        rank.optimizer.step()


def nothing(ranks):
    pass


CHANGES = [
    (emptied, Severity.WARNING, "it holds nothing, and exp_avg and exp_avg_sq of 4 parameters"),
    (zeroed, Severity.WARNING, "exp_avg and exp_avg_sq are zero, and those saved were not"),
    (group_lost, Severity.ERROR, "the moments of 2 parameters (1.weight and 1.bias) are lost"),
    (swapped, Severity.ERROR, "exp_avg holds what was saved as exp_avg_sq"),
    (both_squares, Severity.ERROR, "exp_avg holds what was saved as exp_avg_sq"),
    (permuted, Severity.ERROR, "have gone to other parameters than when saved"),
    (uncounted, Severity.ERROR, "its step counter is 0 and was 3"),
    (rounded, Severity.NOTE, "exp_avg_sq are not what was saved. Its step counters are"),
    (stepped, Severity.ERROR, "are not what was saved, and its step counter is 4 and was 3"),
]


def three_ranks():
    return [Rank(rank) for rank in range(3)]


def test_what_was_saved_is_healthy():
    assert after_restart(three_ranks(), nothing) == []


@pytest.mark.parametrize(("change", "severity", "text"), CHANGES)
def test_what_was_lost_or_moved_is_named(change, severity, text):
    [found] = after_restart(three_ranks(), change)
    assert (found.cause, found.severity, found.ranks) == (RESUMED, severity, ())
    assert found.first_step == 3
    assert text in words(found)
    assert "those saved in step 2, bit for bit" in words(found)


def test_the_state_of_another_rank_is_named():
    ranks = [Rank(0), Rank(1), Rank(2)]
    for number, rank in enumerate(ranks):  # shards: each has moments of its own
        rank.optimizer.param_groups[0]["betas"] = rank.optimizer.param_groups[1]["betas"] = (
            0.9 - 0.1 * number,
            0.999,
        )
    [found] = after_restart(ranks, of_rank_zero)
    assert (found.severity, found.ranks) == (Severity.ERROR, (1, 2))
    assert "exp_avg is another rank's: ranks 1 and 2 hold rank 0's" in words(found)


def test_moments_of_an_older_checkpoint_are_named():
    rank, detector = Rank(), OptimizerStart()
    evidence_of(detector, step_of(0, StateKind.STARTED, [rank]))
    evidence_of(detector, step_of(2, StateKind.SAVED, [rank.train(3)]))
    old = copy.deepcopy(rank.optimizer.state_dict())
    evidence_of(detector, step_of(4, StateKind.SAVED, [rank.train(2)]))
    detector.close()
    rank.optimizer.load_state_dict(old)
    [found] = evidence_of(detector, step_of(5, StateKind.STARTED, [rank]))
    assert found.severity is Severity.ERROR
    assert "those saved in step 4" in words(found)
    assert "its moments are those saved in step 2" in words(found)


def test_a_job_that_begins_anew_is_healthy():
    fresh = three_ranks()

    def begin_anew(ranks):
        ranks[:] = fresh

    assert after_restart(three_ranks(), begin_anew) == []


def test_without_a_saved_state_an_empty_optimizer_is_a_note():
    def emptied_later(ranks):
        for rank in ranks:
            rank.train(1)
        emptied(ranks)

    [found] = after_restart(three_ranks(), emptied_later)
    assert (found.key, found.severity) == (FRESH, Severity.NOTE)


def test_settings_that_changed_are_a_note():
    def swap_betas(ranks):
        for rank in ranks:
            for group in rank.optimizer.param_groups:
                group["betas"] = (0.999, 0.9)

    [found] = after_restart(three_ranks(), swap_betas)
    assert (found.key, found.severity) == (SETTINGS, Severity.NOTE)
    assert "betas is (0.999, 0.9) and was (0.9, 0.999)" in words(found)


def test_counters_ahead_of_zero_moments_are_a_warning():
    rank = Rank()
    for parameter in rank.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rank.optimizer.step()
    [found] = evidence_of(OptimizerStart(), step_of(0, StateKind.STARTED, [rank]))
    assert (found.cause, found.severity) == (AHEAD, Severity.WARNING)
    assert "it is 1.34 times too small" in words(found)
    for state in rank.states():
        state["step"].zero_()
    assert evidence_of(OptimizerStart(), step_of(0, StateKind.STARTED, [rank])) == []


def test_moments_without_their_counter_are_a_warning():
    rank = Rank().train(3)
    assert evidence_of(OptimizerStart(), step_of(32, StateKind.STARTED, [rank])) == []
    for state in rank.states():
        state["step"].zero_()
    [found] = evidence_of(OptimizerStart(), step_of(32, StateKind.STARTED, [rank]))
    assert (found.key, found.severity) == (BEHIND, Severity.WARNING)
    assert "holds moments (exp_avg and exp_avg_sq) of earlier updates" in words(found)
    for state in rank.states():
        del state["step"]  # as of optimizers that count nothing
    assert evidence_of(OptimizerStart(), step_of(32, StateKind.STARTED, [rank])) == []


@pytest.mark.parametrize("counter", [1, 5])
def test_the_first_update_is_off_by_what_adam_does(counter):
    sizes = []
    for ahead in (0, counter):
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.Adam([parameter], lr=1.0, eps=0.0)
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        parameter.data.zero_()
        optimizer.state[parameter]["step"].fill_(ahead)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        sizes.append(abs(float(parameter.detach())))
    assert math.isclose(sizes[1] / sizes[0], first_update_factor(counter, 0.9, 0.999))


def test_moments_of_a_narrower_type_are_a_note_once():
    rank = Rank().train(1)
    for state in rank.states():
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
    detector = OptimizerStart()
    [found] = evidence_of(detector, step_of(0, StateKind.STARTED, [rank]))
    assert (found.cause, found.severity) == (PRECISION, Severity.NOTE)
    assert "keeps exp_avg_sq in bfloat16, and the parameters are in float32" in words(found)
    assert evidence_of(detector, step_of(1, StateKind.SAVED, [rank])) == []


@pytest.mark.parametrize("again", [True, False])
def test_a_schedule_that_begins_anew_is_a_note(again):
    detector, ranks = OptimizerStart(), [Rank()]
    evidence_of(detector, step_of(0, StateKind.STARTED, ranks, 0.1))
    for number in range(1, 8):
        plain = gathered(number, [[]], lr=[0.1 * (number + 1)])
        assert evidence_of(detector, StepReport(plain, {})) == []
    detector.close()
    ranks[0].train(2)
    begin = 1 if again else 9
    found = evidence_of(detector, step_of(8, StateKind.STARTED, ranks, 0.1 * begin))
    for number in range(1, 6):
        plain = gathered(8 + number, [[]], lr=[0.1 * (number + begin)])
        found += evidence_of(detector, StepReport(plain, {}))
    assert [(one.key, one.first_step) for one in found] == [(SCHEDULE, 8)] * again
