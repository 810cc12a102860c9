"""Two hosts on one machine: network namespaces with addresses of their own, joined by a switch.

Each has a network for the training and one for the agents, which can be cut behind the switch: both
ends keep their addresses. Needs root and ``ip``. Files and processes are the machine's.
"""

import functools
import itertools
import os
import signal
import subprocess
import sys

NETWORKS = ("training", "agents")
_numbers = itertools.count()


@functools.cache
def why_not():
    """Return why no network namespace can be made here; None if one can."""
    name = f"try-{os.getpid()}"
    try:
        made = subprocess.run(
            ["ip", "netns", "add", name], check=False, capture_output=True, text=True
        )
    except FileNotFoundError:
        return "the command ip (iproute2) is not installed"
    if made.returncode:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


class TwoHosts:
    """Two hosts, number 0 and 1, while the context lasts; then their processes are killed."""

    def __init__(self, folder):
        prefix = f"rs-{os.getpid()}-{next(_numbers)}"
        self._spaces = [f"{prefix}-{end}" for end in ("0", "1", "switch")]
        self._processes = []
        self.folders = [folder / f"host{host}" for host in (0, 1)]

    def __enter__(self):
        for each in self.folders:
            each.mkdir(parents=True, exist_ok=True)
        try:
            self._join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    @staticmethod
    def address(host, network="training", version=4):
        number = NETWORKS.index(network)
        return f"10.213.{number}.{host + 1}" if version == 4 else f"fd00:213:{number}::{host + 1}"

    def start(self, host, command, *, env=None, **how):
        places = dict.fromkeys(("TMPDIR", "XDG_RUNTIME_DIR"), str(self.folders[host]))
        interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "training")
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._spaces[host], *command],
            env={**os.environ, **places, **interfaces, **(env or {})},
            start_new_session=True,
            **how,
        )
        self._processes.append(process)
        return process

    def torchrun(self, script, *arguments, per_host=2, env=None, **how):
        """Start ``torchrun`` on both hosts over the training's network; its ranks are forks."""
        return [
            self.start(
                host,
                [
                    *(sys.executable, "-m", "support.forked_ranks"),
                    *("--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", str(per_host)),
                    *("--master-addr", self.address(0), "--master-port", "29500"),
                    *(str(script), *arguments),
                ],
                env=env,
                **how,
            )
            for host in (0, 1)
        ]

    def cut(self, host=1, network="agents"):
        _ip("-n", self._spaces[2], "link", "set", f"{network}{host}", "nomaster")

    def mend(self, host=1, network="agents"):
        _ip("-n", self._spaces[2], "link", "set", f"{network}{host}", "master", network)

    def connections(self, host=1, network="agents", *options):
        """Return a host's IPv4 connections over a network, as ``ss`` with these options shows."""
        there = f"{self.address(host, network).rpartition('.')[0]}.0/24"
        command = ["ss", "-Ht", *options, "state", "established", "dst", there]
        return subprocess.run(
            ["ip", "netns", "exec", self._spaces[host], *command],
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def reset(self, host=1, network="agents"):
        """Break a host's connections over a network, as a switch that loses its state does."""
        assert self.connections(host, network, "--kill")
        assert not self.connections(host, network)

    def _join(self):
        *hosts, switch = self._spaces
        for space in self._spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        for network in NETWORKS:
            _ip("-n", switch, "link", "add", network, "type", "bridge", "forward_delay", "0")
            _ip("-n", switch, "link", "set", network, "up")
            for number, host in enumerate(hosts):
                port = f"{network}{number}"
                _ip("-n", switch, "link", "add", port, "type", "veth",
                    "peer", "name", network, "netns", host)  # fmt: skip
                _ip("-n", switch, "link", "set", port, "master", network, "up")
                _ip("-n", host, "addr", "add", f"{self.address(number, network)}/24",
                    "dev", network)  # fmt: skip
                _ip("-n", host, "addr", "add", f"{self.address(number, network, 6)}/64",
                    "dev", network, "nodad")  # fmt: skip
                _ip("-n", host, "link", "set", network, "up")


def _ip(*arguments):
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
