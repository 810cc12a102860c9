"""Trainings with an agent of their own, to which a test does what should never happen to them."""

import contextlib
import json
import mmap
import os
import signal
import struct
import time
from itertools import count
from pathlib import Path

from support.ranks import answer, forked

_COUNT = struct.Struct("=q")


class Counter:
    """How many steps a rank has ended, in memory that outlives it."""

    def __init__(self, path):
        if not path.exists():
            path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    @property
    def value(self):
        return int(_COUNT.unpack_from(self._memory)[0])

    @value.setter
    def value(self, value):
        _COUNT.pack_into(self._memory, 0, value)


def train(loop, counter):
    for step in count():
        time.sleep(0.01)  # of thousands of steps, some that are meant to be healthy would not be
        loop.step(step)
        counter.value = step + 1


class Job:
    """Ranks that train, each a process, and the agent that they have started."""

    def __init__(self, folder, work, num_ranks=2):
        self.folder = folder
        self.run_dir = folder / "run"
        folder.mkdir(parents=True, exist_ok=True)
        store = str(folder / f"store-{os.getpid()}-{time.monotonic_ns()}")
        self.counters = [Counter(folder / f"steps-{rank}") for rank in range(num_ranks)]
        self._results, self.ranks = [], []
        for rank in range(num_ranks):
            receiving, sending = forked().Pipe(duplex=False)
            args = (work, rank, num_ranks, store, str(folder), sending)
            process = forked().Process(target=_main, args=args)
            process.start()
            sending.close()
            self.ranks.append(process)
            self._results.append(receiving)
        self.agent = -1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.ranks:
            process.kill()
            process.join()
        if self.agent > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.agent, signal.SIGKILL)

    @property
    def done(self):
        return [counter.value for counter in self.counters]

    def wait_for_steps(self, number):
        wait_until(lambda: min(self.done) >= number)
        if self.agent < 0:
            self.agent = self._find_agent()

    def kill(self, *ranks):
        for rank in ranks:
            os.kill(self.ranks[rank].pid, signal.SIGKILL)
        return time.time()

    def results(self):
        found = []
        for rank, pipe in enumerate(self._results):
            assert pipe.poll(150.0), f"rank {rank} hangs"
            error, result = pipe.recv()
            assert not error, f"rank {rank} raised:\n{error}"
            found.append(result)
        return found

    def wait_for_agent(self):
        wait_until(lambda: state_of(self.agent) in ("", "Z", "X"))

    def info(self):
        return dict(json.loads((self.run_dir / "run.json").read_text()))

    def _find_agent(self):
        children = Path(f"/proc/{self.ranks[0].pid}/task").glob("*/children")
        pids = [int(pid) for each in children for pid in each.read_text().split()]
        agents = [pid for pid in pids if b"rankscope.agent" in _command(pid)]
        assert len(agents) == 1, agents
        return agents[0]


def wait_until(true, seconds=60.0):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"it did not come within {seconds} s"
        time.sleep(0.01)


def state_of(pid):
    """Return the letter of a process's state; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _main(work, rank, num_ranks, store, folder, pipe):
    def of_rank(rank):
        return work(Path(folder), rank, Counter(Path(folder) / f"steps-{rank}"))

    answer(of_rank, rank, num_ranks, store, pipe, ())
