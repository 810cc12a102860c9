"""Traces of watched jobs on real ranks."""

from pathlib import Path
from typing import Any

import pytest

from rankscope import Run
from rankscope.bus.evidence import Table
from rankscope.bus.replicas import TRACE_WIDTH
from rankscope.gradients.digest import digest_tensor
from support.loops import Loop
from support.models import make_batch
from support.ranks import alone_and_watched

pytestmark = pytest.mark.ranks

STEPS = 5
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {},
    "bucket views": {"ddp": {"gradient_as_bucket_view": True}},
    "unused": {"branch": True, "ddp": {"find_unused_parameters": True}},
    "every second step": {"every": 2},
}


def train(rank: int, way: str, run_dir: str | None) -> dict[str, Any]:
    """Train for some steps, traced if there is a place to record; digests are taken by hand."""
    traced = {"trace": True} if run_dir else {}
    loop = Loop(rank, run_dir, **WAYS[way], **traced)
    seen: list[tuple[int, str, str, int, float]] = []

    def see(step: int, kind: str) -> None:
        for name, parameter in loop.model.named_parameters():
            tensor = parameter.grad if kind == "reduced" else parameter
            if tensor is not None:
                norm = float(tensor.detach().double().norm())
                seen.append((step, kind, name, int(digest_tensor(tensor)), norm))

    see(-1, "parameter")
    for step in range(STEPS):
        if way == "micro-batches":
            with loop.ddp.no_sync():
                loop.forward(10 + step).backward()
        branch = {"use_branch": step % 2 == 0} if way == "unused" else {}
        loss = loop.ddp(**make_batch(rank, step), **branch)["loss"]
        loss.backward()
        see(step, "reduced")
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        see(step, "parameter")
    loop.close()
    assert loop.warnings == []
    return {"seen": seen, "bits": loop.bits()}


trained = alone_and_watched(train, WAYS, 2)


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = Run.open(path).table(Table.TRACES).to_pylist()
    return rows


@pytest.mark.parametrize("way", WAYS)
def test_a_trace_holds_what_the_training_held_and_changes_no_bit(trained, way):
    ranks, folder = trained
    for alone, traced in (rank[way] for rank in ranks):
        assert traced["bits"] == alone["bits"]
    every = WAYS[way].get("every", 1)
    seen = [row for row in ranks[0][way][1]["seen"] if row[0] < 0 or row[0] % every == 0]
    rows = [row for row in rows_of(folder / way) if row["kind"] != "buffer"]
    found = {(r["step"], r["kind"], r["name"]): (r["digest"], r["norm"]) for r in rows}
    assert len(found) == len(rows)
    assert found.keys() == {row[:3] for row in seen}
    for step, kind, name, digest, norm in seen:
        assert found[step, kind, name] == (digest, pytest.approx(norm, rel=1e-6))
    assert {len(row["sketch"]) for row in rows} == {TRACE_WIDTH}
