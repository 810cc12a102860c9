"""Modules in training mode on some workers, and in evaluation mode on others."""

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from rankscope.agent.host_summary import as_columns
from rankscope.bus.finding import Severity
from rankscope.bus.messages import Layout
from rankscope.bus.step import MISSING_INT, StepReport
from rankscope.evidence.environment.judge import (
    DROPOUT,
    EVALUATES,
    DifferentModes,
    DropoutOff,
    make_combiner,
)
from rankscope.evidence.environment.probe import ModeMeter
from rankscope.wrappers.facts import FLAGS_EVERY
from support.stepping import evidence_of, named_message, run, words
from support.streams import gathered


def model() -> nn.Module:
    block = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    return nn.ModuleDict({"first": block, "second": nn.Sequential(nn.Linear(2, 2), nn.Dropout())})


class Workers:
    """Four workers' meters, the combiner at the root, and the detector."""

    def __init__(self) -> None:
        self.models = [model() for _ in range(4)]
        self.meters = [ModeMeter(one) for one in self.models]
        self.combiner = make_combiner(Layout(num_workers=4))
        self.detector = DifferentModes()
        self.sent = 0

    def step(self, number: int):
        """Return what is found in a step."""
        messages, digests = [], []
        for meter in self.meters:
            meter.read(number)
            columns, names = meter.take()
            digest = columns["modes"]
            self.sent += bool(names)
            messages.append(named_message(number, names))
            digests.append(MISSING_INT if digest != digest else digest)
        columns = {"modes": np.array(digests, np.int64)}
        found = self.combiner.combine(as_columns(messages), columns)
        samples = [np.array([rank]) for rank in range(4)]
        one = replace(gathered(number, samples, **columns), **found)
        return evidence_of(self.detector, StepReport(one, {}))


def dropout_off(module):
    """Return what a meter tells of dropout in the first step."""
    meter = ModeMeter(module)
    meter.read(0)
    return meter.take()[0]["dropout_off"]


def test_dropout_counts_beside_trained_parameters():
    one = model()
    assert dropout_off(one) == 0
    one["first"].eval()
    assert dropout_off(one) == 0
    one.eval()
    assert dropout_off(one) == 1
    one["first"].train().requires_grad_(False)
    assert dropout_off(one) == 1
    one.requires_grad_(False)
    assert dropout_off(one) == 0  # nothing is trained
    assert dropout_off(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)).eval()) == 0


def test_batch_normalisation_counts_once_the_model_was_in_training_mode():
    one = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    meter, found = ModeMeter(one), []
    for mode in (one.eval, one.train, one[1].eval, one.eval, one.train):
        mode()
        meter.read(len(found), due=True)
        found.append(meter.take()[0]["dropout_off"])
    assert found == [0, 0, 0, 2, 0]


@pytest.mark.parametrize(
    ("off", "key", "said"),
    [
        ([1] * 4, DROPOUT, "in evaluation mode in training steps since step 0"),
        ([2] * 4, EVALUATES, "in evaluation mode in training steps since step 0, and was in"),
        ([1, 1, 1, 0], None, ""),
    ],
)
def test_what_is_off_everywhere_is_a_note(off, key, said):
    told = run(DropoutOff(), 3, width=4, dropout_off=off)
    assert [one.key for one in told] == ([key] * 2 if key else [])
    if key:
        assert (told[0].severity, told[0].first_step, told[0].ranks) == (Severity.NOTE, 0, ())
        assert said in words(told[0])


def test_modules_in_another_mode_are_named_until_they_are_alike_again():
    workers = Workers()
    assert workers.step(0) == []
    assert workers.sent == 4  # each names its modules once
    workers.models[2]["first"].eval()
    workers.models[2]["second"][1].eval()
    assert [workers.step(n) for n in range(1, FLAGS_EVERY)] == [[]] * (FLAGS_EVERY - 1)
    [found] = workers.step(FLAGS_EVERY)
    assert workers.sent == 5
    assert (found.cause, str(found.severity)) == ("compute.modes_differ", "warning")
    assert found.ranks == (2,)
    said = "first and second.1 (evaluation on rank 2, training on the others)"
    assert said in words(found)
    workers.models[2].train()
    later = [each for n in range(17, 17 * FLAGS_EVERY + 1) for each in workers.step(n)]
    assert [each.status for each in later] == ["closed"]


@pytest.mark.parametrize("others", [False, True])
def test_the_first_step_is_that_in_which_a_training_in_evaluation_mode_began(others):
    workers = Workers()
    for number in range(FLAGS_EVERY):
        if number == 10:
            for meter in workers.meters[1:] if others else workers.meters[:1]:
                meter._module.eval()
                meter.begin_step(number, paused=False)
                meter.on_evaluation(None, {}).begin(0)
        assert workers.step(number) == []
    [found] = workers.step(FLAGS_EVERY)
    assert (found.ranks, found.first_step) == ((0,), 10)


def test_modes_that_all_workers_share_are_no_difference():
    workers = Workers()
    for number in range(4 * FLAGS_EVERY):
        for one in workers.models:
            one["second"].train(number % 3 > 0)
        assert workers.step(number) == []
