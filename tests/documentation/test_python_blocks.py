"""Every Python block of README and docs runs, on two ranks, or in those of ``ADAPTERS``."""

import ast
from collections import defaultdict

import pytest

from documentation.blocks import ROOT, blocks
from documentation.framework_blocks import RAY, USES, train_under_ray
from documentation.framework_pages import python_blocks
from documentation.prepared import run_blocks
from documentation.tables import ADAPTERS, AFTERWARDS
from support.ranks import run_ranks

BLOCKS = [block for block in blocks() if block.kind == "python"]
RUN = [block for block in BLOCKS if block.page not in ADAPTERS]


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
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


@pytest.mark.parametrize("page", ADAPTERS)
def test_blocks_of_a_framework_are_run_in_the_ranks_that_its_tests_start(page):
    """One reader for each block; the test of the adapter asks what became of each."""
    assert len(python_blocks(page)) == len(USES.get(page, [train_under_ray])) > 0
    test = ast.parse((ROOT / ADAPTERS[page]).read_text())
    calls = {ast.unparse(node.func) for node in ast.walk(test) if isinstance(node, ast.Call)}
    assert {"python_blocks", "assert_block_ran"} <= calls if page == RAY else "hold_pages" in calls


def test_the_tables_speak_of_blocks_that_exist():
    assert AFTERWARDS.keys() <= {(block.page, block.first) for block in BLOCKS}
