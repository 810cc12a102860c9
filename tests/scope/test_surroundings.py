"""What surrounds a step of the training does not see the monitor, whatever it does inside."""

import hashlib
import logging
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import rankscope
from rankscope import Run
from rankscope.core import canary_plan
from rankscope.core.batches import unpack_batch
from rankscope.core.canary_messages import Answer
from rankscope.core.canary_plan import ASKED_FOR, Planned
from support.loops import PLAN, collect_warnings
from support.ranks import run_ranks
from support.surroundings import SURROUNDINGS, WRAPPERS, Training

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS = 6
KEEP, RUN, VERIFY = 1, 3, 4
"""In which of a surrounding's steps a batch is kept, a canary runs, and a gradient is computed
again; the others are only measured."""


def train(rank: int, wrapper: str, run_dir: str | None, names: list[str]) -> dict[str, Any]:
    canary_plan.LAG = 10**6  # none but those of the test
    collect_warnings()
    training = Training(rank, wrapper)
    scope: Any = None
    if run_dir is not None:
        options = {"overhead_budget": None, "plan": PLAN, "announce": False}
        scope = rankscope.watch(training.called, training.optimizer, run_dir=run_dir, **options)
    said = _lines()
    results = {}
    for name in names:
        training.begin()
        root = None if scope is None or scope._canary is None else Root(scope, rank)
        first = -1 if scope is None else scope._collector.step
        seen, raised = [], []
        for step in range(STEPS):
            if root is not None:
                root.before(step)
            if scope is not None and step == VERIFY:
                scope.verify()
            try:
                seen.append(SURROUNDINGS[name](training, *training.batch(step)))
            except Exception as error:
                raised.append((step, type(error).__name__, str(error)))
                training.optimizer.zero_grad()
            if scope is not None:
                scope._collector.close_step()
        bits = hashlib.sha256(b"".join(training.bits())).hexdigest()
        steps = range(first, first if scope is None else scope._collector.step)
        results[name] = {"seen": seen, "raised": raised, "bits": bits, "left": left()}
        results[name] |= {"said": said[:], "steps": steps}
        said.clear()
    if scope is not None:
        scope.close()
    return results


class Root:
    """Plays the root's part in a canary, which is to run in a certain step.

    Args:
        scope: Of this rank.
        rank: This rank, whose batch is kept.
    """

    def __init__(self, scope: Any, rank: int) -> None:
        self._scope, self._canary = scope, scope._canary
        self._answers: list[bytes] = []
        self._canary._send = self._answers.append
        self._rank = rank

    def before(self, step: int) -> None:
        """Say what is to come, before a step."""
        now = self._scope._collector.step
        planned = Planned(ASKED_FOR, 0, 1, now, now)
        if step == KEEP:
            self._canary.plan(planned)
        if step == RUN:
            answers: list[Any] = [None] * 2
            dist.all_gather_object(answers, self._answers)
            kept = [Answer.unpack(one).batch for several in answers for one in several]
            if len(kept) == len(answers) and all(kept):
                self._canary.ready(planned, tuple(map(unpack_batch, kept)))


def _lines() -> list[str]:
    """Return a list that gets every line of the log."""
    lines: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("rankscope")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    return lines


def left() -> list[Any]:
    """Return what a step may have left behind of surroundings."""
    return [
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch.is_anomaly_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
    ]


def train_all(rank: int, folder: str, wrapper: str, names: list[str]) -> Any:
    start = time.perf_counter()
    alone = train(rank, wrapper, None, names)
    middle = time.perf_counter()
    watched = train(rank, wrapper, f"{folder}/{wrapper}", names)
    return alone, watched, middle - start, time.perf_counter() - middle
