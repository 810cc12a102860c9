"""The face of the package: its names, what an import costs, and the example that it ships."""

import json
import logging
from pathlib import Path

import pytest

import rankscope
from rankscope import Run
from rankscope.session.inbox import announce
from support.forked_ranks import torchrun

ROOT = Path(__file__).parents[1]


def test_public_names():
    names = "Finding LoadedRun RankscopeError Run Scope Severity StepReport Tier WatchOptions"
    names += " __version__ fixed_order load order_free watch"
    assert rankscope.__all__ == names.split()
    for name in rankscope.__all__:
        assert getattr(rankscope, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rankscope.nothing


def test_a_log_handler_of_the_program_that_raises_does_not_raise_into_it():
    class Raising(logging.Handler):
        seen = 0

        def emit(self, record):
            self.seen += 1
            raise RuntimeError

    handler = Raising()
    log = logging.getLogger("rankscope")
    log.addHandler(handler)
    try:
        log.warning("a line")
        announce(logging.INFO, "another")
    finally:
        log.removeHandler(handler)
    assert handler.seen == 2


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "causes", "code"),
    [([], [], 0), (["--forget-sampler"], ["data.duplicate_batches"], 1)],
    ids=["healthy", "forgotten sampler"],
)
def test_the_two_lines_of_the_example(command, tmp_path, flags, causes, code):
    run_dir = tmp_path / "run"
    script = [str(ROOT / "examples" / "ddp_two_lines.py"), "--run-dir", str(run_dir), *flags]
    code_of_ranks, _, err = torchrun(["--nproc-per-node", "2"], *script, "--steps", "40")
    assert code_of_ranks == 0, err
    run = Run.open(run_dir)
    assert run.status == "complete"
    assert [finding.cause for finding in run.findings()] == causes
    found, out, err = command("report", run_dir, "--json")
    assert found == code, err
    assert json.loads(out)
    assert (run_dir / "report.html").exists()
