"""What the tests of all adapters share: data, runs, and the blocks and examples of their pages."""

from pathlib import Path

import numpy as np
import pytest

from documentation.framework_blocks import run_framework
from documentation.framework_examples import assert_example_ran, examples, run_examples
from documentation.framework_pages import assert_block_ran, python_blocks
from rankscope import Run, Severity
from rankscope.bus.evidence import Table
from support.loops import PLAN

OPTIONS = {"overhead_budget": None, "hang_seconds": None, "canary": False, "plan": PLAN}
TABLES = (Table.STEPS, Table.WORKERS, Table.MICRO, Table.SAMPLES, Table.PAIRS, Table.GROUPS)
_OWN = ("time", "seconds", "loader_goes_on")
"""Parts of the names of columns that may differ between a framework's training and a plain loop:
times, and what a data loader feeds: the loop has kept batches."""


def run_in(folder, name):
    return Run.open(Path(folder) / name)


def metrics(run, *, without=()):
    """Return all that was recorded, but for times and random generators, by table and column."""
    return {
        (table, name): values
        for table in TABLES
        for name, values in run.columns(table).items()
        if not any(part in name for part in _OWN) and name not in without
    }


def assert_same_metrics(run, reference, *, without=(), status="complete"):
    found, expected = metrics(run, without=without), metrics(reference, without=without)
    assert (run.status, reference.status) == (status, "complete")
    assert len(expected[Table.STEPS, "step"]) > 0
    for column, values in expected.items():
        assert found[column].shape == values.shape, column
        for mine, its in zip(found[column], values, strict=True):
            np.testing.assert_array_equal(mine, its, str(column))


def loud(run):
    return [finding.cause for finding in run.findings() if finding.severity > Severity.NOTE]


def bits(module):
    state = module.state_dict().items()
    return {name: value.detach().numpy().tobytes() for name, value in state}


def run_pages(folder, *pages, before=lambda: None):
    results = {}
    for page in pages:
        results |= run_framework(page, folder) | run_examples(page, folder, before)
    return results


def hold_pages(*pages):
    """Return two tests of a job whose ranks return what became of ``pages``."""
    blocks = [block for page in pages for block in python_blocks(page)]
    commands = [command for page in pages for command in examples(page)]

    @pytest.mark.parametrize("block", blocks, ids=lambda block: f"{block.page}: {block.first}")
    def test_a_block_of_a_page_runs(trained, block):
        assert_block_ran(block, [rank["pages"] for rank in trained[0]])

    @pytest.mark.parametrize("command", commands, ids=str)
    def test_an_example_of_a_page_runs(trained, command):
        assert_example_ran(command, [rank["pages"] for rank in trained[0]])

    return test_a_block_of_a_page_runs, test_an_example_of_a_page_runs
