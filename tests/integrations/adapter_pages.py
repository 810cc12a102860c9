"""The pages of adapters: their blocks and examples run in the ranks of the adapters' tests."""

import pytest

from documentation.framework_blocks import run_framework
from documentation.framework_examples import assert_example_ran, examples, run_examples
from documentation.framework_pages import assert_block_ran, python_blocks


def run_pages(folder, *pages, before=lambda: None):
    """Run the blocks and the examples of an adapter's pages on one rank."""
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
