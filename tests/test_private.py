import ast
import importlib.util
import inspect
import logging
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rankscope
from rankscope import private
from rankscope.errors import UnsupportedError
from rankscope.private import USES, Patch, callers, find, lacking
from rankscope.wrappers.backward_calls import BackwardCalls
from rankscope.wrappers.passes import BackwardEnd

SOURCE = Path(rankscope.__file__).parent
PRIVATE = re.compile(r"_[A-Za-z]\w*")
INSIDE = re.compile(r"(torch|deepspeed|ray|mlflow|transformers)(\.\w+)*\._\w+(\.\w+)*")

OTHERS = {
    "_CACHE _DIR _FILE _HCA _HOME _IFNAME _PATH": "parts of variables of the environment",
    "_c10d_functional _c10d_functional_autograd": "namespaces of operators, which are public",
    "_high _low": "ends of names of columns",
    "_count": "the end of a name of columns",
    "_fields": "of ctypes, and documented",
    "_function": "the end of a name of a check",
    "_frozen_importlib _frozen_importlib_external": "Python's own",
    "_replace": "of named tuples, and documented",
    "_closed": "a scope's own",
    "_optimizer": "a module of torch's that is never touched",
}
"""Names that look like those of others, and are not."""
OF_NO_USE = {name for names in OTHERS for name in names.split()}


def test_every_private_name_of_others_stands_in_the_table():
    every = {name for use in USES for name in (*use.names.split(), *use.owner.split("."))}
    found = {
        (str(path.relative_to(SOURCE)), name)
        for path, text in texts().items()
        for name in names_in(text, every) - OF_NO_USE - every
    }
    assert sorted(found) == []


@pytest.mark.parametrize("use", USES, ids=lambda use: use.names)
def test_nothing_stands_there_that_is_not_used(use):
    words = {name: re.compile(rf"\b{name}\b") for name in use.names.split()}
    assert [n for n, word in words.items() if not any(map(word.search, texts().values()))] == []
    assert use.why
    assert use.without


@pytest.mark.parametrize("use", USES, ids=lambda use: use.names)
def test_the_installed_releases_have_the_name(use):
    assert [name for name in use.names.split() if not exists(use.owner, name)] == [] or use.releases


@cache
def texts() -> dict[Path, str]:
    own = Path(private.__file__)
    return {path: path.read_text() for path in SOURCE.rglob("*.py") if path != own}


def names_in(source: str, known: set[str]) -> set[str]:
    """Return names in a module that are private to somebody else, or stand in the table."""
    nodes = list(ast.walk(ast.parse(source)))
    own = {name for node in nodes for name in defined(node)}
    found = {name for node in nodes for name in used(node) if PRIVATE.fullmatch(name)}
    return {name for name in found if name in known or name not in own}


def defined(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()):
            return [name]
        case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls")):
            return [name]
    return []


def used(node: ast.AST) -> list[str]:
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls" | "os" | "sys")):
            return []
        case ast.Attribute(attr=name):
            return [name]
        case ast.Constant(value=str(text)):
            return text.split(".") if PRIVATE.fullmatch(text) or INSIDE.fullmatch(text) else []
        case ast.ImportFrom(module=module, names=names) if not str(module).startswith("rank"):
            return [part for name in names for part in f"{module}.{name.name}".split(".")]
        case ast.Import(names=names):
            return [part for name in names for part in name.name.split(".")]
    return []


def exists(owner: str, name: str) -> bool:
    if owner == "torch.autograd.graph.Node":
        return any(hasattr(node, name) for node in nodes())
    holder = find(owner) if owner.startswith("torch") else None
    if holder is not None and hasattr(holder, name):
        return True
    module = inspect.getmodule(holder) if inspect.isclass(holder) else holder
    if getattr(module, "__spec__", ...) is None:  # compiled: it has no source
        return False
    source = source_of(owner) if module is None else inspect.getsource(module)
    return re.search(rf"\b{name}\b", source) is not None  # of objects, which are not made here


@cache
def nodes() -> list:
    x = torch.ones(2, requires_grad=True)
    weighted = nn.functional.nll_loss(x.expand(3, 2), torch.tensor([0, 1, 1]), torch.ones(2))
    return [(x * 2.0).grad_fn, (x / x).grad_fn, (x * x).grad_fn, x.mean().grad_fn, weighted.grad_fn]


@cache
def source_of(owner: str) -> str:
    top, *parts = owner.split(".")
    path = Path(importlib.util.find_spec(top).origin).parent
    for part in parts:
        if (path / f"{part}.py").exists():
            return (path / f"{part}.py").read_text()
        path /= part
    return (path / "__init__.py").read_text() if path.is_dir() else ""


# What happens without a name ---------------------------------------------------------------


@pytest.fixture(autouse=True)
def _asked_anew():
    private.available.cache_clear()
    yield
    private.available.cache_clear()


def test_all_needs_are_met():
    needs = {use.need for use in USES} - {""}
    assert needs == {"backward", "roots", "canary", "operators", "tape"}
    assert [name for need in needs for name in lacking(need)] == []


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch._C, "_current_graph_task_id"), (torch.autograd.Variable, "_execution_engine")],
)
def test_without_the_end_of_a_backward_pass_watching_is_refused(monkeypatch, owner, name):
    monkeypatch.delattr(owner, name)
    with pytest.raises(UnsupportedError, match=f"{name}, which torch .* lacks"):
        BackwardEnd(lambda: None, lambda: None, lambda work, *args: work(*args))


def test_without_the_roots_of_backward_it_is_said_once(monkeypatch, caplog):
    monkeypatch.delattr(torch.autograd, "_make_grads")
    caplog.set_level(logging.INFO, "rankscope")
    for _ in range(2):
        BackwardCalls(torch.autograd, print).remove()
    assert [record.getMessage() for record in caplog.records] == [
        f"losses outside of the model's output are not recorded: torch {torch.__version__} "
        "without torch.autograd._make_grads"
    ]
    assert not hasattr(torch.autograd, "_make_grads")


def test_a_release_whose_modules_moved_is_refused_in_words():
    program = """
import torch.utils._python_dispatch as dispatch
del dispatch.TorchDispatchMode
import rankscope
try:
    rankscope.watch
except rankscope.RankscopeError as error:
    print(type(error).__name__, error)
"""
    printed = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert printed.startswith("UnsupportedError rankscope")


# The one way to replace something -----------------------------------------------------------


class Greeter:
    def greet(self) -> str:
        return "hello"


def louder(greet):
    return lambda *args: greet(*args).upper()


class TestPatch:
    def test_of_an_object_goes_without_a_trace(self):
        one = Greeter()
        with Patch(one, "greet", louder) as patch:
            assert one.greet() == "HELLO"
            assert patch.in_place
        assert vars(one) == {}
        assert one.greet() == "hello"

    def test_of_a_class_gives_back_what_was_stored(self):
        class Own:
            greet = staticmethod(lambda: "hello")

        stored = vars(Own)["greet"]
        patch = Patch(Own, "greet", louder)
        patch.remove()
        patch.remove()
        assert vars(Own)["greet"] is stored

    def test_what_somebody_else_put_there_since_stays(self):
        place = SimpleNamespace(name="a")
        patch = Patch(place, "name", lambda name: name + "b")
        place.name = "others"
        patch.remove()
        assert place.name == "others"

    def test_what_was_not_there_is_not_there_again(self):
        place = SimpleNamespace()
        Patch(place, "name", lambda name: (name, "put")).remove()
        assert not hasattr(place, "name")


def test_callers_begin():
    def inner():
        return list(callers())

    def outer():
        return inner()

    assert [frame.f_code.co_name for frame in outer()][:2] == ["outer", "test_callers_begin"]
