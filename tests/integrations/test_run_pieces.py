"""The parts of ``rankscope run``, without ranks."""

import json
import os
import sys
import threading
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from rankscope.errors import UsageError
from rankscope.integrations import catch
from rankscope.integrations.backward_loss import unscaled
from rankscope.integrations.beginning import CallerContext, agree, bare_models
from rankscope.integrations.hooks import AfterImport, CallerHook, CallHook
from rankscope.integrations.run_script import (
    PID_VARIABLE,
    STARTUP,
    VARIABLE,
    ScriptJob,
    become,
    command_for,
    interpreter_flags,
    name_of,
)


@pytest.mark.parametrize(
    ("head", "flags"),
    [
        (["python", "-m", "rankscope"], []),
        (["python", "-u", "-m", "rankscope"], ["-u"]),
        (["python", "-um", "rankscope"], ["-u"]),
        (["python", "-X", "dev", "-W", "error", "-mrankscope"], ["-X", "dev", "-W", "error"]),
        (["python", "/bin/rankscope"], []),
        (["python", "-Bsu", "/bin/rankscope"], ["-Bsu"]),
        (["python"], []),
    ],
)
def test_flags_of_the_interpreter_are_kept(head, flags):
    arguments = ["run", "--every", "2", "-m", "train"]
    assert interpreter_flags([*head, *arguments], arguments) == flags


def test_what_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rankscope", "run"])
    script = tmp_path / "a script.py"
    script.write_text("")
    original = ["python", "-u", "-m", "rankscope", "run"]
    python = [sys.executable, "-u"]
    for words, module, command in [
        ([str(script), "--help", "-x y"], False, [*python, str(script), "--help", "-x y"]),
        (["project.train", "--lr", "3"], True, [*python, "-m", "project.train", "--lr", "3"]),
        (["sh", "-c", "true"], False, ["sh", "-c", "true"]),
    ]:
        first, *rest = command_for(words, module=module, original=original)
        assert [Path(first).name, *rest] == [Path(command[0]).name, *command[1:]]
    with pytest.raises(UsageError, match=r"'trian\.py', which is neither a file"):
        command_for(["trian.py"], module=False, original=original)
    with pytest.raises(UsageError, match="got nothing"):
        command_for([], module=False, original=original)
    assert name_of(["bash", "start.sh"], module=False) == "bash"


def test_a_job_goes_through_the_environment(monkeypatch, tmp_path):
    job = ScriptJob(str(tmp_path), "train", {"every": 2, "plan": {"seed": 1}})
    made = job.to_environment({"PYTHONPATH": os.pathsep.join(["a", "", str(STARTUP)]), "B": "1"})
    assert made["PYTHONPATH"].split(os.pathsep) == [str(STARTUP), "a"]
    assert made[PID_VARIABLE] == str(os.getpid())
    assert json.loads(made[VARIABLE])["options"]["every"] == 2
    assert job.to_environment({})["PYTHONPATH"] == str(STARTUP)
    monkeypatch.setenv(VARIABLE, made[VARIABLE])
    assert ScriptJob.of_this_process() == job


def test_a_command_that_cannot_be_started_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = []

    def fail(path, words, environment):
        made.extend(tmp_path.iterdir())
        assert json.loads(environment[VARIABLE])["unreported"] == str(made[0])
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.execve", fail)
    with pytest.raises(UsageError, match="cannot start /train: Permission denied"):
        become(["/train"], ScriptJob(str(tmp_path / "run"), "train"))
    assert len(made) == 1
    assert list(tmp_path.iterdir()) == []


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


def test_a_rank_that_comes_too_late_gets_the_same_answer():
    store = dist.HashStore()
    first = agree(store, 2, "", 0.05)
    assert "1 of 2 ranks" in first
    assert agree(store, 2, "", 60) == first


class Plain(nn.Module):
    def forward(self, x):
        raise ValueError("inside")


class Own(nn.Module):
    def __call__(self, x):
        return "own", x


@pytest.mark.parametrize("kind", [Plain, Own])
def test_a_call_hook_is_never_on_the_stack_and_leaves_nothing(kind):
    before, seen = dict(vars(kind)), []
    hook = CallHook(kind, seen.append)
    model = kind()
    assert kind.__call__ is (before.get("__call__") or nn.Module.__call__)
    if kind is Own:
        assert model(1) == ("own", 1)
    else:
        with pytest.raises(ValueError, match="inside") as raised:
            model(1)
        names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        assert names[1:] == ["_wrapped_call_impl", "_call_impl", "forward"]
    assert seen == [model]
    hook.remove()
    assert dict(vars(kind)) == before
    hook.remove()


def test_a_hook_on_a_class_is_one_on_its_subclasses():
    class Below(Plain):
        pass

    seen = []
    hook = CallHook(Plain, lambda model: (seen.append(model), hook.remove()))
    for _ in range(2):
        with pytest.raises(ValueError, match="inside"):
            Below()(1)
    assert len(seen) == 1


def test_a_caller_is_seen_from_below():
    def divide(a, b):
        return a / b

    def call(tensors):
        return seen(tensors, 0)

    lines = []
    seen = CallerHook(divide, lambda frame: lines.append(dict(frame.f_locals)))
    with pytest.raises(ZeroDivisionError) as raised:
        call(8)
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert names[1:] == ["call", "divide"]
    assert lines == [{"tensors": 8, "seen": seen}]


def test_modules_are_acted_on_after_their_import(tmp_path, monkeypatch):
    for name in ("run_piece_a", "run_piece_b"):
        (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    watcher = AfterImport(
        {"run_piece_a": lambda module: seen.append(module.value), "json": seen.append}
    )
    watcher.install()
    assert seen == [json]
    import run_piece_a
    import run_piece_b  # noqa: F401

    assert seen == [json, 1]
    assert "exec_module" not in vars(run_piece_a.__loader__)
    watcher.remove()
    assert watcher not in sys.meta_path
    del sys.modules["run_piece_a"], sys.modules["run_piece_b"]


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
        (lambda x: mean(x) / 4, mean, 0.25, None),
        (lambda x: torch.tensor(1024.0) * (mean(x) / 3.0), mean, 1024 / 3, None),
        (lambda x: (mean(x).double() * 2).view(1) * 3, mean, 6, None),
        (lambda x: total(x) / 2, total, 0.5, 0.5),
        (lambda x: torch.tensor(1024.0) * total(x) / 2, total, 512, 0.5),
        (lambda x: masked(x) / torch.tensor(2) / 4, masked, 0.125, 0.125),
        (lambda x: total(x) * torch.tensor(0.3), total, 0.3, 0.3),
        (lambda x: torch.tensor(1024.0) * total(x) * torch.tensor(3.0), total, 3072, 3.0),
        (lambda x: masked(x) / torch.tensor(5) * 5, lambda x: masked(x) / 5, 5, None),
        (lambda x: mean(x) / 5 * 5, mean, None, None),
        (total, total, None, 1.0),
        (lambda x: mean(x) + x.square().mean(), lambda x: mean(x) + x.square().mean(), None, 1.0),
        (lambda x: mean(x) * x.mean(), lambda x: mean(x) * x.mean(), None, 1.0),
        (lambda x: -mean(x), lambda x: -mean(x), None, 1.0),
    ],
)
def test_what_scales_a_loss_is_read_from_its_graph(make, value, factor, constant):
    logits = LOGITS.clone().requires_grad_()
    loss, found, found_constant, *_ = unscaled(make(logits), {})
    assert (None if found is None else pytest.approx(float(found))) == factor
    assert found_constant == (constant if constant is None else pytest.approx(constant))
    expected = value(logits).detach().item()
    assert loss.detach().item() / float(found or 1) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "divisor"),
    [
        (total, 1.0),
        (lambda x: total(x) / torch.tensor(5.0), 5.0),
        (lambda x: 4 * total(x) / torch.tensor(5.0), 1.25),
        (lambda x: (masked(x) / 2).double() * 8 / torch.tensor(5.0), 1.25),
        (lambda x: mean(x) / torch.tensor(5.0), None),
        (lambda x: torch.tensor(3.0) * total(x) / torch.tensor(5.0), None),
    ],
)
def test_the_divisor_of_a_sum_over_tokens_is_read_from_its_graph(make, divisor):
    found = unscaled(make(LOGITS.clone().requires_grad_()), {}).summed
    assert (found is None) == (divisor is None)
    if found is not None:
        assert [float(number) for number in found] == pytest.approx([2.0, divisor])


def test_a_loss_that_the_model_returned_is_taken_as_it_is():
    loss = mean(LOGITS.clone().requires_grad_())
    found, factor, constant, *_ = unscaled(torch.tensor(8.0) * loss / 3, {loss.grad_fn: loss})
    assert found is loss
    assert (factor, constant) == (None, None)


class Wrapping(torch.optim.Optimizer):
    """What Accelerate does: an optimizer that is none of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups


class Container(torch.optim.Optimizer):
    """Keeps optimizers as torchtitan's container does: their parameters are its own, too."""

    def __init__(self, *inner):
        self.optimizers = list(inner)
        super().__init__([p for o in inner for g in o.param_groups for p in g["params"]], {})


def test_of_a_container_of_one_optimizer_that_one_is_found():
    model = nn.Linear(3, 3)
    inner = torch.optim.SGD(model.parameters(), lr=1)
    container = Container(inner)
    assert CallerContext(model).optimizers([model]) == [inner]
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)
    container.optimizers.append(other)
    assert container in CallerContext(model).optimizers([model])


def test_optimizers_of_a_model_are_found():
    model, other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), nn.Linear(2, 2)
    small = torch.optim.SGD(model[1].parameters(), lr=1)
    large = torch.optim.SGD(model[0].parameters(), lr=1)
    wrapping, foreign = Wrapping(large), torch.optim.SGD(other.parameters(), lr=1)
    assert [id(found) for found in CallerContext(model).optimizers([model])] == [
        id(large),
        id(small),
    ]
    assert [id(found) for found in CallerContext(other).optimizers([other])] == [id(foreign)]
    assert wrapping.param_groups is large.param_groups
    lone = nn.Linear(1, 1)
    assert CallerContext(lone).optimizers([lone]) == []


def test_hooks_of_all_optimizers_are_called_as_ever_while_one_is_looked_at(monkeypatch, tmp_path):
    monkeypatch.setattr(catch, "_has_several_ranks", lambda: True)
    looking, called = catch.Catch(ScriptJob(str(tmp_path), "train", {})), []
    looking._await_optimizer(sys.modules["torch.optim.optimizer"])
    other = register_optimizer_step_post_hook(lambda *_: called.append(len(looking._bare)))
    model = nn.Sequential(nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    try:
        for optimizer in optimizers:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    finally:
        other.remove()
        looking._forget_optimizers()
        for hook in looking._hooks:
            hook.remove()
    assert called == [2, 2]  # the model and its layer
    assert "__call__" not in vars(nn.Sequential)


def test_a_model_that_is_never_called_is_watched_when_its_optimizer_is_called_again(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(catch, "_has_several_ranks", lambda: True)
    looking, begun = catch.Catch(ScriptJob(str(tmp_path), "train", {})), []
    monkeypatch.setattr(looking, "_begin", begun.append)
    looking._await_optimizer(sys.modules["torch.optim.optimizer"])
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    around = nn.Sequential(model)  # larger, and as good otherwise
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    try:
        for optimizer in (*optimizers, *optimizers):
            assert begun == []
            model[1].forward(model[0].forward(torch.ones(1, 2))).sum().backward()
            optimizer.step()
            if optimizer is optimizers[0] and begun:
                break
    finally:
        looking._forget_optimizers()
    assert begun == [model]
    del around


def test_models_without_wrapper_are_told_by_the_parameters_of_an_optimizer():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    around = nn.Sequential(model)
    part = torch.optim.SGD(model[1].parameters(), lr=0.1)
    every = torch.optim.SGD(model.parameters(), lr=0.1)
    assert {id(found) for found in bare_models([every])} == {id(around), id(model)}
    assert {id(found) for found in bare_models([part])} == {id(around), id(model), id(model[1])}
    compiled = torch.compile(model, backend="eager")
    assert {id(found) for found in bare_models([every])} == {id(around), id(compiled)}
    wrapped = DataParallel(nn.Linear(1, 1))
    assert bare_models([every]) == []
    del wrapped


def test_copies_of_a_model_that_an_optimizer_updates_show_the_model():
    model, other = nn.Linear(3, 2).bfloat16(), nn.Linear(3, 2).bfloat16()
    around = nn.Sequential(model)
    copies = [nn.Parameter(p.detach().float() + 1e-3) for p in reversed([*model.parameters()])]
    optimizer = torch.optim.SGD(copies, lr=1)
    assert bare_models([optimizer]) == [], "no parameter has a gradient"
    for each in (model, other):
        each(torch.ones(3, dtype=torch.bfloat16)).sum().backward()
    assert {id(found) for found in bare_models([optimizer])} == {id(around), id(model)}
    copies[0].data.fill_(9)
    assert bare_models([optimizer]) == [], "of their shapes alone"


def test_an_optimizer_of_other_tensors_is_found_by_their_shapes():
    model = nn.Linear(3, 2)
    others = [nn.Parameter(torch.zeros_like(p)) for p in model.parameters()]
    optimizer = torch.optim.SGD(others, lr=1)
    module = nn.Linear(3, 2)
    foreign = torch.optim.SGD(module.parameters(), lr=1)
    larger = torch.optim.SGD([nn.Parameter(torch.zeros(3, 3))], lr=1)
    assert CallerContext(model).optimizers_by_shape([model]) == [optimizer]
    part = torch.optim.SGD(others[:1], lr=1)
    assert CallerContext(model).optimizers_by_shape([model]) == [optimizer]
    second = torch.optim.SGD(others, lr=1)
    assert CallerContext(model).optimizers_by_shape([model]) == [], "which one it is, is unknown"
    del foreign, larger, part, second
