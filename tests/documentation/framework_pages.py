"""Runs the Python of the frameworks' pages in ranks that the tests of an adapter have started."""

import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from documentation.blocks import Block, blocks
from rankscope import Run
from rankscope.bus.evidence import Table

Names = dict[str, Any]
RunBlock = Callable[[Names], None]
"""Runs a block as it stands in its page, with these names; those that it makes are added."""
Signals = dict[str, list[float]]
"""By signal: what this rank's training knows of it, one number a step."""
Use = Callable[[RunBlock], tuple[str, Signals]]
"""Prepares the names of a block, runs it, and goes on as its reader would, to the end of the run.

Returns where the run is (absolute, or from the working directory), and what it must hold."""


def python_blocks(page: str) -> list[Block]:
    return [block for block in blocks() if block.page == page and block.kind == "python"]


def run_page(page: str, folder: str | Path, uses: list[Use]) -> dict[str, dict[str, Any]]:
    kept: Names = {}
    results = {}
    for number, (block, use) in enumerate(zip(python_blocks(page), uses, strict=True)):
        place = Path(folder) / "pages" / Path(page).stem / str(number)
        place.mkdir(parents=True, exist_ok=True)
        results[str(block)] = _run(block, place, kept, use)
    return results


def _run(block: Block, place: Path, kept: Names, use: Use) -> dict[str, Any]:
    code = compile(block.code, f"{block.page}, line {block.line}", "exec")
    times = 0

    def run(names: Names) -> None:
        nonlocal times
        prepared = dict(names)
        names |= {name: kept[name] for name in kept.keys() - names.keys()}
        exec(code, names)
        times += 1
        kept.update({name: made for name, made in names.items() if name not in prepared})

    problem, path, signals = "", "", {}
    with contextlib.chdir(place):
        try:
            path, signals = use(run)
        except Exception:
            problem = traceback.format_exc()
    return {"times": times, "run": str(place / path), "signals": signals, "problem": problem}


def assert_block_ran(block: Block, ranks: list[dict[str, dict[str, Any]]]) -> Run:
    results = [rank[str(block)] for rank in ranks]
    for result in results:
        assert result["problem"] == "", result["problem"]
        assert result["times"] > 0
    [path] = {result["run"] for result in results}
    run = Run.open(path)
    assert run.status == "complete"
    for rank, result in enumerate(results):
        assert result["signals"], "say what the run must hold"
        for signal, expected in result["signals"].items():
            assert len(run.columns(Table.STEPS, "step")["step"]) == len(expected) > 0
            found = run.per_worker(signal)[1][:, rank]
            np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=signal)
    return run
