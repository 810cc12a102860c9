import numpy as np
import pytest
import torch

from rankscope.capture import SampleMeter
from rankscope.capture.samples import MAX_WORDS, digest_inputs, to_array
from rankscope.errors import UsageError


def tokens(seed: int, length: int) -> torch.Tensor:
    return torch.randint(1, 1000, (length,), generator=torch.Generator().manual_seed(seed))


def padded(sequences, width, *, left=False):
    ids, mask = torch.zeros(len(sequences), width, dtype=torch.int64), None
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[row, place] = sequence
        mask[row, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


def test_digests_are_blind_to_padding():
    sequences = [tokens(seed, 5 + seed) for seed in range(6)]
    plain = digest_inputs((), padded(sequences, 10))
    wider = digest_inputs((), padded(sequences, 37))
    left = digest_inputs((), padded(sequences, 37, left=True))
    assert len(set(plain.tolist())) == 6
    assert plain.tolist() == wider.tolist() == left.tolist()


def test_digests_see_order_and_single_elements():
    base = tokens(0, 50)
    swapped = base.clone()
    swapped[[3, 30]] = base[[30, 3]]
    changed = base.clone()
    changed[49] += 1
    prefix = base[:49]
    batch = padded([base, swapped, changed, prefix, base], 50)
    digests = digest_inputs((), batch).tolist()
    assert len(set(digests)) == 4
    assert digests[0] == digests[4]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.bool]
)
def test_inputs_of_any_type_have_digests(dtype):
    numbers = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 3
    batch = (numbers.clamp(min=0) if dtype is torch.bool else numbers).to(dtype)
    batch[3] = batch[0]
    digests = digest_inputs((batch,), {}).tolist()
    assert digests[3] == digests[0]
    assert len(set(digests)) == 3


def test_ten_thousand_samples_do_not_collide():
    batch = torch.cartesian_prod(torch.arange(100), torch.arange(100))
    assert len(set(digest_inputs((batch,), {}).tolist())) == 10_000


def test_large_samples_are_read_at_a_stride():
    batch = torch.randn(2, 3 * MAX_WORDS, generator=torch.Generator().manual_seed(0))
    assert len(set(digest_inputs((batch,), {}).tolist())) == 2


@pytest.mark.parametrize("inputs", [((), {}), (("text", 3), {}), ((torch.tensor(1.0),), {})])
def test_inputs_without_a_batch_have_none(inputs):
    assert digest_inputs(*inputs) is None


def test_a_batch_in_a_mapping_is_found():
    batch = padded([tokens(1, 4), tokens(2, 6)], 6)
    assert digest_inputs((batch,), {}).tolist() == digest_inputs((), batch).tolist()


def test_given_ids_win_over_digests():
    meter = SampleMeter()
    meter.give([5, 6, 7])
    meter.see((torch.ones(2, 2),), {})
    assert to_array(meter.collect()).tolist() == [5, 6, 7]
    meter.see((torch.ones(2, 2),), {})
    assert len(to_array(meter.collect())) == 2
    assert to_array(meter.collect()).tolist() == []


def test_ids_of_many_kinds():
    meter = SampleMeter()
    meter.give(torch.tensor([1, 2]))
    meter.give(np.array([3, 4], np.uint8))
    meter.give(["a", "b", "a"])
    meter.give(iter([torch.tensor(9)]))
    ids = to_array(meter.collect())
    assert ids[:4].tolist() == [1, 2, 3, 4]
    assert ids[4] == ids[6] != ids[5]
    assert ids[7] == 9


@pytest.mark.parametrize("samples", ["text", 5, [1.5], [None]])
def test_what_is_no_id_is_refused(samples):
    with pytest.raises(UsageError, match="one id per sample"):
        SampleMeter().give(samples)
