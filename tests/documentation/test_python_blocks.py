"""Every Python block of README and docs runs, on two real ranks that are started once.

Blocks that need a framework's own launch are run by the tests of its adapter. Here they are held to
what exists: modules, names and options.
"""

import ast
import inspect
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

import rankscope
from documentation.blocks import ROOT, blocks
from documentation.prepared import run_blocks
from documentation.tables import ADAPTERS, AFTERWARDS, EACH_STATEMENT_ALONE, NOT_RUN
from support.ranks import run_ranks

BLOCKS = [block for block in blocks() if block.kind == "python"]
OF_ADAPTERS = [block for block in BLOCKS if block.page in ADAPTERS]
RUN = [b for b in BLOCKS if (b.page, b.first) not in NOT_RUN and b.page not in ADAPTERS]


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Return what went wrong on any rank, by block."""
    pages = defaultdict(list)
    for block in RUN:
        pages[block.page].append(block)
    folder = str(tmp_path_factory.mktemp("pages"))
    ranks = run_ranks(run_blocks, 2, dict(pages), folder, timeout=280.0)
    return {name: text for found in ranks for name, text in found.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{block.page}: {block.first}")
def test_a_block_runs(problems, block):
    assert str(block) not in problems, problems[str(block)]


@pytest.mark.parametrize("block", OF_ADAPTERS, ids=lambda block: f"{block.page}: {block.first}")
def test_what_an_adapter_is_given_exists(block):
    known = inspect.signature(rankscope.watch).parameters.keys()
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("rankscope."):
            assert {alias.name for alias in node.names} <= defined_in(node.module), node.module
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("watch", "RankscopeCallback"):
            own = {"weight", "label_tokens"}
            assert {keyword.arg for keyword in node.keywords} <= known | own


def defined_in(module):
    """Return the names that a module defines, without importing what it needs."""
    tree = ast.parse(Path(find_spec(module).origin).read_text())
    kinds = (ast.ClassDef, ast.FunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


def test_pages_of_adapters_have_tests_that_run_them():
    for page, test in ADAPTERS.items():
        assert (ROOT / test).is_file() or not (ROOT / page).is_file(), test


def test_the_tables_speak_of_blocks_that_exist():
    there = {(block.page, block.first) for block in BLOCKS}
    assert AFTERWARDS.keys() <= there
    assert there >= EACH_STATEMENT_ALONE
