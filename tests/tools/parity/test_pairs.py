from pathlib import Path
from types import SimpleNamespace

import pytest

from rankscope.tools.parity.compare import decide_resumed
from rankscope.tools.parity.reading import SideStep, distance, read_side
from rankscope.tools.parity.result import Kind
from rankscope.tools.parity.stages import first_layer_apart
from rankscope.tools.stages import Stage
from support.megatron_training import MISSING
from support.parity import TRAINING, Recordings, answer_of, layout, record

DEEPSPEED = str(Path(TRAINING).parent / "parity_scripts" / "deepspeed_loop.py")
MEGATRON = str(Path(DEEPSPEED).with_name("megatron_loop.py"))
PLAIN = str(Path(DEEPSPEED).with_name("plain_loop.py"))
SAVED = ("--batch", "4")
REPORTS = Path(TRAINING).parent / "reports"
ALONE = str(REPORTS / "r20_parts_called_alone.py")
COPIES = str(REPORTS / "r62_copied_before_the_reduction.py")
BY_HAND = str(Path(__file__).parents[2] / "integrations" / "run_scripts" / "train_pipeline.py")
DDP = ("--layout", "ddp")
LAYER, ALL, EXPERTS = "layers.1.up.weight", "all", ["experts.experts"]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    return Recordings(tmp_path_factory.mktemp("recordings"))


HEALTHY = {
    "ddp": "--layout ddp",
    "fsdp2": "--layout fsdp2",
    "fsdp2, after a pass without gradient": "--layout fsdp2 --evaluate",
    "fsdp2, plain tensors as state": "--layout fsdp2 --optimizer plain",
    "accumulation": "--accumulate 2",
    "tensor parallelism": "--layout tp",
    "pipeline": "--layout pp",
    "interleaved stages": "--layout pp_interleaved",
    "experts": "--layout ep --experts",
    "experts of one name": "--layout ep_local --experts",
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_layout_trains_as_one_process_does(recordings, name):
    words = HEALTHY[name].split()
    alone = [word for word in words if word in ("--experts", "--optimizer", "plain")]
    ranks = 2 if "--layout" in words else 1
    answer = answer_of(recordings, layout(1, *alone), layout(ranks, *words))
    assert answer.kind is Kind.SAME, (answer.headline, answer.differences[:3])
    assert (answer.num_steps, answer.exit_code) == (3, 0)
    smallest, largest = answer.could_miss["gradient"]
    assert 0 < smallest <= largest < 1e-4


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("alone", "words", "fault", "stage", "names", "look"),
    [
        ("", "ddp", "loss_times_workers", Stage.GRADIENT, ALL, "× 2"),
        ("", "ddp", "layer_update", Stage.UPDATE, [LAYER], "× 2"),
        ("", "pp", "layer_update", Stage.UPDATE, [LAYER], ""),
        ("", "ddp", "counter_ahead", Stage.STATE, None, ""),
        ("", "ddp", "same_samples", Stage.SAMPLES, None, ""),
        ("", "ddp", "labels_shifted", Stage.LABELS, None, ""),
        ("", "ddp", "one_layer_start", Stage.START, [LAYER], "× 1.01"),
        ("", "ddp", "half_shard", Stage.GRADIENT, [LAYER], "zero in B, in the first and second"),
        ("--clip 0.3", "fsdp2", "local_clip", Stage.CLIPPING, ALL, ""),
        ("--experts", "ep", "experts_not_divided", Stage.GRADIENT, EXPERTS, "× 2"),
        ("--experts", "ep_local", "experts_not_divided", Stage.GRADIENT, EXPERTS, "× 2"),
    ],
)
def test_a_fault_is_found_at_its_stage(recordings, alone, words, fault, stage, names, look):
    more = alone.split()
    faulty = layout(2, "--layout", words, *more, "--fault", fault)
    answer = answer_of(recordings, layout(1, *more), faulty)
    assert (answer.kind, answer.stage, answer.step) == (Kind.DIFFERENT, stage, 0)
    found = [each.name for each in answer.differences]
    assert names is None or (len(found) == answer.num_tensors if names == ALL else found == names)
    assert all(each.look.startswith(look) for each in answer.differences)
    clips = any(note.startswith("B clips a norm of") for note in answer.notes)
    assert clips or stage is not Stage.CLIPPING


@pytest.mark.ranks
def test_replicas_that_reduce_by_themselves_have_the_samples_of_all(recordings):
    words = ("--layout", "hsdp", "--fault", "half_mesh")
    answer = answer_of(recordings, layout(1), layout(4, *words), 1)
    assert (answer.stage, len(answer.differences)) == (Stage.GRADIENT, 28)
    assert any("rank 2, 3 hold" in note or "ranks 2, 3 hold" in note for note in answer.notes)


@pytest.mark.ranks
def test_a_teacher_that_follows_in_each_pass_is_found_at_the_next_start(recordings):
    sides = layout(1, "--teacher"), layout(1, "--teacher", "--accumulate", "2")
    assert answer_of(recordings, *sides, 2).kind is Kind.SAME
    wrong = layout(1, "--teacher", "--accumulate", "2", "--fault", "teacher_each_pass")
    answer = answer_of(recordings, sides[0], wrong, 2)
    assert (answer.stage, answer.step) == (Stage.START, 1)
    assert [each.name for each in answer.differences] == ["teacher.weight"]


@pytest.mark.ranks
def test_tied_weights_on_two_stages_are_one_parameter(recordings):
    rules = [("embed.weight", ["head.weight"])]
    words = ("--layout", "pp", "--tied")
    sides = layout(1, "--tied"), layout(2, *words)
    assert answer_of(recordings, *sides, 2, rules_b=rules).kind is Kind.SAME
    apart = layout(2, *words, "--fault", "tied_apart")
    answer = answer_of(recordings, sides[0], apart, 2, rules_b=rules)
    assert (answer.stage, answer.differences[0].name) == (Stage.GRADIENT, "embed.weight")


@pytest.mark.ranks
def test_a_pipeline_has_the_samples_of_its_first_stage_and_the_losses_of_its_last(recordings):
    side = recordings.side(layout(2, "--layout", "pp"), "B", 3)
    assert (side.workers, side.passes) == (1, 2)
    for step in side.steps.values():
        assert (len(step.samples), step.labels[0], len(step.losses)) == (8, 128, 2)


OUTPUT = "The first output that differs in the forward pass is that of "
NOWHERE = "No layer's output differs, nor the gradient of"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("words", "fault", "expected"),
    [
        ("ddp", "epsilon", f"{OUTPUT}layers.0.norm_1: "),
        ("pp", "attention_scale", f"{OUTPUT}layers.0.o_proj: "),
        (
            "ddp",
            "layer_backward",
            "The first gradient of an output that differs in the backward pass is that of "
            "layers.1.up: × 1/2.",
        ),
        ("ddp", "layer_gradient", NOWHERE),
        ("ddp", "loss_times_workers", NOWHERE),
    ],
)
def test_the_first_layer_that_computes_something_else_is_named(recordings, words, fault, expected):
    faulty = layout(2, "--layout", words, "--fault", fault)
    answer = answer_of(recordings, layout(1), faulty, 2, bisects=True)
    assert answer.kind is Kind.DIFFERENT
    assert answer.notes[0].startswith(expected)


@pytest.mark.ranks
def test_outputs_of_parts_of_a_layer_are_left_out_and_named(recordings):
    words = ("--layout", "tp", "--fault", "attention_scale")
    answer = answer_of(recordings, layout(1), layout(2, *words), 2, bisects=True)
    assert "that of layers.0.o_proj" in answer.notes[0]
    assert answer.notes[1].startswith("Outputs that cannot be compared: layers.0.q_proj, ")


def test_where_no_output_can_be_compared_no_cause_is_named():
    outputs = [{"up": [4, 8], "norm": [4]}, {"up": [2, 8], "norm": [2]}]
    for sides, expected in (
        (outputs, "No layer's output can be compared: up, norm."),
        ((None, outputs[1]), "Layers were not recorded in A: give its command."),
    ):
        steps = [SideStep(facts={} if each is None else {"outputs": each}) for each in sides]
        names = [SimpleNamespace(name=name) for name in "AB"]
        pair = SimpleNamespace(a=steps[0], b=steps[1], sides=names)
        assert first_layer_apart(pair) == (expected,)


@pytest.mark.ranks
def test_a_training_whose_outputs_are_read_keeps_its_bits(recordings):
    sides = [recordings.side(layout(2, *DDP), "B", 2, bisects=each) for each in (False, True)]
    plain, read = (side.steps[1].figures for side in sides)
    assert not {"output", "output gradient"} & set(plain)
    layers = {"embed", "head", "layers.1.norm_2"}
    assert layers < set(read["output"])
    assert layers < set(read["output gradient"])
    for name, whole in plain["update"].items():
        assert distance(whole, read["update"][name]) == 0


@pytest.mark.ranks
def test_parts_that_are_called_alone_are_recorded_as_the_model_that_they_are_of(recordings):
    side = recordings.side(layout(1, script=ALONE), "A", 2)
    names = set(side.steps[0].figures["gradient"])
    assert {"network.features.0.weight", "discriminator.2.bias"} < names
    assert names == set(side.shapes) == set(side.steps[1].figures["update"])


@pytest.mark.ranks
def test_an_optimizer_of_a_loops_own_copies_is_compared(recordings):
    alone = layout(1, "--samples", "8", "--right", script=COPIES)
    answer = answer_of(recordings, alone, layout(2, "--right", script=COPIES), 2)
    assert answer.kind is Kind.SAME, answer.headline
    answer = answer_of(recordings, alone, layout(2, script=COPIES), 2)
    assert (answer.kind, answer.stage, answer.step) == (Kind.DIFFERENT, Stage.GRADIENT, 0)


@pytest.mark.ranks
def test_stages_of_a_pipeline_by_hand_end_together(tmp_path):
    by_hand = layout(4, script=BY_HAND, variables={"TRAINED": str(tmp_path)})
    code, said = record(tmp_path, by_hand, 2)
    assert code == 0, said
    side = read_side(tmp_path, "A")
    assert (sorted(side.steps), side.workers) == ([0, 1], 2)
    steps = side.steps.values()
    assert {(len(s.samples), s.labels[0], len(s.losses)) for s in steps} == {(8, 8, 2)}
    assert set(side.steps[0].figures["gradient"]) == {"0.weight", "0.bias", "weight", "bias"}


@pytest.mark.ranks
def test_zero_3_trains_as_zero_0_does(recordings):
    sides = [layout(2, "--batch", "4", "--stage", str(stage), script=DEEPSPEED) for stage in (0, 3)]
    answer = answer_of(recordings, *sides, 2)
    assert (answer.kind, answer.num_steps) == (Kind.SAME, 2), answer.headline
    figures = recordings.side(sides[1], "B", 2).steps[0].figures
    kinds = ("start", "gradient", "update", "moment exp_avg")
    assert [len(figures[kind]) for kind in kinds] == [6] * 4


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, recordings):
    folder = tmp_path_factory.mktemp("saved")
    saving = layout(2, *SAVED, "--folder", str(folder), "--save-at", "2", script=PLAIN)
    return folder, recordings.side(saving, "B", 2)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("forget", "stage", "words"),
    [
        ("", None, "The same within rounding, over 2 steps."),
        ("optimizer", Stage.STATE, "another exp_avg before its first call"),
        ("scaler", Stage.STATE, "its scale is 2048.0 in A and 1024.0 in B"),
        ("permuted", Stage.RANDOM, "by a permutation: rank 0 holds that of rank 1; rank 1 holds"),
        ("samples", Stage.SAMPLES, "B repeats those of A's step 0"),
    ],
)
def test_a_resumption_is_compared_with_what_went_on(recordings, interrupted, forget, stage, words):
    folder, ended = interrupted
    resuming = ("--folder", str(folder), "--resume", *(("--forget", forget) if forget else ()))
    resumed, going_on = (layout(2, *SAVED, *more, script=PLAIN) for more in (resuming, ()))
    answer = decide_resumed(
        recordings.side(going_on, "A", 4),
        ended,
        lambda: recordings.side(resumed, "B", 2, first_step=2),
        lambda side, eps: recordings.side(going_on, "moved", 4, eps=eps),
    )
    assert answer.stage is stage, answer.headline
    assert words in answer.headline


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.skipif(MISSING, reason="megatron-core is not installed")
def test_megatron_cores_distributed_optimizer_trains_as_its_plain_one_does(recordings):
    alone = layout(1, script=MEGATRON)
    words = ("--batch", "4", "--distributed")
    assert answer_of(recordings, alone, layout(2, *words, script=MEGATRON), 2).kind is Kind.SAME
    wrong = layout(2, *words, "--fault", "layer_halved", script=MEGATRON)
    answer = answer_of(recordings, alone, wrong, 2)
    assert (answer.kind, answer.stage, answer.step) == (Kind.DIFFERENT, Stage.GRADIENT, 0)
    assert "0.weight" in [each.name for each in answer.differences]


@pytest.mark.ranks
def test_dropout_is_not_comparable_unless_it_is_switched_off(recordings):
    drop = ("--dropout", "0.1")
    sides = layout(1, *drop), layout(1, *drop, "--accumulate", "2")
    answer = answer_of(recordings, *sides)
    assert (answer.kind, answer.exit_code) == (Kind.NOT_COMPARABLE, 2)
    assert "layers.0.dropout" in answer.headline
    assert "--no-dropout" in answer.headline
    assert answer_of(recordings, *sides, no_dropout=True).kind is Kind.SAME
