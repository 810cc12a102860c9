import ast
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from documentation.blocks import ROOT, blocks
from documentation.framework_blocks import RAY, USES, train_under_ray
from documentation.framework_pages import python_blocks
from documentation.prepared import run_blocks
from documentation.tables import ADAPTERS
from support.ranks import run_ranks

BLOCKS = [block for block in blocks() if block.kind == "python"]
RUN = [block for block in BLOCKS if block.page not in ADAPTERS]


@pytest.fixture(scope="module")
def problems(folder):
    pages = defaultdict(list)
    for block in RUN:
        pages[block.page].append(block)
    ranks = run_ranks(run_blocks, 2, dict(pages), str(folder), timeout=280.0)
    return {name: text for found in ranks for name, text in found.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{block.page}: {block.first}")
def test_a_block_runs(problems, block):
    assert str(block) not in problems, problems[str(block)]


@pytest.mark.parametrize("page", ADAPTERS)
def test_blocks_of_a_framework_are_run_in_the_ranks_that_its_tests_start(page):
    assert len(python_blocks(page)) == len(USES.get(page, [train_under_ray])) > 0
    test = ast.parse((ROOT / ADAPTERS[page]).read_text())
    found = (node.func for node in ast.walk(test) if isinstance(node, ast.Call))
    calls = {ast.unparse(function).rpartition(".")[2] for function in found}
    assert {"python_blocks", "assert_block_ran"} <= calls if page == RAY else "hold_pages" in calls


NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
COMMAND = Path(sys.executable).parent / "rankscope"


def demo(folder: Path) -> Path:
    """Return the demo's runs: those that CI has made already, else new ones."""
    made = Path(f"{os.environ.get('RANKSCOPE_STUDY', '')}-two-runs")
    if made.is_dir():
        return made
    subprocess.run([COMMAND, "demo", "--output", folder / "made"], check=True, timeout=240)
    return folder / "made"


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    """Return what the cells that name no measured value have put out."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [str(one.get("text") or one["data"]["text/plain"]) for one in outputs]


@pytest.mark.filterwarnings("ignore")  # of the client and the kernel
@pytest.mark.ranks
def test_every_cell_runs_and_says_what_the_documentation_shows(tmp_path):
    (tmp_path / "rankscope-demo").symlink_to(demo(tmp_path))
    shown = nbformat.read(NOTEBOOK, as_version=4)
    executed = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(executed, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    before, now = texts(shown), texts(executed)
    assert len(before) == len(now) == 7
    for at in (0, 1, 6):  # verdict and findings; the others are numbers
        assert now[at] == before[at]
