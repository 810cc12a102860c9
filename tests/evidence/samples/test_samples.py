from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from typing import NamedTuple
from uuid import UUID

import numpy as np
import pytest
import torch

from rankscope.evidence.samples.probe import MAX_WORDS, SampleMeter, digest_inputs
from support.collected import to_array


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


@dataclass
class Example:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    name: object = None


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


class Broken(Mapping):
    """A batch that raises when it is read."""

    def __getitem__(self, key):
        raise OSError("the file is gone")

    def __iter__(self):
        return iter(["pixels"])

    def __len__(self):
        return 1


class Colour(Enum):
    RED = 1


class Opaque:
    __hash__ = None


IMAGES = torch.rand(6, 5, 4, generator=torch.Generator().manual_seed(0))


def test_token_ids_are_found_with_their_mask_wherever_they_are():
    batch = padded([tokens(1, 4), tokens(2, 6)], 9)
    expected = digest_inputs((), padded([tokens(1, 4), tokens(2, 6)], 6)).tolist()
    for inputs in (
        ([{"text": batch}],),
        (("train", [batch, 3]),),
        (Example(**batch),),
        ({"a": {"b": Example(**batch, name=Opaque())}},),
        (torch.ones(7, 3), UserDict(batch)),
    ):
        assert digest_inputs(inputs, {}).tolist() == expected
        assert digest_inputs((), {"batch": inputs}).tolist() == expected


@pytest.mark.parametrize(
    "inputs",
    [
        (Pair(IMAGES, torch.arange(6)),),
        ([IMAGES, torch.arange(6)],),
        ({"pixels": [IMAGES], "label": 3},),
        (torch.tensor(0.5), IMAGES),
        (torch.empty(0, 4), IMAGES),
        (IMAGES.to_sparse(), IMAGES),
        (Opaque(), None, {1: {2: IMAGES}}, "text"),
    ],
)
def test_the_first_tensor_with_samples_is_found_in_any_structure(inputs):
    assert digest_inputs(inputs, {}).tolist() == digest_inputs((IMAGES,), {}).tolist()


def test_of_named_inputs_labels_targets_and_masks_come_last():
    labels, expected = torch.tensor([0, 1, 0, 1, 0, 1]), digest_inputs((IMAGES,), {}).tolist()
    collated = {"labels": labels, "pixel_mask": labels + 2, "pixel_values": IMAGES}
    assert digest_inputs((), collated).tolist() == expected
    assert digest_inputs((collated,), {}).tolist() == expected
    assert digest_inputs(([UserDict(collated)],), {}).tolist() == expected
    assert digest_inputs((), {"batch": {"Targets": labels, 1: IMAGES}}).tolist() == expected
    assert digest_inputs((), {"labels": labels}).tolist() == digest_inputs((labels,), {}).tolist()
    assert digest_inputs((labels,), {"x": IMAGES}).tolist() != expected  # positions have no names


def test_lists_of_one_tensor_per_sample():
    images = [torch.rand(3, size, 8) for size in (4, 6, 4)]
    digests = digest_inputs((images, [{"boxes": torch.rand(2, 4)}] * 3), {}).tolist()
    assert len(set(digests)) == 3
    assert digest_inputs((images[::-1],), {}).tolist() == digests[::-1]
    sequences = [tokens(1, 5), tokens(2, 7)]
    assert len(digest_inputs((sequences,), {})) == 2


def test_texts_are_digested_by_content():
    digests = digest_inputs((["a", "b", "a"],), {}).tolist()
    assert digests[0] == digests[2] != digests[1]
    assert digest_inputs((), {"texts": ("b",)}).tolist() == digests[1:2]
    assert digest_inputs(({"text": ["b"], "score": torch.ones(1, 2)},), {}).tolist() != digests[1:2]


def test_a_batch_nested_for_ever_is_given_up():
    loop: list = [1, 2, 3]
    loop += [loop] * 300
    assert digest_inputs((loop,), {}) is None


def collected(samples):
    meter = SampleMeter()
    meter.give(samples)
    return to_array(meter.collect()).tolist()


@pytest.mark.parametrize(
    "ids",
    [
        ["a", "b", "ß", "\ud800"],
        [b"a", b"b", "a"],
        [1.5, 2.5, -0.25, float("inf")],
        [("shard-1", 3), ("shard-1", 4), ("shard-2", 3), ["shard-2", 4], ("shard-1", (3, 4))],
        [UUID(int=1), UUID(int=2), 1 << 100, (1 << 100) + 1, -(1 << 70)],
        [date(2026, 1, 2), PurePosixPath("x/1"), Decimal("1.5"), Colour.RED, 1.5],
        [np.arange(5000), np.arange(5001), np.delete(np.arange(5001), 2500)],
        np.array(["a", "b"]),
        np.array([1.5, 2.5]),
        np.array(["2026-01-01", "2026-01-02"], "datetime64[D]"),
    ],
    ids=str,
)
def test_ids_of_any_type_are_told_apart(ids):
    numbers = collected(ids)
    assert len(set(numbers)) == len(ids)
    assert collected(list(ids)) == numbers
    assert collected(one for one in ids) == numbers


def test_equal_ids_of_different_types_are_equal():
    assert collected([3.0, np.float32(3), np.int8(3), torch.tensor(3), np.array(3), True]) == [
        *[3] * 5,
        1,
    ]
    assert collected([np.str_("a"), "a", np.array("a")]) == [collected(["a"])[0]] * 3
    assert sorted(collected({7, 8})) == [7, 8]


def test_tensors_in_any_structure_may_be_given():
    expected = digest_inputs((IMAGES,), {}).tolist()
    for samples in (IMAGES, [IMAGES, torch.arange(6)], {"x": {"y": IMAGES}}, Pair(IMAGES, None)):
        assert collected(samples) == expected
    assert collected([torch.tensor([4]), torch.tensor(5)]) == [4, 5]
    assert collected([torch.tensor(2.5)]) == collected([2.5])
    assert len(set(collected([torch.tensor([4, 5]), torch.tensor([4, 6])]))) == 2


@pytest.mark.parametrize(
    "samples",
    [
        "text",
        5,
        None,
        object(),
        [None],
        [{"a": 1}],
        [{1, 2}],
        [float("nan")],
        [Opaque()],
        [lambda: 0],
        {"name": "x"},
        Broken(),
    ],
    ids=[
        *("text", "number", "None", "object", "list of None", "list of dicts", "list of sets"),
        *("NaN", "list of objects", "function", "dict", "broken"),
    ],
)
def test_what_is_no_id_is_declined_in_one_line_and_digests_stand_in(samples, caplog):
    meter = SampleMeter()
    for _ in range(3):
        meter.give(samples)
        meter.see((IMAGES,), {})
        assert not meter.named
        assert len(to_array(meter.collect())) == 6
    (record,) = caplog.records
    assert "one id per sample" in record.getMessage()
    assert record.getMessage().endswith("the rest is measured as before")


@pytest.mark.parametrize(
    "inputs",
    [
        (Opaque(),),
        (Broken(),),
        (3, "text"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),),
        (torch.ones(2, 2, device="meta"),),
        (torch.ones(2, 2).to_sparse(),),
        (iter([torch.ones(2)]),),
    ],
    ids=lambda inputs: type(inputs[0]).__name__,
)
def test_inputs_that_cannot_be_read_are_declined_in_one_line(inputs, caplog):
    meter = SampleMeter()
    for _ in range(3):
        meter.see(inputs, {})
        assert to_array(meter.collect()).tolist() == []
    (record,) = caplog.records
    assert "the samples of a batch cannot be told apart" in record.getMessage()
    if isinstance(inputs[0], Iterator):
        assert next(inputs[0]) is not None  # not consumed


def test_a_subclass_of_tensor_that_is_an_ordinary_one_inside_is_read():
    class Image(torch.Tensor):
        pass

    image = IMAGES.as_subclass(Image)
    assert digest_inputs((image,), {}).tolist() == digest_inputs((IMAGES,), {}).tolist()


@pytest.mark.parametrize("shape", [(3, 40), (2, MAX_WORDS + 90)])
def test_words_padded_at_the_end_have_the_digests_of_a_mask_with_holes(shape):
    ids = torch.arange(shape[0] * shape[1]).reshape(shape)
    ends = torch.ones_like(ids)
    ends[0, 30:] = 0
    padded = digest_inputs((), {"input_ids": ids, "attention_mask": ends})
    ids, ends = torch.nn.functional.pad(ids, (1, 0)), torch.nn.functional.pad(ends, (1, 0))
    holes = digest_inputs((), {"input_ids": ids, "attention_mask": ends})
    assert padded.tolist() == holes.tolist()
