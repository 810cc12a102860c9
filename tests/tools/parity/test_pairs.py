"""Pairs of layouts on real ranks: healthy ones are the same, faults are found where they are."""

import pytest

from rankscope.tools.parity.result import Kind, Phase
from support.parity import Recordings, answer_of, layout

DDP = ("--layout", "ddp")
LAYER = "layers.1.up.weight"


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    return Recordings(tmp_path_factory.mktemp("recordings"))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, DDP),
        (2, ("--layout", "fsdp2")),
        (1, ("--accumulate", "2")),
        (2, ("--layout", "tp")),
    ],
    ids=["ddp", "fsdp2", "accumulation", "tensor parallelism"],
)
def test_a_healthy_layout_trains_as_one_process_does(recordings, ranks, words):
    answer = answer_of(recordings, layout(1), layout(ranks, *words))
    assert answer.kind is Kind.SAME, (answer.headline, answer.differences[:3])
    assert answer.num_steps == 3
    assert answer.could_miss["gradient"][1] < 1e-4


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "stage", "names", "look"),
    [
        ("loss_times_workers", Phase.GRADIENT, None, "× 2"),
        ("layer_update", Phase.UPDATE, [LAYER], "× 2"),
        ("counter_ahead", Phase.STATE, None, ""),
        ("same_samples", Phase.SAMPLES, None, ""),
        ("labels_shifted", Phase.LABELS, None, ""),
        ("one_layer_start", Phase.START, [LAYER], "× 1.01"),
        (
            "half_shard",
            Phase.GRADIENT,
            [LAYER],
            "zero in B, in the first and second quarter",
        ),
    ],
)
def test_a_fault_is_found_at_its_stage(recordings, fault, stage, names, look):
    answer = answer_of(recordings, layout(1), layout(2, *DDP, "--fault", fault))
    assert (answer.kind, answer.stage, answer.step) == (Kind.DIFFERENT, stage, 0)
    found = [each.name for each in answer.differences]
    assert names is None or found == names
    assert all(each.look.startswith(look) for each in answer.differences)
    if fault == "loss_times_workers":
        assert len(found) == answer.num_tensors == 28


@pytest.mark.ranks
def test_clipping_by_the_norm_of_a_shard_is_found_as_clipping(recordings):
    clip = ("--clip", "0.3")
    words = ("--layout", "fsdp2", *clip, "--fault", "local_clip")
    answer = answer_of(recordings, layout(1, *clip), layout(2, *words))
    assert (answer.kind, answer.stage, answer.step) == (Kind.DIFFERENT, Phase.CLIPPING, 0)
    assert len(answer.differences) == answer.num_tensors
    assert any(note.startswith("B clips a norm of") for note in answer.notes)


@pytest.mark.ranks
def test_dropout_is_not_comparable_unless_it_is_switched_off(recordings):
    drop = ("--dropout", "0.1")
    sides = layout(1, *drop), layout(1, *drop, "--accumulate", "2")
    answer = answer_of(recordings, *sides)
    assert answer.kind is Kind.NOT_COMPARABLE
    assert "layers.0.dropout" in answer.headline
    assert answer_of(recordings, *sides, no_dropout=True).kind is Kind.SAME
