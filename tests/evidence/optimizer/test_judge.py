import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from rankscope.agent.host_summary import as_columns
from rankscope.bus.finding import Severity
from rankscope.bus.messages import HeldValues, Layout
from rankscope.bus.replicas import StateKind
from rankscope.bus.step import StepReport
from rankscope.evidence.optimizer import KEY, judge
from rankscope.evidence.optimizer.probe import PendingHoldings
from rankscope.record.states import pack_state, unpack_state
from support.stepping import evidence_of, named_message, words
from support.streams import gathered


class Rank:
    def __init__(self, rank=0, **options):
        torch.manual_seed(rank)
        self.number = rank
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

    def step_without_gradients(self):
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def held(self):
        names = {id(p): name for name, p in self.model.named_parameters()}
        return PendingHoldings(self.optimizer, names).read()

    def states(self):
        return [self.optimizer.state[p] for p in self.model.parameters()]


def step_of(number, kind, ranks, rate=0.01):
    messages = as_columns([named_message(0, {KEY: {str(kind): one.held()}}) for one in ranks])
    rows = HeldValues(Layout(2), KEY).combine(messages, {})
    num = len(ranks)
    one = gathered(number, [[]] * num, lr=[rate] * num, optimizer_steps=[1] * num)
    return StepReport(replace(one, **rows), {})


def ended_with(ranks, *, saved=True, rows=None):
    detector = judge.OptimizerStart(rows=rows)
    assert evidence_of(detector, step_of(0, StateKind.STARTED, ranks)) == []
    for rank in ranks:
        rank.train(3)
    if saved:
        assert evidence_of(detector, step_of(2, StateKind.SAVED, ranks)) == []
    detector.close()
    return detector


def after_restart(ranks, change, on=None):
    detector, resumed = ended_with(ranks), judge.OptimizerStart()
    resumed.restore(unpack_state(pack_state(detector.state())))
    again = copy.deepcopy(ranks)
    for rank in again if on is None else [again[number] for number in on]:
        change(rank)
    return evidence_of(resumed, step_of(3, StateKind.STARTED, again))


def emptied(rank):
    rank.optimizer.state.clear()


def group_lost(rank):
    for parameter in rank.model[1].parameters():
        del rank.optimizer.state[parameter]


def lost_and_halved(rank):
    halved(rank)
    del rank.optimizer.state[rank.model[1].bias]


def swapped(rank):
    for state in rank.states():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def permuted(rank):
    first, second = rank.states()[0], rank.states()[2]
    for key in ("exp_avg", "exp_avg_sq"):
        first[key], second[key] = second[key], first[key]


def rounded(rank):
    for state in rank.states():
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16().float()


def halved(rank):
    for state in rank.states():
        state["exp_avg"] = state["exp_avg"] / 2


def shifted(rank):
    """One parameter has another's, and that one's begin anew."""
    first, second = rank.states()[0], rank.states()[2]
    first["exp_avg"] = second["exp_avg"]
    second["exp_avg"] = torch.full_like(second["exp_avg"], 1e-3)


def stepped(rank):
    for group in rank.optimizer.param_groups:
        group["lr"] = 0.0
    rank.step_without_gradients()


CHANGES = [
    (emptied, Severity.WARNING, "it holds nothing, and exp_avg and exp_avg_sq of 4 parameters"),
    (group_lost, Severity.ERROR, "the moments of 2 parameters (1.weight and 1.bias) are lost"),
    (lost_and_halved, Severity.ERROR, "(1.bias) are lost, and those of at least 3 others are not"),
    (swapped, Severity.ERROR, "exp_avg holds what was saved as exp_avg_sq"),
    (permuted, Severity.ERROR, "have gone to other parameters than when saved"),
    (rounded, Severity.NOTE, "exp_avg_sq are not what was saved. Its step counters are"),
    (halved, Severity.WARNING, "exp_avg are not what was saved (in 0.weight its norm is 0.5 times"),
    (shifted, Severity.ERROR, "exp_avg of 0.weight is what was saved for 1.weight"),
    (stepped, Severity.ERROR, "are not what was saved, and its step counter is 4 and was 3"),
]


def three_ranks():
    return [Rank(rank) for rank in range(3)]


@pytest.mark.parametrize(("change", "severity", "text"), CHANGES)
def test_what_was_lost_or_moved_is_named(change, severity, text):
    [found] = after_restart(three_ranks(), change)
    assert (found.cause, found.severity, found.ranks) == (judge.RESUMED, severity, ())
    assert found.first_step == 3
    assert text in words(found)
    assert "those saved in step 2, bit for bit" in words(found)


class Rates(torch.optim.SGD):
    """Keeps a rate for each element, of which it makes new ones where none were loaded."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state.setdefault("rates", state["momentum_buffer"].abs())


class WithOthers(Rank):
    """Its optimizer holds parameters that get no gradient, and have no state when it is saved."""

    def __init__(self):
        super().__init__()
        self.others = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(6))]
        self.optimizer = Rates([*self.others, *self.model.parameters()], lr=0.01, momentum=0.9)


def others_begun(rank):
    for parameter in rank.others:
        rank.optimizer.state[parameter]["rates"] = torch.full_like(parameter, 0.5)


def found_by_position(rank):
    """Take rates by the place among those saved, or new ones where shapes differ."""
    optimizer = rank.optimizer
    saved = [state["rates"] for state in optimizer.state.values()]
    for at, parameter in enumerate(optimizer.param_groups[0]["params"]):
        fits = at < len(saved) and saved[at].shape == parameter.shape
        rates = saved[at] if fits else torch.full_like(parameter, 0.5)
        optimizer.state[parameter]["rates"] = rates


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (others_begun, None),
        (found_by_position, "rates of 0.weight is what was saved for 1.weight and 1 other moment"),
    ],
)
def test_states_that_begin_after_loading_are_healthy_unless_others_have_moved(change, said):
    found = after_restart([WithOthers()], change)
    assert [one.severity for one in found] == [Severity.ERROR] * (said is not None)
    assert all(said in words(one) for one in found)


def not_loaded(rank):
    rank.model.load_state_dict(Rank(rank.number).model.state_dict())


def doubled(rank):
    with torch.no_grad():
        rank.model[0].weight.mul_(2)


@pytest.mark.parametrize(
    ("change", "severity", "ranks", "text"),
    [
        (not_loaded, Severity.ERROR, (), "the parameters are still those of the run's first step"),
        (not_loaded, Severity.ERROR, (1, 2), "the parameters of ranks 1 and 2 are still"),
        (doubled, Severity.WARNING, (2,), "of rank 2 are not (in 0.weight its norm is 2 t"),
        (doubled, Severity.NOTE, (), "the parameters are not (in 0.weight its norm is 2 times"),
    ],
)
def test_parameters_that_were_not_loaded_are_named(change, severity, ranks, text):
    [found] = after_restart(three_ranks(), change, on=ranks or None)
    assert (found.cause, found.key) == (judge.RESUMED, judge.NOT_LOADED)
    assert (found.severity, found.ranks) == (severity, ranks)
    assert text in words(found)
    assert "step counters are those saved in step 2, bit for bit" in words(found)


def test_what_was_saved_is_healthy():
    assert after_restart(three_ranks(), lambda rank: None) == []


def in_bfloat16(rank):
    rank.model.bfloat16().float()


def in_part(rank):
    rank.model[0].bfloat16().float()


@pytest.mark.parametrize(("change", "said"), [(in_bfloat16, True), (in_part, False)])
def test_parameters_that_are_rounded_at_a_restart_are_a_note(change, said):
    found = after_restart(three_ranks(), change)
    assert [(one.key, one.severity) for one in found] == [(judge.ROUNDED, Severity.NOTE)] * said
    assert all("what 4 parameters had beyond that is lost" in words(one) for one in found)


@pytest.mark.parametrize(
    ("updates", "ranks", "late"),  # a rank that owns other parameters, as under ZeRO
    [
        *(([5, 3, 5], (1,), None), ([5, 4, 5], (), None), ([5, 5, 5], (), None)),
        *(([1, 5, 3], (0, 2), None), ([1, 5, 3], (0,), 2), ([5, 3, 5], (), 1)),
    ],
)
def test_ranks_that_count_fewer_updates_are_named(updates, ranks, late):
    ended = [rank.train(number) for rank, number in zip(three_ranks(), updates, strict=True)]
    for rank in ended[late : late + 1] if late is not None else ():
        rank.model = nn.ModuleDict({"late": rank.model})
    detector = judge.OptimizerStart()
    found = evidence_of(detector, step_of(4, StateKind.SAVED, ended))
    assert [(one.key, one.ranks) for one in found] == [(judge.UNCOUNTED, ranks)] * bool(ranks)
    assert all(one.severity is Severity.WARNING for one in found)
    assert evidence_of(detector, step_of(5, StateKind.SAVED, ended)) == []  # once


def nothing_loaded(rank):
    not_loaded(rank)
    emptied(rank)


def other_seed(rank):
    rank.__init__(10 + rank.number)


def other_seed_on_two(rank):
    (other_seed if rank.number else emptied)(rank)


@pytest.mark.parametrize(
    ("change", "saved", "said"),
    [
        (other_seed, True, "with an empty optimizer, and with parameters that no earlier"),
        (nothing_loaded, True, "with the parameters of the run's first step, bit for bit"),
        (other_seed, False, None),  # the optimizer may never have any state
        (not_loaded, True, None),  # its moments were loaded
        (emptied, True, None),
        (other_seed_on_two, True, None),
        (doubled, True, None),
    ],
)
def test_lost_moments_beside_new_parameters_begin_anew(change, saved, said):
    ranks = three_ranks()
    detector = ended_with(ranks, saved=saved)
    for rank in ranks:
        change(rank)
    begun = detector.begins_anew(step_of(3, StateKind.STARTED, ranks).gathered)
    assert (begun is not None) is (said is not None)
    if said is not None:
        assert said in words(begun)


@pytest.mark.parametrize(
    ("complete", "change", "rate", "rows", "said"),
    [
        (True, emptied, 0.003, 100, "a learning rate of 0.003 (0.01 before)"),
        (True, emptied, 0.01, 50, "a data set of 50 rows (100 before)"),
        (True, emptied, 0.01, 100, None),  # a restart that lost its moments
        (True, lambda rank: None, 0.003, 50, None),  # it has its moments
        (False, emptied, 0.003, 50, None),  # the job before was cut off
    ],
)
def test_another_job_after_one_that_ended_by_itself_begins_anew(complete, change, rate, rows, said):
    ranks = three_ranks()
    before = ended_with(ranks, rows=100)
    after = judge.OptimizerStart(complete, rows)
    after.restore(unpack_state(pack_state(before.state())))
    for rank in ranks:
        change(rank)
    begun = after.begins_anew(step_of(3, StateKind.STARTED, ranks, rate).gathered)
    assert (begun is None) if said is None else (said in words(begun))


def test_the_state_of_another_rank_is_named():
    ranks = [Rank(n, betas=(0.9 - 0.1 * n, 0.999)) for n in range(3)]  # each has its own moments

    def of_rank_zero(rank):
        for state, source in zip(rank.states(), ranks[0].states(), strict=True):
            state["exp_avg"] = source["exp_avg"].clone()

    [found] = after_restart(ranks, of_rank_zero, on=(1, 2))
    assert (found.severity, found.ranks) == (Severity.ERROR, (1, 2))
    assert "exp_avg is another rank's: ranks 1 and 2 hold rank 0's" in words(found)


def test_moments_of_an_older_checkpoint_are_named():
    rank, detector = Rank(), judge.OptimizerStart()
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


def test_counters_ahead_of_zero_moments_are_a_warning():
    rank = Rank()
    rank.step_without_gradients()
    [found] = evidence_of(judge.OptimizerStart(), step_of(0, StateKind.STARTED, [rank]))
    assert (found.cause, found.severity) == (judge.AHEAD, Severity.WARNING)
    assert "it is 1.34 times too small" in words(found)
    for state in rank.states():
        state["step"].zero_()
    assert evidence_of(judge.OptimizerStart(), step_of(0, StateKind.STARTED, [rank])) == []


def never_updated(rank, layer):
    for parameter in rank.model[layer].parameters():
        for value in rank.optimizer.state[parameter].values():
            value.zero_()


def test_parameters_that_one_rank_leaves_out_are_named():
    ranks = three_ranks()
    for rank in ranks:
        rank.train(3)
    never_updated(ranks[2], 1)
    [found] = evidence_of(judge.OptimizerStart(), step_of(2, StateKind.SAVED, ranks))
    assert (found.cause, found.severity, found.ranks) == (judge.COUNTERS, Severity.WARNING, (2,))
    assert "has not updated 1.weight and 1.bias: its step counters there are 0 to 3" in words(found)
    for rank in ranks[:2]:
        never_updated(rank, 1)
    assert evidence_of(judge.OptimizerStart(), step_of(2, StateKind.SAVED, ranks)) == []


@pytest.mark.parametrize(
    ("updates", "ranks", "said"),
    [
        ([3, 0, 3], (1,), "none on rank 1 and that of 3 updates on ranks 0 and 2"),
        ([3, 3, 2], (2,), "that of 2 updates on rank 2 and that of 3 updates on ranks 0"),
        ([1, 2, 3], (0, 1, 2), "that of 1 update on rank 0, that of 2 updates on rank 1"),
    ],
)
def test_ranks_that_begin_with_states_of_other_steps_are_named(updates, ranks, said):
    begun = [rank.train(number) for rank, number in zip(three_ranks(), updates, strict=True)]
    [found] = evidence_of(judge.OptimizerStart(), step_of(0, StateKind.STARTED, begun))
    assert (found.key, found.severity, found.ranks) == (judge.APART, Severity.ERROR, ranks)
    assert said in words(found)


def test_ranks_that_hold_states_of_their_own_parameters_alone_begin_alike():
    begun = [rank.train(3) for rank in three_ranks()]
    begun[0].optimizer.state.clear()
    for parameter in begun[1].model[0].parameters():
        del begun[1].optimizer.state[parameter]
    assert evidence_of(judge.OptimizerStart(), step_of(0, StateKind.STARTED, begun)) == []


def rates_after(before, after):
    rank, detector, found = Rank(), judge.OptimizerStart(), []
    for number, rate in enumerate([*before, *after]):
        if number == len(before):
            detector.close()
        begins = number in (0, len(before))
        kind = StateKind.STARTED if begins else StateKind.SAVED
        found += evidence_of(detector, step_of(number, kind, [rank], rate))
        rank.train(1)
    return [one for one in found if one.key == judge.SCHEDULE]


RISING = [0.1, 0.2, 0.3, 0.4, 0.5, 0.45, 0.4, 0.35]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ([0.1, 0.2, 0.3, 0.4], "goes through the first steps of the run again: it is 0.1"),
        ([0.3, 0.4, 0.5, 0.45], "goes through steps 2 to 5 of the run again: it is 0.3"),
        ([0.3, 0.25, 0.2, 0.15], None),
        ([0.35] * 4, None),
    ],
)
def test_a_learning_rate_that_goes_through_earlier_steps_again_is_a_note(after, said):
    found = rates_after(RISING, after)
    assert [one.severity for one in found] == [Severity.NOTE] * (said is not None)
    assert all(said in words(one) for one in found)


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ([0.3, 0.01, 0.31], "the learning rate was 0.01, with 0.3 before it and 0.31 after it"),
        ([0.3, 0.01, 0.02], None),
        ([0.3, 0.3, 0.01, 0.3], None),
    ],
)
def test_a_first_update_with_settings_of_its_own_is_a_warning(rates, said):
    detector = judge.FirstUpdate()
    assert evidence_of(detector, step_of(0, StateKind.STARTED, [Rank()], rates[0])) == []
    detector.close()
    steps = [step_of(n, StateKind.SAVED, [Rank()], rate) for n, rate in enumerate(rates[1:], 1)]
    found = evidence_of(detector, *steps)
    assert [one.severity for one in found] == [Severity.WARNING] * (said is not None)
    assert all(said in words(one) for one in found)
