import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from rankscope import Run
from rankscope.agent.host_summary import as_columns
from rankscope.bus.finding import Severity
from rankscope.bus.messages import Layout
from rankscope.bus.step import StepReport
from rankscope.evidence.environment import judge
from rankscope.evidence.environment.probe import ModeMeter
from rankscope.stats.arrays import MISSING_INT
from rankscope.wrappers.facts import FLAGS_EVERY, PrecisionMeter, environment_facts, precision_words
from support.loops import train_watched
from support.ranks import run_ranks
from support.stepping import evidence_of, named_message, observe, run, words
from support.streams import gathered

FACTS = {
    "torch": "2.13.0",
    "device": "Accelerator 9",
    "deterministic_algorithms": False,
    "revision": "0123456789abcdef",
    "revision_changed": False,
    "vocabulary": 12345,
    "NCCL_ALGO": "Ring",
    "LOCAL_RANK": "0",
    "device_memory": 10,
}
BF16 = [7, 7, 8, 7]


def facts(width=4, **odd):
    return [dict(FACTS) for _ in range(width - 1)] + [{**FACTS, **odd}]


def told(of, num_steps=5, **columns):
    return run(judge.EnvironmentMismatch(of), num_steps, **columns)


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"torch": "2.12.0"}, "torch 2.12.0 on rank 3, 2.13.0 on the others"),
        ({"deterministic_algorithms": True}, "deterministic algorithms on on rank 3, off on"),
        ({"revision": "fedcba9876543210"}, "source revision fedcba9876 on rank 3, 0123456789 on"),
        ({"vocabulary": 999}, "another vocabulary on rank 3"),
        ({"NVIDIA_TF32_OVERRIDE": "0"}, "NVIDIA_TF32_OVERRIDE 0 on rank 3, not set on the others"),
    ],
)
def test_the_odd_rank_is_told_once_with_what_differs(odd, text):
    [found] = told(facts(**odd))
    assert (found.cause, found.severity, found.ranks) == (judge.CAUSE, Severity.WARNING, (3,))
    assert text in words(found)
    json.dumps(found.numbers)


@pytest.mark.parametrize("odd", [{"NCCL_ALGO": "Tree"}, {"driver": "570.1"}])
def test_what_should_not_change_results_is_a_note(odd):
    of = [{"driver": "560.1", **own} for own in facts(**odd)]
    assert [one.severity for one in told(of)] == [Severity.NOTE]


@pytest.mark.parametrize(
    "of",
    [
        *((), facts(), [*facts(3), {}]),  # equal, or unknown
        facts(LOCAL_RANK="3"),
        facts(device_memory=11),
        facts(TORCHINDUCTOR_CACHE_DIR="/mnt/3"),
        facts(NCCL_SOCKET_IFNAME="eth3"),
    ],
)
def test_what_is_equal_or_what_every_rank_has_for_itself_is_no_finding(of):
    assert told(of) == []


def test_another_precision_is_told_after_three_steps_in_a_row():
    detector = judge.EnvironmentMismatch()
    assert run(detector, 2, precision=BF16) == []
    assert observe(detector, 2, precision=[7] * 4) == []
    assert run(detector, 2, start=3, precision=BF16) == []
    (found,) = observe(detector, 5, precision=BF16)
    assert (found.cause, found.severity, found.ranks) == (judge.CAUSE, Severity.WARNING, (2,))
    assert (found.first_step, found.last_step) == (3, 5)
    assert "in the forward pass of rank 2, types, autocast or torch.backends differ" in words(found)


def test_a_precision_that_changes_on_all_workers_together_is_no_finding():
    detector = judge.EnvironmentMismatch()
    for step in range(30):
        assert observe(detector, step, precision=[step] * 4) == []


CPU = torch.device("cpu")


def precision_code(module, device):
    return PrecisionMeter(module, device).code(0)


@pytest.fixture
def model():
    return torch.nn.Linear(2, 2)


def test_autocast_shows_and_so_does_its_type(model):
    plain = precision_code(model, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        in_bf16 = precision_code(model, CPU)
    with torch.autocast("cpu", torch.float16):
        code = precision_code(model, CPU)
        assert precision_words(model, CPU)["autocast"] == "float16"
    assert len({plain, in_bf16, code}) == 3
    assert precision_code(model, CPU) == plain


def test_it_can_be_read_where_old_and_new_settings_of_tf32_are_mixed(model):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        torch.set_float32_matmul_precision("high")
        matmul.fp32_precision = "ieee"
        with pytest.raises(RuntimeError):
            _ = matmul.allow_tf32  # what reading it the old way would do
        assert precision_words(model, CPU)["tf32_matmul"] == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before
    assert precision_words(model, CPU)["tf32_matmul"] == "ieee"


@pytest.fixture
def untouched():
    """Settings as they are in a new process, which those of a single backend keep others from."""
    matmuls = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [matmul.fp32_precision for matmul in matmuls]
    for matmul in matmuls:
        matmul.fp32_precision = "none"
    yield
    for matmul, precision in zip(matmuls, before, strict=True):
        matmul.fp32_precision = precision


@pytest.mark.usefixtures("untouched")
def test_it_can_be_read_where_only_the_new_settings_of_tf32_are_used(model):
    backend = torch.backends.cuda.matmul
    code, before = precision_code(model, CPU), backend.fp32_precision
    backend.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    words = precision_words(model, CPU)
    assert (words["float32_matmul"], words["tf32_matmul"]) == ("mixed", "tf32")
    assert precision_code(model, CPU) == precision_code(model, CPU) != code
    assert environment_facts(CPU)["tf32_matmul"] == "tf32"
    backend.fp32_precision = before
    assert precision_code(model, CPU) == code


def train_with_another_kernel(rank, run_dir):
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(step):
        with sdpa_kernel(SDPBackend.MATH) if rank == 1 else nullcontext():
            return model(torch.randn(4, 2)).square().mean()

    train_watched(model, optimizer, run_dir, 5, loss_of)


@pytest.mark.ranks
def test_settings_around_the_forward_pass_of_one_rank_are_named(tmp_path):
    run_ranks(train_with_another_kernel, 3, str(tmp_path / "run"))
    [found] = [f for f in Run.open(tmp_path / "run").findings() if f.cause == "env.mismatch"]
    assert found.ranks == (1,)
    assert "in the forward pass of rank 1, attention backends: math on rank 1" in found.explanation
    assert "autocast" not in found.explanation
    assert "sdpa_kernel" in found.next_check


def make_model() -> nn.Module:
    block = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    return nn.ModuleDict({"first": block, "second": nn.Sequential(nn.Linear(2, 2), nn.Dropout())})


class Workers:
    def __init__(self) -> None:
        self.models = [make_model() for _ in range(4)]
        self.meters = [ModeMeter(one) for one in self.models]
        self.combiner = judge.make_combiner(Layout(num_workers=4))
        self.detector = judge.DifferentModes()
        self.sent = 0

    def step(self, number: int):
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
    meter = ModeMeter(module)
    meter.read(0)
    return meter.take()[0]["dropout_off"]


def test_dropout_counts_beside_trained_parameters():
    one = make_model()
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
        ([1] * 4, judge.DROPOUT, "in evaluation mode in training steps since step 0"),
        ([2] * 4, judge.EVALUATES, "in evaluation mode in training steps since step 0, and was in"),
        ([1, 1, 1, 0], None, ""),
    ],
)
def test_what_is_off_everywhere_is_a_note(off, key, said):
    told = run(judge.EvaluationMode(), 3, width=4, dropout_off=off)
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
    assert "first and second.1 (evaluation on rank 2, training on the others)" in words(found)
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
