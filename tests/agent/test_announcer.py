"""What is said of findings while the training goes on."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rankscope.bus import governor
from rankscope.bus.finding import Finding, FindingEvent, Severity
from rankscope.session.inbox import last_line, place_of
from rankscope.verdict.news import Announcer
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
    """Return the lines that some changes lead to."""
    lines = []
    announcer = Announcer(lambda line, is_fault: lines.append((line, is_fault)))
    for finding, change in changed:
        announcer.announce([(finding, change)], known or [finding])
    return lines


def test_notes_and_the_end_of_what_was_not_said_stay_silent():
    note = replace(COPIES, severity=Severity.NOTE)
    assert (
        said([(note, FindingEvent.OPENED), (replace(COPIES, status="closed"), FindingEvent.CLOSED)])
        == []
    )
    opened, closed = said([(COPIES, FindingEvent.OPENED), (COPIES, FindingEvent.CLOSED)])
    assert (opened[1], closed[1]) == (True, False)


def test_consequences_of_another_finding_are_not_printed():
    cause = replace(COPIES, id="state", cause="state.parameters_differ", severity=Severity.ERROR)
    effect = replace(COPIES, id="rank-0", cause="data.worker_outlier", first_step=6)
    assert said([(effect, FindingEvent.OPENED)], [cause, effect]) == []
    assert len(said([(effect, FindingEvent.OPENED)], [effect])) == 1


def test_the_command_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = place_of(tmp_path / "my runs" / "a")
    for judged, recorded in ((True, True), (True, False), (False, False)):
        assert last_line(place, judged, recorded).endswith("rankscope report 'my runs/a'")
    whole = last_line(place_of(Path("/x/y")), judged=True, recorded=True)
    assert whole.endswith("to see it: rankscope report /x/y")


def events_of(run_dir):
    return [json.loads(line) for line in (run_dir / "findings.jsonl").read_text().splitlines()]


WAYS = ("forgotten", "healthy", "silent")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train in all ways under one launcher; return the folder of all runs and what was printed."""
    folder = tmp_path_factory.mktemp("announced")
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


def training_in_short_steps(rank, run_dir):
    """Train in steps that all count as short, with a budget that none of them can keep."""
    patch = pytest.MonkeyPatch()
    patch.setattr(governor, "_SHORT_SECONDS", math.inf)
    patch.setattr("rankscope.agent.root.Governor", partial(governor.Governor, always=0))
    lines = []
    patch.setattr("rankscope.session.inbox.announce", lambda level, line: lines.append(line))
    loop = Loop(rank, run_dir, overhead_budget=1e-6, announce=True)
    for step in range(12):
        loop.step(step)
    loop.close()
    return [line for line in lines if "even where no gradient is read" in line]


def test_a_budget_that_short_steps_cannot_keep_is_said_once(tmp_path):
    [lines] = run_ranks(training_in_short_steps, 1, str(tmp_path / "run"))
    assert len(lines) == 1
