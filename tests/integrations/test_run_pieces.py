import builtins
import sys
import threading
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from rankscope.integrations.beginning import agree, bare_models
from rankscope.integrations.catch import Ending
from rankscope.wrappers.backward_loss import unscaled


def ask_all(problems, patience):
    """Return each rank's answer; None in ``problems`` is a rank that never asks."""
    store, answers = dist.HashStore(), {}

    def ask(rank, problem):
        answers[rank] = agree(store, len(problems), problem, patience)

    threads = [
        threading.Thread(target=ask, args=(rank, problem))
        for rank, problem in enumerate(problems)
        if problem is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_all_ranks_begin_or_none_does():
    assert ask_all(["", "", ""], 60) == {0: "", 1: "", 2: ""}
    assert ask_all(["", "no", ""], 60) == dict.fromkeys(range(3), "no")
    late = ask_all(["", None, ""], 0.1)
    assert set(late) == {0, 2}
    assert late[0] == late[2]
    assert "2 of 3 ranks" in late[0]


LOGITS = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.25, 3.0]])
LABELS = torch.tensor([0, 2])


def mean(logits):
    return F.cross_entropy(logits, LABELS)


def total(logits):
    return F.cross_entropy(logits, LABELS, reduction="sum")


def masked(logits):
    return (F.cross_entropy(logits, LABELS, reduction="none") * torch.ones(2)).sum()


@pytest.mark.parametrize(
    ("make", "value", "factor", "constant"),
    [
        (mean, mean, None, None),
        (lambda x: torch.tensor(1024.0) * (mean(x) / 3.0), mean, 1024 / 3, None),
        (lambda x: (mean(x).double() * 2).view(1) * 3, mean, 6, None),
        (lambda x: total(x) / 2, total, 0.5, 0.5),
        (lambda x: masked(x) / torch.tensor(2) / 4, masked, 0.125, 0.125),
        (lambda x: torch.tensor(1024.0) * total(x) * torch.tensor(3.0), total, 3072, 3.0),
        (lambda x: masked(x) / torch.tensor(5) * 5, lambda x: masked(x) / 5, 5, None),
        (lambda x: mean(x) / 5 * 5, mean, None, None),
        (total, total, None, 1.0),
        (lambda x: mean(x) + x.square().mean(), lambda x: mean(x) + x.square().mean(), None, 1.0),
    ],
)
def test_what_scales_a_loss_is_read_from_its_graph(make, value, factor, constant):
    logits = LOGITS.clone().requires_grad_()
    loss, found, found_constant, *_ = unscaled(make(logits), {})
    assert (None if found is None else pytest.approx(float(found))) == factor
    assert found_constant == (constant if constant is None else pytest.approx(constant))
    expected = value(logits).detach().item()
    assert loss.detach().item() / float(found or 1) == pytest.approx(expected, rel=1e-6)


def joined(own, others, factor):
    """Return a mean over pairs of the rows of three ranks, times a factor."""
    rows = torch.cat([own, others])
    return (rows @ rows.T).square().mean() * factor


@pytest.mark.parametrize(
    ("others", "factor", "found"),
    [
        (torch.ones(8, 3), 3, None),  # undone by the mean over three workers
        (torch.ones(8, 3), 2, 2),
        (torch.ones(8, 3, requires_grad=True) * 1, 3, 3),  # gathered with a gradient
        (torch.ones(0, 3), 3, 3),
    ],
)
def test_a_factor_that_undoes_the_mean_over_gathered_rows_is_part_of_the_loss(
    others, factor, found
):
    own = torch.ones(4, 3, requires_grad=True) * 2
    assert unscaled(joined(own, others, factor), {own.grad_fn: None}).factor == found
    if found is None:  # the mean of a sum of two, as in CLIP
        both = joined(own, torch.ones(4, 3), 1) + joined(own, torch.ones(4, 3), 1)
        assert unscaled(both / 2 * 2, {own.grad_fn: None}).factor is None


def test_copies_of_a_model_that_an_optimizer_updates_show_the_model():
    model, other = nn.Linear(3, 2).bfloat16(), nn.Linear(3, 2).bfloat16()
    around = nn.Sequential(model)
    copies = [nn.Parameter(p.detach().float() + 1e-3) for p in reversed([*model.parameters()])]
    optimizer = torch.optim.SGD(copies, lr=1)
    assert {id(found) for found in bare_models([optimizer])} == {id(around), id(model)}
    teacher = deepcopy(model)
    assert id(teacher) in {id(found) for found in bare_models([optimizer])}, "none has a gradient"
    alike = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    assert bare_models([torch.optim.SGD(alike, lr=1)]) == [], "a call may be given these in place"
    for each in (model, other):
        each(torch.ones(3, dtype=torch.bfloat16)).sum().backward()
    assert {id(found) for found in bare_models([optimizer])} == {id(around), id(model)}
    copies[0].data.fill_(9)
    assert bare_models([optimizer]) == [], "of their shapes alone"


# How the end of a script decides whether its run is complete, without ranks ---------------------


class Watching:
    """A training that is being watched, as far as its end goes."""

    scope = SimpleNamespace(run_dir=None)

    def close(self, error):
        self.error = error


@pytest.fixture
def ending(monkeypatch):
    """Return the end of a script in which something is watched; Python is put back after it."""
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(type(builtins.exit), "__call__", type(builtins.exit).__call__)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(close=lambda: None))
    monkeypatch.setattr("atexit.register", lambda function: None)
    ending = Ending()
    ending.attach(Watching())
    ending.notice_exit_codes()
    return ending


def closed_with(ending):
    watching = ending._watching
    ending._finish()
    return watching.error


@pytest.mark.parametrize(("name", "code"), [("sys.exit", 3), ("exit", "a message"), ("quit", None)])
def test_a_script_that_ends_itself_with_a_code_is_noticed(ending, name, code):
    leave = sys.exit if name == "sys.exit" else getattr(builtins, name)
    with pytest.raises(SystemExit) as raised:
        leave(code)
    assert raised.value.code == code
    error = closed_with(ending)
    assert (error.code if code else error) == (code or None)
