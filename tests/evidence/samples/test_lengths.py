"""Lengths of token sequences and the share of padding, against plain counting."""

import pytest
import torch

from rankscope.bus.probe import StepEnd
from rankscope.evidence.samples.probe import LengthMeter

IDS = torch.arange(12).reshape(3, 4)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])


def end(*idle):
    return StepEnd(0, comparable=True, idle=frozenset(idle), num_passes=1)


@pytest.mark.parametrize(("mask", "inside"), [(MASK, False), (MASK.bool(), True)])
def test_length_and_padding_of_a_batch(mask, inside):
    batch = {"input_ids": IDS, "attention_mask": mask}
    meter = LengthMeter()
    meter.on_inputs(*(((batch,), {}) if inside else ((), batch)))
    lengths = meter.collect(end())
    assert lengths.ready
    assert lengths.read().values == {"sequence_length": 4.0, "padding": pytest.approx(5 / 12)}
    nothing = meter.collect(end())
    assert nothing.ready
    assert nothing.read().values == {}


def test_micro_batches_count_by_their_samples_and_idle_ones_do_not():
    meter = LengthMeter()
    meter.on_inputs((torch.zeros(1, 8, dtype=torch.int64),), {}, 0)
    meter.on_inputs((torch.zeros(3, 2, dtype=torch.int64),), {}, 1)
    meter.on_inputs((torch.zeros(9, 9, dtype=torch.int64),), {}, 2)
    assert meter.collect(end(2)).read().values == {"sequence_length": (8 + 6) / 4}
