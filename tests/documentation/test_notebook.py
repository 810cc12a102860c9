"""The notebook of the documentation, executed on the runs of ``rankscope demo``."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"
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
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(executed, timeout=120, resources=place).execute()
    before, now = texts(shown), texts(executed)
    assert len(before) == len(now) == 7
    for at in (0, 1, 6):  # verdict and findings; the others are numbers
        assert now[at] == before[at]
