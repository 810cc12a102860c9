"""What a canary's forward pass runs, and what sets one worker apart."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from evidence.canary.test_schedule import results
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.evidence.canary.batch import capture_batch
from rankscope.evidence.canary.combine import compare_programs, sets_apart
from rankscope.evidence.canary.program import program_digest
from rankscope.evidence.canary.replay import run_batch
from rankscope.evidence.canary.verdict import CanaryCause, CanaryVerdict, describe_size, explain

CPU = torch.device("cpu")
ODD = 2


class Model(nn.Module):
    """Attention, dropout, a mask of its own, and a branch on what it computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.act = nn.GELU()
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 20)
        self.register_buffer("scale", torch.ones(8))
        self.mask = torch.ones(5, 5).tril() > 0
        self.threshold, self.times = -1e4, 1.0

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(ids)[:, None] * self.scale
        hidden = F.scaled_dot_product_attention(hidden, hidden, hidden, self.mask)[:, 0]
        if hidden.sum() > self.threshold:
            hidden = self.dropout(self.act(hidden)) * self.times
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())}


def dropout(model):
    model.dropout.p = 0.25


def mode(model):
    model.dropout.eval()


def activation(model):
    model.act = nn.SiLU()


def attribute(model):
    model.act.approximate = "tanh"


def patched(model):
    model.act.forward = lambda hidden: F.gelu(hidden) * 1.5


def mask(model):
    model.mask = torch.ones(5, 5) > 0


def branch(model):
    model.threshold = 1e9


def parameter(model):
    with torch.no_grad():
        model.head.bias[3] += 1


def buffer(model):
    model.scale[0] = 2.0


def frozen(model):
    model.head.bias.requires_grad_(False)


def hook(model):
    model.head.register_forward_hook(lambda head, args, output: output * 1.01)


def gradient(model):
    model.head.weight.register_hook(lambda gradient: gradient * 1.01)


def program(change=None) -> tuple[dict, int]:
    """Return what a worker runs, as it arrives at the root, and the digest of its result."""
    model = Model()
    if change is not None:
        change(model)
    batch = capture_batch((torch.arange(10).view(2, 5),), {}).plain()
    result = run_batch(model, batch, CPU, seed=1, record=True)
    plain = run_batch(model, batch, CPU, seed=1).read()
    assert result.program is not None
    assert result.read() == plain  # recording changes no bit
    return json.loads(json.dumps(result.program.read())), plain.digest


@pytest.fixture(scope="module")
def healthy():
    return program()


@pytest.mark.parametrize(
    ("change", "kinds", "words"),
    [
        (dropout, {"module", "operation"}, "p of dropout (0.25 on rank 2, 0.5 on the others)"),
        (mode, {"module", "operation"}, "the mode of dropout (evaluation on rank 2, training on"),
        (activation, {"module", "operation"}, "the class of act (SiLU on rank 2, GELU on the oth"),
        (attribute, {"module", "operation"}, "approximate of act ('tanh' on rank 2, 'none' on"),
        (patched, {"module", "operation"}, "forward of act (patched.<locals>.<lambda>"),
        (mask, {"operation"}, "a constant, test_program.py:"),
        (branch, {"module", "operation"}, "threshold of the whole model (1000000000.0 on rank 2"),
        (parameter, {"held"}, "head.bias"),
        (buffer, {"held"}, "scale"),
        (frozen, {"module"}, "what is frozen of head (bias on rank 2, nothing on the others)"),
        (hook, {"hook"}, "hooks of head (hook.<locals>.<lambda> on rank 2, none on the others)"),
        (gradient, set(), ""),
    ],
)
def test_what_one_worker_runs_otherwise_is_named(healthy, change, kinds, words):
    odd, digest = program(change)
    assert digest != healthy[1]
    programs = [healthy[0], healthy[0], odd, healthy[0]]
    found = compare_programs(programs, (ODD,))
    assert {str(one.kind) for one in found} == kinds
    assert words in (found[0].name if found else "")
    assert all(one.minority_ranks(np.zeros(4, int)) == (ODD,) for one in found)
    alike = program_digest(odd) == program_digest(healthy[0])
    assert alike == (kinds <= {"hook"})
    assert compare_programs(programs, (1,)) == ()  # it sets nobody else apart
    assert compare_programs([healthy[0]] * 4, (ODD,)) == ()


def test_another_backend_of_attention_is_a_setting_and_other_operations(healthy):
    with sdpa_kernel(SDPBackend.MATH):
        odd, _ = program()
    found = compare_programs([healthy[0], healthy[0], odd], (ODD,))
    assert [str(one.kind) for one in found] == ["operation", "setting"]
    assert "attention backends (math on rank 2, flash" in found[1].name


def test_what_follows_from_computed_values_is_no_other_code(healthy):
    """A device that computes another sum takes another branch of the same code."""

    def device(model):
        model.embedding.weight.data.abs_().mul_(-1e4)

    odd, _ = program(device)
    found = compare_programs([healthy[0], healthy[0], odd], (ODD,))
    assert "operation" not in {str(one.kind) for one in found}


def test_a_value_explains_only_where_it_sets_exactly_these_workers_apart():
    assert sets_apart([1, 1, 2, 1], (2,))
    assert not sets_apart([1, 3, 2, 1], (2,))
    assert not sets_apart([1, 1, 2, 1], (1, 2))
    assert sets_apart([1, 2], (0, 1))  # without a majority, any difference
    assert not sets_apart([1, 1], (0, 1))


KINDS = StateKind


@pytest.mark.parametrize(
    ("kinds", "cause"),
    [
        ((KINDS.MODULE, KINDS.SETTING, KINDS.OPERATION), CanaryCause.CODE),
        ((KINDS.SETTING, KINDS.OPERATION), CanaryCause.SETTINGS),
        ((KINDS.OPERATION, KINDS.HELD), CanaryCause.CODE),
        ((KINDS.HELD, KINDS.SETTING), CanaryCause.STATE),
        ((KINDS.SETTING,), CanaryCause.SETTINGS),
        ((KINDS.HOOK,), CanaryCause.HARDWARE),
        ((), CanaryCause.HARDWARE),
    ],
)
def test_code_comes_before_state_and_hardware(kinds, cause):
    none = np.zeros(4, bool)
    found = [StateDifference(kind, f"a {kind}", np.array([1, 1, 2, 1]), none) for kind in kinds]
    verdict = explain(CanaryVerdict(CanaryCause.HARDWARE, (ODD,), 0.1), found)
    assert (verdict.verdict, verdict.compared) == (cause, True)
    named = [f"a {kind}" for kind in kinds if kind is not KINDS.HOOK]
    assert sorted(verdict.reasons) == sorted(named)
    assert verdict.hooks == (("a hook",) if KINDS.HOOK in kinds else ())


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([1, 1, 0.81, 1], "the loss is 19 % lower, where rounding explains 0.01 %"),
        ([1, 1, 3, 1], "the loss is 200 % higher, where rounding explains 0.01 %"),
        ([2, 2, np.inf, 2], "the loss is not finite, the others' is 2, where rounding"),
        ([1, 1, 1 + 3e-7, 1], "loss and gradient differ by a relative 3e-07, no more than"),
    ],
)
def test_how_large_the_difference_is_against_rounding(losses, words):
    found = results([5, 5, 6, 5], losses=losses)
    assert words in describe_size(found, (ODD,))
    projected = describe_size(replace(found, projected=True), (ODD,))
    assert "projection of the outputs" in projected or "no more than" in projected


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([2, 3], "they differ by 20 %, where rounding explains 0.01 %"),
        ([2, 2 + 1e-7], "differ by a relative 2e-08, no more than another order of sums makes"),
    ],
)
def test_how_far_workers_without_a_majority_are_apart(losses, words):
    assert words in describe_size(results([5, 6], losses=losses), (0, 1))
