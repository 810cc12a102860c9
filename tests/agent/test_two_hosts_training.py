"""A whole training on two hosts: the same findings as on one, also when the agents' link is cut."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankscope import Run
from rankscope.core.signals import Table
from support.accidents import wait_until
from support.two_hosts import TwoHosts, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

SCRIPT = Path(__file__).parents[1] / "support" / "train_shared_batches.py"

FOR_GOOD = float("inf")


def train(tmp_path, steps, *, cut_seconds):
    """Train 2 ranks on each host; the agents' link is cut when a third of the steps is done.

    Returns:
        The record, what the ranks found, and what they printed.
    """
    run_dir, mark = tmp_path / "run", tmp_path / "mark"
    with TwoHosts(tmp_path / "hosts") as hosts:
        env = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "RANKSCOPE_AGENT": "process",
            "RANKSCOPE_ADDRESS": hosts.address(0, "agents"),
        }
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        jobs = hosts.torchrun(SCRIPT, str(run_dir), str(steps), str(mark), env=env, **pipe)
        while not mark.exists() and jobs[0].poll() is None:
            time.sleep(0.05)
        hosts.cut()
        if cut_seconds != FOR_GOOD:
            time.sleep(cut_seconds)
            hosts.mend()
        said = [job.communicate(timeout=240)[0] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], "\n".join(said)
        wait_until(lambda: Run.open(run_dir).status != "running")
    lines = [line for text in said for line in text.splitlines() if line.startswith("RESULT")]
    results = [json.loads(line.removeprefix("RESULT")) for line in lines]
    return Run.open(run_dir), results, "\n".join(said)


def test_ranks_of_two_hosts_are_compared_as_on_one_and_a_cut_of_seconds_costs_nothing(tmp_path):
    steps = 250
    run, results, _ = train(tmp_path, steps, cut_seconds=5.0)
    assert run.status == "complete"
    assert run.columns(Table.STEPS, "step")["step"].tolist() == list(range(steps))
    recorded = {finding.id: list(finding.ranks) for finding in run.findings()}
    assert recorded["data.duplicate_batches"] == [1, 2]  # one on each host
    assert len(results) == 4
    assert all(result["findings"] == recorded for result in results)
    told = {tuple(result["told_at"]) for result in results}
    assert len(told) == 1 or max(told)[0] > steps // 3  # in one step, unless the link was cut


def test_a_training_ends_as_ever_when_the_link_is_cut_for_good(tmp_path):
    run, results, said = train(tmp_path, 240, cut_seconds=FOR_GOOD)
    assert len(results) == 4  # all ranks have come to their end
    assert run.status == "incomplete"
    steps = run.columns(Table.STEPS, "step")["step"].tolist()
    assert steps == list(range(len(steps)))
    assert 0 < len(steps) < 240
    endings = {ending["rank"]: ending["why"] for ending in run.info["ended"]}
    assert endings[2] == endings[3] == "its host is out of reach"
    assert said.count("still waits for other ranks or hosts") == 2  # once on each host
