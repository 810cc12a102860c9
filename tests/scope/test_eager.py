"""``RANKSCOPE_EAGER=1``: all that comes due by itself does so in 30 steps, and changes no bit."""

import os
import sys
from typing import Any

import numpy as np
import pytest

from rankscope import Run
from rankscope.bus import pace
from rankscope.bus.evidence import Table
from rankscope.errors import UsageError
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 30


def train(rank: int, folder: str) -> dict[str, Any]:
    """Train alone and watched, and count the gradients that were computed again."""
    from rankscope.evidence.reference.reference import ReferenceStep
    from support.loops import Loop

    computed = []
    compute = ReferenceStep.compute

    def count(reference: ReferenceStep, passes: Any) -> Any:
        part = compute(reference, passes)
        computed.append(part.declined)
        return part

    ReferenceStep.compute = count  # type: ignore[method-assign]
    bits = []
    for run_dir in (None, f"{folder}/run"):
        loop = Loop(rank, run_dir, overhead_budget=0.01)
        for step in range(STEPS):
            loop.step(step)
        if run_dir is not None:
            loop.close()
        bits.append([p.detach().numpy().tobytes().hex() for p in loop.model.parameters()])
    return {"bits": bits, "computed": computed, "warnings": loop.warnings}


def be_eager() -> None:
    """Have the ranks import all again, now that the environment says so."""
    os.environ[pace.VARIABLE] = "1"
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("rankscope", "support")
    ]:
        del sys.modules[name]


def test_all_comes_due_in_thirty_steps(tmp_path):
    for seen in run_ranks(train, 2, str(tmp_path), prepare=be_eager):
        alone, watched = seen["bits"]
        assert alone == watched
        assert seen["computed"] == [""] * len(pace.EAGER.references)
        assert seen["warnings"] == []
    run = Run.open(tmp_path / "run")
    steps, of_TW = run.per_worker("canary_of")
    ran = steps[np.isfinite(of_TW).all(axis=1)].tolist()
    assert ran[0] == 3  # within the four steps of the shortest tests
    assert len(ran) > 1
    observed = run.columns(Table.STEPS, "step", "observed")
    left_out = observed["step"][~observed["observed"]]
    assert left_out.size > 0  # the budget holds for steps that are so short
    assert left_out.min() > pace.EAGER.governed_after - 1
    assert {path.name for path in (run.path / "rollups").iterdir()} == {"8", "24", "samples"}


def differ(rank: int, folder: str) -> str:
    """Be eager on one rank alone, or on all but one."""
    from rankscope.session import opening
    from support.loops import Loop

    if rank == 1:
        opening.PACE = pace.Pace() if pace.PACE is pace.EAGER else pace.EAGER
    try:
        Loop(rank, f"{folder}/run")
    except UsageError as error:
        return str(error)
    return ""


def test_all_ranks_are_eager_or_none(tmp_path):
    if pace.PACE is pace.EAGER:
        return  # all of them are
    for said in run_ranks(differ, 2, str(tmp_path)):
        assert said.startswith("watch() expected the same options on every rank")
        assert pace.VARIABLE in said
