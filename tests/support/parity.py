"""Records small trainings for parity on ranks that are forked from a warm process."""

import gc
import multiprocessing as mp
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rankscope.integrations.run_script import ScriptJob
from rankscope.tools.parity.compare import decide
from rankscope.tools.parity.reading import Recording, read_side
from rankscope.tools.parity.result import Answer
from support.forked_ranks import _become, _run, end_with

Rules = Sequence[tuple[str, Sequence[str]]]
TRAINING = str(Path(__file__).parents[2] / "benchmarks" / "parity_training.py")


@dataclass(frozen=True)
class Layout:
    ranks: int = 1  # 0 for a process that no launcher has started
    words: tuple[str, ...] = ()  # arguments of the training
    script: str = TRAINING
    variables: Mapping[str, str] = field(default_factory=dict)


def layout(
    ranks: int, *words: str, script: str = TRAINING, variables: Mapping[str, str] | None = None
) -> Layout:
    return Layout(ranks, words, script, variables or {})


Run = Callable[[Callable[..., None], Sequence[object], float], tuple[int, str, str]]
"""Runs a function in a process that ranks are then forked from; see ``support.forked_ranks``."""


def record(
    folder: Path,
    one: Layout,
    steps: int = 3,
    *,
    timeout: float = 280.0,
    run: Run = _run,
    **parity: Any,
) -> tuple[int, str]:
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


def _fork(ranks: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
    gc.freeze()
    forking = mp.get_context("fork")
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] or [{}]
    end_with([forking.Process(target=_main, args=(command, {**environment, **p})) for p in places])


def _main(command: Sequence[str], environment: Mapping[str, str]) -> None:
    import torch

    torch.set_num_threads(1)
    _become(command, environment)


class Recordings:
    """Recordings of layouts in a folder; each layout is recorded once."""

    def __init__(self, folder: Path, run: Run = _run) -> None:
        self._folder = folder
        self._run = run
        self._known: dict[str, Recording] = {}
        self._count = 0

    def side(self, one: Layout, name: str, steps: int, **parity: Any) -> Recording:
        key = repr((one, steps, sorted(parity.items())))
        if key not in self._known:
            place = self._folder / str(self._count)  # a failed one leaves its folder behind
            self._count += 1
            code, said = record(place, one, steps, run=self._run, **parity)
            assert code == 0, said
            self._known[key] = read_side(place, name)
        return replace(self._known[key], name=name)


def answer_of(
    recordings: Recordings,
    a: Layout,
    b: Layout,
    steps: int = 3,
    *,
    rules_a: Rules = (),
    rules_b: Rules = (),
    **parity: Any,
) -> Answer:
    """Compare the two sides of a pair as the command does."""
    sides = {"A": (a, rules_a), "B": (b, rules_b)}

    def again(side: Recording, eps: float) -> Recording:
        one, rules = sides[side.name]
        return recordings.side(one, "moved", steps, eps=eps, rules=rules, **parity)

    side_a, side_b = (
        recordings.side(one, name, steps, rules=rules, **parity)
        for name, (one, rules) in sides.items()
    )
    return decide(side_a, side_b, again)
