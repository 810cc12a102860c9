"""Lengths of token sequences and the share of padding, against plain counting."""

import pytest
import torch

from rankscope.evidence.samples.probe import LengthMeter

IDS = torch.arange(12).reshape(3, 4)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize(("mask", "inside"), [(MASK, False), (MASK.bool(), True)])
def test_length_and_padding_of_a_batch(mask, inside):
    batch = {"input_ids": IDS, "attention_mask": mask}
    meter = LengthMeter()
    meter.see(*(((batch,), {}) if inside else ((), batch)))
    lengths = meter.collect()
    assert lengths.ready
    assert lengths.read() == {"sequence_length": 4.0, "padding": pytest.approx(5 / 12)}
    nothing = meter.collect()
    assert nothing.ready
    assert nothing.read() == {}


def test_micro_batches_count_by_their_samples_and_idle_ones_do_not():
    meter = LengthMeter()
    meter.see((torch.zeros(1, 8, dtype=torch.int64),), {}, 0)
    meter.see((torch.zeros(3, 2, dtype=torch.int64),), {}, 1)
    meter.see((torch.zeros(9, 9, dtype=torch.int64),), {}, 2)
    assert meter.collect({2}).read() == {"sequence_length": (8 + 6) / 4}
