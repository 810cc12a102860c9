"""What is said of findings while the training goes on."""

from dataclasses import replace
from pathlib import Path

import pytest

from rankscope.bus.finding import Finding, FindingEvent, Severity
from rankscope.verdict.news import Announcer
from support.findings import events_of
from support.forked_ranks import torchrun
from support.loops import Loop
from support.ranks import run_ranks

COPIES = Finding(
    "copies",
    "data.duplicate_batches",
    Severity.WARNING,
    (0, 2),
    5,
    8,
    "Ranks 0 and 2 trained on identical batches. It is so.",
    "Look.",
)
SCRIPT = Path(__file__).parents[1] / "support" / "train_forgotten_sampler.py"


def said(changed, known=()):
    lines = []
    announcer = Announcer(lambda line, is_fault: lines.append((line, is_fault)))
    for finding, change in changed:
        announcer.announce([(finding, change)], known or [finding])
    return lines


def test_consequences_of_another_finding_are_not_printed():
    cause = replace(COPIES, id="state", cause="state.parameters_differ", severity=Severity.ERROR)
    effect = replace(COPIES, id="rank-0", cause="data.worker_outlier", first_step=6)
    assert said([(effect, FindingEvent.OPENED)], [cause, effect]) == []
    assert len(said([(effect, FindingEvent.OPENED)], [effect])) == 1


WAYS = ("forgotten", "healthy", "silent")


@pytest.fixture(scope="module")
def trained(folder):
    """Train in all ways under one launcher; return the folder of all runs and what was printed."""
    options = ["--standalone", "--nproc-per-node", "2"]
    code, out, err = torchrun(options, str(SCRIPT), "--folder", str(folder), *WAYS)
    assert (code, out) == (0, ""), err
    lines = [line for line in err.splitlines() if line.startswith("rankscope: ")]
    return folder, lines


@pytest.mark.slow
def test_a_forgotten_sampler_is_said_when_it_happens_and_at_the_end(trained):
    folder, lines = trained
    opened, verdict, recorded = lines[:3]
    assert opened.startswith("rankscope: error: Ranks 0 and 1 trained on identical batches")
    assert opened.endswith("[data.duplicate_batches, since step 0]")
    assert verdict.startswith("rankscope: 30 steps of 2 workers: 1 error. Ranks 0 and 1 trained")
    assert recorded.endswith(f"rankscope report {folder / 'forgotten'}")
    found = events_of(folder / "forgotten")
    assert {one["cause"] for one in found} >= {"data.duplicate_batches"}


def test_a_healthy_run_says_one_word_at_the_end_and_silence_can_be_had(trained):
    folder, lines = trained
    verdict, recorded = lines[3:]  # and nothing of the silent run
    assert verdict.startswith("rankscope: 30 steps of 2 workers: no fault found")
    assert recorded.endswith(f"to see it: rankscope report {folder / 'healthy'}")
    assert {one["cause"] for one in events_of(folder / "silent")} >= {"data.duplicate_batches"}


def changing(rank, run_dir):
    """Train with the same batches on both ranks, as long as it takes to find more than once."""
    told = []
    loop = Loop(rank, run_dir, on_finding=told.append)
    for step in range(40):
        loop.step(step, rank=0)
    loop.scope.close()
    return [(finding.id, str(finding.severity), finding.status) for finding in told]


def test_a_finding_that_only_counts_on_is_told_once(tmp_path):
    first, second = run_ranks(changing, 2, str(tmp_path / "run"))
    assert first == second
    assert ("data.duplicate_batches", "error", "open") in first
    assert len(first) == len(set(first))
    events = events_of(tmp_path / "run")
    assert sum(event["cause"] == "data.duplicate_batches" for event in events) > 1
