from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from types import SimpleNamespace
from uuid import UUID

import numpy as np
import pytest
import torch

from rankscope.bus.probe import StepEnd
from rankscope.evidence.samples.probe import LengthMeter, SampleMeter
from rankscope.wrappers.samples import digest_inputs
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


def test_digests_without_a_mask_are_blind_to_zeros_at_the_end():
    rows = torch.randint(1, 1000, (4, 12))
    padded = torch.cat([rows, torch.zeros(4, 5, dtype=torch.int64)], 1)
    assert torch.equal(digest_inputs((rows,), {}), digest_inputs((padded,), {}))
    padded[:, -1] = 1
    assert not (digest_inputs((rows,), {}) == digest_inputs((padded,), {})).any()


def test_digests_see_order_and_single_elements():
    base = tokens(0, 50)
    swapped = base.clone()
    swapped[[3, 30]] = base[[30, 3]]
    changed = base.clone()
    changed[49] += 1
    prefix = base[:49]
    digests = digest_inputs((), padded([base, swapped, changed, prefix, base], 50)).tolist()
    assert len(set(digests)) == 4
    assert digests[0] == digests[4]


def test_ten_thousand_samples_do_not_collide():
    batch = torch.cartesian_prod(torch.arange(100), torch.arange(100))
    assert len(set(digest_inputs((batch,), {}).tolist())) == 10_000
    few = torch.cartesian_prod(*[torch.arange(3.0, dtype=torch.float64)] * 8)
    assert len(set(digest_inputs((few,), {}).tolist())) == len(few)


def test_given_ids_win_over_digests():
    meter = SampleMeter()
    meter.give([5, 6, 7])
    meter.see((torch.ones(2, 2),), {})
    assert to_array(meter.collect()).tolist() == [5, 6, 7]
    meter.see((torch.ones(2, 2),), {})
    assert len(to_array(meter.collect())) == 2
    assert to_array(meter.collect()).tolist() == []


@dataclass
class Example:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    name: object = None


class Broken(Mapping):
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


def test_lists_of_one_tensor_per_sample():
    images = [torch.rand(3, size, 8) for size in (4, 6, 4)]
    digests = digest_inputs((images, [{"boxes": torch.rand(2, 4)}] * 3), {}).tolist()
    assert len(set(digests)) == 3
    assert digest_inputs((images[::-1],), {}).tolist() == digests[::-1]
    assert len(digest_inputs(([tokens(1, 5), tokens(2, 7)],), {})) == 2


def test_lists_of_one_mapping_per_sample():
    images = [torch.rand(3, 8, 8) for _ in range(2)]
    expected = digest_inputs((images,), {}).tolist()
    other = {"sem_seg": torch.ones(8, 8), "instances": Opaque()}
    samples = [{"file_name": f"{n}.png", **other, "image": i} for n, i in enumerate(images)]
    assert digest_inputs((samples,), {}).tolist() == expected
    assert digest_inputs((samples[:1],), {}).tolist() == expected[:1]
    del samples[1]["image"]
    assert digest_inputs((samples,), {}).tolist() != expected


def test_packed_sequences_are_cut_where_their_lengths_are_known():
    sequences = [tokens(1, 5), tokens(2, 7), tokens(3, 5)]
    expected = [digest_inputs((one[None],), {}).item() for one in sequences]
    packed, padded_packed = torch.cat(sequences), torch.cat([*sequences, torch.zeros(3).long()])
    layout = SimpleNamespace(_packed=True, _seq_lens=[5, 7, 5], _width=17)
    for args in ((packed, layout), (padded_packed, layout), ({"x": packed, "lengths": (5, 7, 5)},)):
        assert digest_inputs(args, {}).tolist() == expected
    assert digest_inputs((packed,), {"seq_lens": [5, 7, 5]}).tolist() == expected
    alike = torch.cat([sequences[1]] * 2)
    assert digest_inputs((alike,), {"seq_lens": [7, 7]}).tolist() == [expected[1]] * 2
    for lengths in ([5, 7, 6], [0, 17], [True], [], None, 17, packed):  # no lengths of these
        assert len(digest_inputs((packed,), {"seq_lens": lengths})) == 17


def test_the_samples_of_a_batch_of_graphs_are_its_graphs():
    x = torch.tensor([[1.0], [1.0], [1.0], [2.0], [1.0], [1.0], [1.0]])
    chain, star = [[0, 1], [1, 2]], [[0, 0], [1, 2]]
    shifted = [torch.tensor(one) + 4 for one in (star, chain)]
    graph = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    found = []
    for last in shifted:
        edges = torch.cat([torch.tensor(chain), last], 1)
        named = {"batch": graph, "edge_index": edges, "x": x, "y": torch.rand(3)}
        data = type("Data", (), {"__module__": "torch_geometric.data.data", **named})()
        type(data).to_dict = lambda _, named=named: named
        several = (x, edges, graph), (named,), (data,)
        found += [digest_inputs(inputs, {}).tolist() for inputs in several]
    assert found == [found[0]] * 3 + [found[-1]] * 3
    assert len(set(found[0])) == 3  # the same nodes, and other edges
    assert found[-1][0] == found[-1][2] == found[0][0]
    for other in (graph.flip(0), torch.zeros(7).long() + 1):  # no graphs of these
        assert len(digest_inputs((x, edges, other), {})) == 7


def test_texts_come_before_their_labels():
    texts = ["one", "two", "three"]
    expected = digest_inputs((texts,), {}).tolist()
    assert len(set(expected)) == 3
    labels = torch.tensor([0, 1, 0])
    for batch in ((labels, texts), {"label": labels, "text": texts}):
        assert digest_inputs((batch,), {}).tolist() == expected


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
        [1.5, 2.5, -0.25, float("inf")],
        [("shard-1", 3), ("shard-1", 4), ("shard-2", 3), ["shard-2", 4], ("shard-1", (3, 4))],
        [UUID(int=1), UUID(int=2), 1 << 100, (1 << 100) + 1, -(1 << 70)],
        [date(2026, 1, 2), PurePosixPath("x/1"), Decimal("1.5"), Colour.RED, 1.5],
        np.array(["2026-01-01", "2026-01-02"], "datetime64[D]"),
    ],
)
def test_ids_of_any_type_are_told_apart(ids):
    numbers = collected(ids)
    assert len(set(numbers)) == len(ids)
    assert collected(list(ids)) == numbers
    assert collected(one for one in ids) == numbers


@pytest.mark.parametrize("samples", ["text", [{"a": 1}], [float("nan")], Broken()])
def test_what_is_no_id_is_declined_in_one_line_and_digests_stand_in(samples, caplog):
    meter = SampleMeter()
    for _ in range(3):
        meter.give(samples)
        meter.see((torch.rand(6, 5, 4),), {})
        assert not meter.named
        assert len(to_array(meter.collect())) == 6
    (record,) = caplog.records
    assert "one id per sample" in record.getMessage()
    assert record.getMessage().endswith("the rest is measured as before")


@pytest.mark.parametrize(
    "inputs",
    [
        (Broken(),),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),),
        (torch.ones(2, 2, device="meta"),),
        (iter([torch.ones(2)]),),
    ],
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


MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])


def end(*idle):
    return StepEnd(0, comparable=True, idle=frozenset(idle), num_passes=1)


@pytest.mark.parametrize(("mask", "inside"), [(MASK, False), (MASK.bool(), True)])
def test_length_and_padding_of_a_batch(mask, inside):
    batch = {"input_ids": torch.arange(12).reshape(3, 4), "attention_mask": mask}
    meter = LengthMeter()
    meter.on_inputs(*(((batch,), {}) if inside else ((), batch)))
    lengths = meter.collect(end())
    side = {"padded_left": 0.0}
    assert lengths.ready
    assert lengths.read().values == {
        "sequence_length": 4.0,
        "padding": pytest.approx(5 / 12),
        **side,
    }
    nothing = meter.collect(end())
    assert nothing.ready
    assert nothing.read().values == {}


LEFT = MASK.flip(1)
BOTH = torch.tensor([[0, 1, 1, 0]])


@pytest.mark.parametrize(
    ("masks", "share"),
    [
        ([MASK], 0.0),
        ([LEFT], 1.0),
        ([torch.ones(2, 4), BOTH], None),
        ([LEFT, BOTH, torch.ones(2, 4)], 1.0),
        ([LEFT, torch.cat([MASK, LEFT[:1]])], 0.5),
    ],
)
def test_the_side_of_padding_is_that_of_the_rows_with_padding_on_one_side(masks, share):
    meter = LengthMeter()
    for mask in masks:
        meter.on_inputs((torch.ones(mask.shape, dtype=torch.int64),), {"attention_mask": mask})
    values = meter.collect(end()).read().values
    present = sum(int(mask.sum()) for mask in masks)
    assert values["padding"] == pytest.approx(1 - present / sum(mask.numel() for mask in masks))
    assert values.get("padded_left") == share


def test_micro_batches_count_by_their_samples_and_idle_ones_do_not():
    meter = LengthMeter()
    meter.on_inputs((torch.zeros(1, 8, dtype=torch.int64),), {}, 0)
    meter.on_inputs((torch.zeros(3, 2, dtype=torch.int64),), {}, 1)
    meter.on_inputs((torch.zeros(9, 9, dtype=torch.int64),), {}, 2)
    assert meter.collect(end(2)).read().values == {"sequence_length": (8 + 6) / 4}
