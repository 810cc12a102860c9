"""Joins the process group that the other checks use."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankscope.doctor.launcher import choose_backend
from rankscope.doctor.result import CheckResult, Facts, Status, unlike_most
from rankscope.doctor.stage import Bench, Stage

NAME, TITLE = "process_group", "Process group"


def look(bench: Bench) -> Facts:
    """Join, and count the workers by a first all-reduce."""
    began = time.perf_counter()
    backend = choose_backend(bench.place, bench.device)
    own = bench.device.type != "cpu" and backend != "gloo"
    store: Any = bench.store
    dist.init_process_group(
        backend,
        store=store,
        rank=bench.place.rank,
        world_size=bench.place.num_ranks,
        timeout=timedelta(seconds=3 * bench.options.seconds + 60),  # ours is shorter, and names who
        device_id=bench.device if own else None,
    )
    ones = torch.ones(1, device=bench.device)
    dist.all_reduce(ones)
    counted = int(ones.item())
    return {"backend": backend, "counted": counted, "seconds": time.perf_counter() - began}


def judge(facts: Sequence[Facts]) -> list[CheckResult]:
    """Compare the number of workers that were counted with those that are there."""
    seconds = max(fact["seconds"] for fact in facts)
    backends = [str(fact["backend"]) for fact in facts]
    numbers = {"backend": backends[0], "seconds": seconds}
    wrong = [rank for rank, fact in enumerate(facts) if fact["counted"] != len(facts)]
    odd = unlike_most(backends)
    if odd or wrong:
        found = (
            f"ranks chose different backends: {' and '.join(sorted(set(backends)))}"
            if odd
            else f"a first all-reduce counted {facts[wrong[0]]['counted']} of {len(facts)} ranks"
        )
        advice = "Check that all ranks have the same kind of device, and one launcher."
        ranks = odd or tuple(wrong)
        return [CheckResult(NAME, TITLE, Status.ERROR, found, advice, numbers, ranks)]
    found = f"{backends[0]}, joined within {seconds:.1f} s"
    return [CheckResult(NAME, TITLE, Status.OK, found, numbers=numbers)]


STAGE = Stage(
    NAME,
    TITLE,
    look,
    judge,
    together=True,
    advice="Check that ranks reach each other over the network (interfaces, firewall), and that "
    "the backend is built into torch.",
)
