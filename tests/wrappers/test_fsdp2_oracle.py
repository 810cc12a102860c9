"""What the tap reads under FSDP2, against an unsharded copy of the model; and the same bits."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rankscope.wrappers.fsdp2_model import fsdp2_process_group, managed_parameters
from support.fsdp2_modes import MODES, Mode
from support.fsdp2_training import (
    WIDTH,
    Session,
    local_gradient,
    make_tap,
    optimize,
    start,
    state_of,
    train_step,
)
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks
STEPS = 2
SKETCH_NORM_ERROR = (2 / WIDTH) ** 0.5
"""Standard deviation of a squared norm that comes from a sketch, relative."""


ATTACHED_LATE = ("accumulated", "shard size 1")
"""Modes in which the tap comes when the training has begun."""


def train_untapped(session: Session, steps: range) -> None:
    for step in steps:
        train_step(session, step, None)
        optimize(session)


def train_mode(mode: Mode) -> dict[str, Any]:
    """Train tapped, but for the last step, and untapped.

    Returns for each tapped step what was read and what is exact, and all bits of both trainings.
    """
    session = start(mode)
    first = 1 if mode.name in ATTACHED_LATE else 0
    train_untapped(session, range(first))
    tap = make_tap(session)
    steps = []
    for step in range(first, STEPS):
        gradient, micro = local_gradient(session, step)
        assert not tap.complete
        train_step(session, step, tap)
        assert tap.complete
        assert not tap.aborted
        steps.append({**exact(tap, gradient, micro), **read(tap)})
        optimize(session)
    tap.remove()
    train_untapped(session, range(STEPS, STEPS + 1))
    alone = start(mode)
    train_untapped(alone, range(STEPS + 1))
    bits = state_of(session), state_of(alone)
    ranks = list(managed_parameters(session.model)[0].group.ranks)
    assert dist.get_process_group_ranks(fsdp2_process_group(session.model)) == ranks
    return {"ranks": ranks, "copies": tap.reduced_copies, "steps": steps, "bits": bits}


def exact(tap: Any, gradient: dict[str, torch.Tensor], micro: list[float]) -> dict[str, Any]:
    sketcher = tap._sketcher
    totals = sketcher.new_totals()
    squared_norms = np.zeros(len(sketcher.groups))
    for name, value in gradient.items():
        sketcher.measure(name, value, totals)
        squared_norms[sketcher.groups.index_of[name]] += float(value.double().square().sum())
    return {
        "gradient": np.concatenate([v.double().flatten().numpy() for v in gradient.values()]),
        "exact squared norms": squared_norms,
        "exact sketches": totals.sketches.numpy(),
        "exact micro": np.array(micro),
    }


def read(tap: Any) -> dict[str, Any]:
    local = tap.collect()
    reduced, micro = local.reduced, local.micro_squared_norms
    return {
        "squared norms": local.totals.squared_norms.numpy(),
        "sketches": local.totals.sketches.numpy(),
        "largest": float(local.totals.largest.max()),
        "nonfinite": int(local.totals.nonfinite.sum()),
        "micro": None if micro is None else micro.numpy(),
        "reduced squared norm": None if reduced is None else float(reduced.squared_norms.sum()),
        "reduced sketches": None if reduced is None else reduced.sketches.numpy(),
    }


def num_ranks_of(mode: Mode) -> int:
    """Return 4 where a mesh has two dimensions or a parameter's shards are uneven, and 2 else."""
    two_dimensions = mode.mesh != "1-D" or "reshard_after_forward" in mode.options
    return 4 if two_dimensions or mode.name in ("1-D", "second dimension cut") else 2


def work(rank: int) -> dict[str, Any]:
    modes = [mode for mode in MODES if num_ranks_of(mode) == dist.get_world_size()]
    return {mode.name: train_mode(mode) for mode in modes}


@pytest.fixture(scope="module")
def by_number():
    return {number: run_ranks(work, number, timeout=240) for number in (2, 4)}


def steps_of(ranks, mode: Mode):
    """Yield the steps of each set of ranks that are compared, one entry per worker."""
    for group in {tuple(by_mode[mode.name]["ranks"]) for by_mode in ranks}:
        workers = [ranks[rank][mode.name] for rank in group]
        yield from zip(*(worker["steps"] for worker in workers), strict=True)


def cosines(vectors_WN: np.ndarray) -> np.ndarray:
    units = vectors_WN / np.linalg.norm(vectors_WN, axis=1, keepdims=True)
    return (units @ units.T)[np.triu_indices(len(units), 1)]


def relative(measured: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(measured - exact) / np.linalg.norm(exact))


def check_norms_of_all_groups(ranks, mode):
    tolerance = 5 * SKETCH_NORM_ERROR if mode.parts else 1e-5
    for step in steps_of(ranks, mode):
        for worker in step:
            np.testing.assert_allclose(
                worker["squared norms"], worker["exact squared norms"], rtol=tolerance
            )
            assert worker["nonfinite"] == 0
            if not mode.parts:
                assert worker["largest"] == pytest.approx(
                    np.abs(worker["gradient"]).max(), rel=1e-5
                )


def check_sketches_and_cosines(ranks, mode):
    for step in steps_of(ranks, mode):
        for worker in step:
            assert relative(worker["sketches"], worker["exact sketches"]) < 1e-5
        estimated = cosines(np.array([worker["sketches"].sum(0) for worker in step]))
        true = cosines(np.array([worker["gradient"] for worker in step]))
        assert np.abs(true).max() < 0.9  # the workers do differ
        np.testing.assert_allclose(estimated, true, atol=4 / WIDTH**0.5)


def check_the_reduced_gradient(ranks, mode):
    copies = ranks[0][mode.name]["copies"]
    assert copies == {"HSDP": 2, "replicas": 4}.get(mode.mesh, 1)
    seen = 0
    for step in steps_of(ranks, mode):
        if step[0]["reduced sketches"] is None:
            assert not mode.reads_reduced
            continue
        seen += 1
        mean = np.mean([worker["gradient"] for worker in step], axis=0)
        squared_norm = sum(worker["reduced squared norm"] for worker in step) / copies
        assert squared_norm == pytest.approx(mean @ mean, rel=mode.rounding)
        sketches = sum(worker["reduced sketches"] for worker in step) / copies
        means = np.mean([worker["exact sketches"] for worker in step], axis=0)
        assert relative(sketches, means) < mode.rounding
    assert seen or not mode.reads_reduced


def check_norms_of_micro_batches(ranks, mode):
    for step in steps_of(ranks, mode):
        for worker in step:
            if mode.accumulate == 1 or mode.mesh == "TP":
                assert worker["micro"] is None
                continue
            assert len(worker["micro"]) == mode.accumulate
            first, *others = worker["micro"] / worker["exact micro"]
            assert first == pytest.approx(1, rel=1e-5)
            tolerance = 1e-5 if mode.parts else 5 * SKETCH_NORM_ERROR
            np.testing.assert_allclose(others, 1, atol=tolerance)


def check_bits(ranks, mode):
    for by_mode in ranks:
        tapped, alone = by_mode[mode.name]["bits"]
        assert len(alone) > 20
        assert tapped == alone


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_what_is_read_is_the_gradient_of_the_unsharded_model_and_no_bit_changes(by_number, mode):
    ranks = by_number[num_ranks_of(mode)]
    check_norms_of_all_groups(ranks, mode)
    check_sketches_and_cosines(ranks, mode)
    check_the_reduced_gradient(ranks, mode)
    check_norms_of_micro_batches(ranks, mode)
    check_bits(ranks, mode)
