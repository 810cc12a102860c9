"""Runs the examples of the frameworks' pages, with fewer steps, in ranks that run already."""

import contextlib
import io
import re
import runpy
import sys
import traceback
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from typer.testing import CliRunner

from documentation.blocks import ROOT, blocks, commands
from rankscope.cli.main import app

STEPS = 8


def examples(page):
    return [c for c in commands() if c.page == page and _script(c) is not None]


def _script(command):
    found = [n for n, word in enumerate(command.words) if word.startswith("examples/")]
    return found[0] if found else None


def run_examples(page, folder, before=lambda: None):
    place = Path(folder) / "examples" / Path(page).stem
    place.mkdir(parents=True, exist_ok=True)
    results = {}
    for command in examples(page):
        before()
        problem = ""
        try:
            _run(command, place)
        except Exception:
            problem = traceback.format_exc()
        results[str(command)] = {"place": str(place), "problem": problem}
    return results


def _run(command, place):
    number = _script(command)
    assert number is not None
    script, *flags = command.words[number:]
    with (
        contextlib.chdir(place),
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(sys, "argv", [script, *flags, "--steps", str(STEPS)]),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        runpy.run_path(str(ROOT / script), run_name="__main__")


def assert_example_ran(command, ranks):
    for rank in ranks:
        assert rank[str(command)]["problem"] == "", rank[str(command)]["problem"]
    report, shown = _report(command)
    with contextlib.chdir(ranks[0][str(command)]["place"]):
        result = CliRunner().invoke(app, [*report.words[1:], "--no-html"])
    assert _words(shown, STEPS) in _words(result.output, STEPS)


def _report(command):
    run_dir = command.words[command.words.index("--run-dir") + 1]
    own = [c for c in commands() if c.page == command.page]
    [report] = [c for c in own if c.words[1:] == ["report", run_dir]]
    [shown] = [
        after.code
        for before, after in pairwise(blocks())
        if (before.page, after.kind) == (command.page, "text") and report.text in before.code
    ]
    return report, shown


def _words(text, steps):
    """Return a text without its line breaks, as if there had been that many steps."""
    text = " ".join(text.split())
    text = re.sub(r"\b\d+ steps", f"{steps} steps", text)
    return re.sub(r"steps 0 to \d+", f"steps 0 to {steps - 1}", text)
