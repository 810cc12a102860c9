import json
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rankscope.evidence.canary.batch import capture_batch
from rankscope.evidence.canary.combine import compare_programs
from rankscope.evidence.canary.program import describe_module, program_digest
from rankscope.evidence.canary.replay import run_batch

CPU = torch.device("cpu")
ODD = 2
RANK = 0


class Model(nn.Module):
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
        if RANK > 1:
            hidden = hidden + 1
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())}


def dropout(model):
    model.dropout.p = 0.25


def patched(model):
    model.act.forward = lambda hidden: F.gelu(hidden) * 1.5


def mask(model):
    model.mask = torch.ones(5, 5) > 0


def parameter(model):
    with torch.no_grad():
        model.head.bias[3] += 1


def hook(model):
    model.head.register_forward_hook(lambda head, args, output: output * 1.01)


def gradient(model):
    model.head.weight.register_hook(lambda gradient: gradient * 1.01)


def on_rank(model, rank):
    forward = FunctionType(Model.forward.__code__, {**globals(), "RANK": rank})
    model.__class__ = type(Model.__name__, (Model,), {"forward": forward, "__module__": __name__})


def ranked(model):
    on_rank(model, 2)


def ranked_gradient(model):
    """The rank is read, and changes nothing."""
    on_rank(model, 1)
    gradient(model)


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
        (dropout, {"module", "operation"}, '"p" of dropout (0.25 on rank 2, 0.5 on the others)'),
        (patched, {"module", "operation"}, '"forward" of act (patched.<locals>.<lambda>'),
        (mask, {"operation"}, "a constant, test_program.py:"),
        (parameter, {"held"}, "head.bias"),
        (hook, {"hook"}, "hooks of head (hook.<locals>.<lambda> on rank 2, none on the others)"),
        (ranked, {"module", "operation"}, '"RANK" in forward of '),
        (ranked_gradient, {"hook"}, "hooks of head (gradient.<locals>.<lambda> on the gradient"),
        (gradient, {"hook"}, "hooks of head (gradient.<locals>.<lambda> on the gradient of weight"),
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
    assert (program_digest(odd) == program_digest(healthy[0])) == (kinds <= {"hook"})
    assert compare_programs(programs, (1,)) == ()  # it sets nobody else apart
    assert compare_programs([healthy[0]] * 4, (ODD,)) == ()


def in_processes(first, second):
    """Yield a model as two processes hold it: its sets have another order in each."""
    for order in (first, second):
        model = Model()
        model.config = SimpleNamespace(layers=2, _hash=hash(order))
        constants = (None, frozenset(order))
        forward = Model.forward.__code__
        own = type("Own", (Model,), {})
        own.forward = FunctionType(forward.replace(co_consts=forward.co_consts + constants), {})
        model.__class__ = own
        yield model


def test_what_differs_from_process_to_process_is_no_difference_of_code():
    one, other = in_processes((0, 8), (8, 0))
    assert repr(frozenset((0, 8))) != repr(frozenset((8, 0)))
    assert describe_module(one) == describe_module(other)
    other.config.layers = 3
    assert describe_module(one) != describe_module(other)
