"""Records small trainings for parity on ranks that are forked from a warm process."""

import gc
import multiprocessing as mp
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankscope.integrations.run_script import ScriptJob
from rankscope.tools.parity.compare import decide
from rankscope.tools.parity.reading import read_side
from support.forked_ranks import _become, _run, end_with

TRAINING = str(Path(__file__).parents[2] / "benchmarks" / "parity_training.py")


@dataclass(frozen=True)
class Layout:
    ranks: int = 1  # 0 for a process that no launcher has started
    words: tuple[str, ...] = ()  # arguments of the training
    script: str = TRAINING
    variables: Mapping[str, str] = field(default_factory=dict)


def layout(ranks, *words, script=TRAINING, variables=None):
    return Layout(ranks, words, script, variables or {})


def record(folder, one, steps=3, *, timeout=280.0, run=_run, **parity):
    """Record a layout; ``run`` runs a function in a process that ranks are then forked from."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launched = {
        "WORLD_SIZE": str(one.ranks),
        "LOCAL_WORLD_SIZE": str(one.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    variables = {**(launched if one.ranks else {}), "OMP_NUM_THREADS": "1", **one.variables}
    job = ScriptJob(str(folder), "training", parity={"steps": steps, **parity})
    command = [sys.executable, one.script, *one.words]
    given = (one.ranks, command, job.to_environment({**os.environ, **variables}))
    code, out, err = run(_fork, given, timeout)
    return code, out + err


def _fork(ranks, command, environment):
    gc.freeze()
    forking = mp.get_context("fork")
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] or [{}]
    end_with([forking.Process(target=_main, args=(command, {**environment, **p})) for p in places])


def _main(command, environment):
    import torch

    torch.set_num_threads(1)
    _become(command, environment)


class Recordings:
    """Recordings of layouts in a folder; each layout is recorded once."""

    def __init__(self, folder, run=_run):
        self._folder = folder
        self._run = run
        self._known = {}
        self._count = 0

    def side(self, one, name, steps, **parity):
        key = repr((one, steps, sorted(parity.items())))
        if key not in self._known:
            place = self._folder / str(self._count)  # a failed one leaves its folder behind
            self._count += 1
            code, said = record(place, one, steps, run=self._run, **parity)
            assert code == 0, said
            self._known[key] = read_side(place, name)
        return replace(self._known[key], name=name)


def answer_of(recordings, a, b, steps=3, *, rules_a=(), rules_b=(), **parity):
    """Compare the two sides of a pair as the command does."""
    sides = {"A": (a, rules_a), "B": (b, rules_b)}

    def again(side, eps):
        one, rules = sides[side.name]
        return recordings.side(one, "moved", steps, eps=eps, rules=rules, **parity)

    side_a, side_b = (
        recordings.side(one, name, steps, rules=rules, **parity)
        for name, (one, rules) in sides.items()
    )
    return decide(side_a, side_b, again)
