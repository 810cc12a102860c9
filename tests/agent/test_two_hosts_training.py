import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankscope import Run
from rankscope.bus.evidence import Table
from support.accidents import wait_until
from support.two_hosts import TwoHosts, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

SCRIPT = Path(__file__).parents[1] / "support" / "train_shared_batches.py"

STEPS = {"mended": 80, "broken": 90, "cut": 60}


def num_bytes_sent(hosts):
    return sum(map(int, re.findall(r"bytes_acked:(\d+)", hosts.connections(1, "agents", "-i"))))


def num_bytes_waiting(hosts):
    return sum(int(line.split()[1]) for line in hosts.connections(1, "agents").splitlines())


@pytest.fixture(scope="module")
def trained(folder):
    """Train 2 ranks on each host, three times; half into it, the agents' link is cut.

    In the first training, "mended", for three seconds; in the second, "broken", until something
    has not arrived, and the connection breaks; in the third, "cut", for good.
    """
    with TwoHosts(folder / "hosts") as hosts:
        env = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "RANKSCOPE_AGENT": "process",
            "RANKSCOPE_ADDRESS": hosts.address(0, "agents"),
        }
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        words = [str(word) for each in STEPS.items() for word in each]
        jobs = hosts.torchrun(SCRIPT, str(folder), *words, env=env, **pipe)
        for name in STEPS:
            while not (folder / f"{name}.mark").exists() and jobs[0].poll() is None:
                time.sleep(0.05)
            wait_until(lambda: num_bytes_sent(hosts) > 100_000)  # the root knows of all ranks
            hosts.cut()
            (folder / f"{name}.on").touch()
            if name == "mended":
                time.sleep(3.0)
            if name == "broken":
                wait_until(lambda: num_bytes_waiting(hosts) > 50_000)
                hosts.reset()
            if name != "cut":
                hosts.mend()
        said = [job.communicate(timeout=240)[0] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], "\n".join(said)
        for name in STEPS:
            wait_until(lambda run_dir=folder / name: Run.open(run_dir).status != "running")
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return folder, results, "\n".join(said)


def test_ranks_of_two_hosts_are_compared_as_on_one_and_a_cut_of_seconds_costs_nothing(trained):
    folder, all_results, _ = trained
    run = Run.open(folder / "mended")
    results = [result for result in all_results if result["training"] == "mended"]
    assert run.status == "complete"
    assert run.columns(Table.STEPS, "step")["step"].tolist() == list(range(STEPS["mended"]))
    recorded = {finding.id: list(finding.ranks) for finding in run.findings()}
    assert recorded["data.duplicate_batches"] == [1, 2]  # one on each host
    assert len(results) == 4
    assert all(result["findings"] == recorded for result in results)
    told = {tuple(result["told_at"]) for result in results}
    assert (
        len(told) == 1 or max(told)[0] > STEPS["mended"] // 3
    )  # in one step, unless the link was cut


def test_steps_that_a_broken_connection_held_are_counted_and_the_run_goes_on(trained):
    folder, all_results, said = trained
    run = Run.open(folder / "broken")
    results = [result for result in all_results if result["training"] == "broken"]
    assert run.status == "complete"
    recorded, lost = run.columns(Table.STEPS, "step")["step"].tolist(), run.info["lost_steps"]
    assert sorted([*recorded, *lost]) == list(range(STEPS["broken"]))
    assert 0 < len(lost) < STEPS["broken"] // 2
    assert {*run.info["lost_of"]} in ({"2"}, {"3"}, {"2", "3"})
    assert said.count("was lost on the way") == 1
    findings = {finding.id: list(finding.ranks) for finding in run.findings()}
    assert findings["data.duplicate_batches"] == [1, 2]
    assert all(result["findings"] == findings for result in results)


def test_a_training_ends_as_ever_when_the_link_is_cut_for_good(trained):
    folder, results, said = trained
    run = Run.open(folder / "cut")
    ended = [result for result in results if result["training"] == "cut"]
    assert len(ended) == 4  # all ranks have come to their end
    assert run.status == "incomplete"
    steps = run.columns(Table.STEPS, "step")["step"].tolist()
    assert steps == list(range(len(steps)))
    assert 0 < len(steps) < STEPS["cut"]
    endings = {ending["rank"]: ending["why"] for ending in run.info["ended"]}
    assert endings[2] == endings[3] == "its host is out of reach"
    waits = said.count("waits for other ranks or hosts")
    assert 1 <= waits <= 2  # once on each host, unless the root knows already that it is in vain
