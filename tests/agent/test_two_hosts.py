"""The link between agents of two hosts for real: namespaces with an address each, and a cable."""

import json
import os
import subprocess
import sys
import time

import pytest

from support.two_hosts import TwoHosts, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

ROOM = 64 << 20


@pytest.fixture
def hosts(tmp_path):
    with TwoHosts(tmp_path) as both:
        yield both


class Agents:
    """A root on host 0 and an agent on host 1 that sends so many steps."""

    def __init__(self, hosts, folder, steps, *, most_bytes=ROOM, linger=60.0, version=4, only=True):
        self._folder = folder
        self.steps = []
        env = {"PYTHONPATH": os.pathsep.join(sys.path)}
        pipe = {"stdout": subprocess.PIPE, "text": True, "env": env}
        command = [sys.executable, "-m", "support.linked_agents"]
        by = hosts.address(0, "agents", version)
        addresses = [by if only else "", by]  # where the root listens, and where the store would be
        self.root = hosts.start(0, [*command, "root", str(folder), *addresses], **pipe)
        rest = map(str, (steps, most_bytes, linger, 30.0 if only else 6.0))
        self.host = hosts.start(1, [*command, "host", str(folder), *rest], **pipe)

    def wait_for(self, step):
        """Read what the root has until it has that step."""
        for line in self.root.stdout:
            self.steps.append(json.loads(line)[1])
            if self.steps[-1] >= step:
                return
        raise AssertionError(f"the root ended after steps {self.steps}")

    def finish(self, *, arrives=True):
        """Return what host and root say when the host's last step has arrived, if it can."""
        host = json.loads(self.host.communicate(timeout=120)[0])
        if arrives and self.steps[-1:] != host["taken"][-1:]:
            self.wait_for(host["taken"][-1])
        (self._folder / "stop").touch()
        # What wait_for has read ahead is in the stream, where communicate() does not look.
        *steps, root = map(json.loads, self.root.stdout.read().splitlines())
        self.root.wait(timeout=60)
        self.steps += [step for _, step in steps]
        return host, root


def test_a_cut_of_some_seconds_costs_nothing(hosts, tmp_path):
    seconds, num_steps = 9.0, 600
    agents = Agents(hosts, tmp_path, num_steps)
    agents.wait_for(50)
    hosts.cut()
    time.sleep(seconds)
    hosts.mend()
    host, _ = agents.finish()
    assert host["delivered"]
    assert agents.steps == host["taken"] == list(range(num_steps))
    assert host["answers"] == list(range(len(host["answers"])))


def test_a_connection_that_breaks_costs_what_was_under_way(hosts, tmp_path):
    agents = Agents(hosts, tmp_path, 400)
    agents.wait_for(50)
    hosts.cut()
    time.sleep(2.0)
    hosts.reset()
    hosts.mend()
    host, _ = agents.finish()
    assert host["delivered"]
    assert host["taken"] == list(range(400))
    assert agents.steps == sorted(set(agents.steps))
    assert 200 < len(agents.steps) < 400
    assert agents.steps[-1] == 399


def test_a_cut_for_good_ends_nothing_but_the_link(hosts, tmp_path):
    agents = Agents(hosts, tmp_path, 300, linger=1.0)
    agents.wait_for(20)
    hosts.cut()
    host, root = agents.finish(arrives=False)
    assert not host["delivered"]
    assert host["taken"] == list(range(300))
    assert agents.steps == list(range(len(agents.steps)))
    assert 20 < len(agents.steps) < 300
    assert root["silent"] > 1.0
