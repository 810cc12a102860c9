"""Lengths of token sequences and the share of padding, against plain counting."""

import pytest
import torch

from rankscope.evidence.samples.probe import LengthMeter

IDS = torch.arange(12).reshape(3, 4)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize("mask", [MASK, MASK.bool(), MASK.T.contiguous().T, MASK.float()])
@pytest.mark.parametrize("inside", [False, True])
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


@pytest.mark.parametrize(
    "inputs", [torch.zeros(2, 3), torch.zeros(2, 3, 4, dtype=torch.int64), "text", None]
)
def test_what_are_no_token_ids_has_no_length(inputs):
    meter = LengthMeter()
    meter.see((inputs,), {"attention_mask": MASK})
    assert meter.collect().read() == {}


def test_a_mask_of_another_shape_is_left_out():
    meter = LengthMeter()
    meter.see((), {"input_ids": IDS, "attention_mask": torch.ones(3, 1, 4, 4)})
    assert meter.collect().read() == {"sequence_length": 4.0}
