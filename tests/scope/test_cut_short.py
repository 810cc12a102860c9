"""Ctrl-C that Python raises in the middle of the monitor's own work on the training thread."""

import contextlib
from typing import Any

import pytest

from rankscope import Run
from rankscope.bus.evidence import Table
from support.cut import Cut
from support.findings import faults
from support.loops import Loop
from support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 5
TRACED = range(2, 4)
STRIDE = 797
"""A prime: lines that come again and again are not met at the same place each time."""

EVIDENCE = {
    *("state_layout", "precision", "rng_used"),
    *("applied_scale", "applied_spread", "applied_odd"),
}
"""Columns, beside the digests, that are left out where the optimizer had not had its turn."""


def train(folder: str, cut: Cut) -> list[str]:
    loop = Loop(0, folder, hang_seconds=None)
    with contextlib.suppress(KeyboardInterrupt), loop.scope:
        for step in range(NUM_STEPS):
            with cut if step in TRACED else contextlib.nullcontext():
                loop.step(step)
    return loop.warnings


def cut_everywhere(rank: int, folder: str) -> list[str]:
    count = Cut()
    assert train(f"{folder}/whole", count) == []
    cuts = {str(at): Cut(at) for at in range(0, count.count, STRIDE)}
    cuts |= {f"end {at}": Cut(at, function="_end") for at in range(3)}  # of the backward pass
    cuts["handing over"] = Cut(0, function="_hand_over")  # of the step before
    reached = []
    for name, cut in cuts.items():
        assert train(f"{folder}/{name}", cut) == [], name
        if cut.cut:  # how many lines there are depends on what the agent has answered by then
            reached.append(name)
    return reached


def rows(run: Run) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return what was recorded of each step, worker, micro-batch and group, without times."""
    found = {}
    for table in Table:
        if "step" not in (names := run.table(table).column_names):
            continue
        names = [n for n in names if n != "time" and not n.endswith("seconds")]
        for row in run.table(table).select(names).to_pylist():
            found[table, row["step"], row.get("micro"), row.get("group")] = row
    return found


def test_a_step_is_recorded_whole_or_not_at_all(tmp_path):
    (names,) = run_ranks(cut_everywhere, 1, str(tmp_path), timeout=240)
    assert len(names) > 8
    complete = rows(Run.open(tmp_path / "whole"))
    lasts = set()
    for name in names:
        run = Run.open(tmp_path / name)
        assert run.status == "incomplete", name
        assert faults(run) == {}
        found = rows(run)
        last = max(step for _, step, *_ in found)
        lasts.add(last)
        assert found.keys() == {key for key in complete if key[1] <= last}, name
        for key, row in found.items():
            different = {n for n in row if row[n] != complete[key][n]}
            if "optimizer_steps" in different:
                assert row["optimizer_steps"] == 0
                left_out = {n for n in different if n.endswith("_digest")} | EVIDENCE
                different -= {"optimizer_steps", *left_out}
            assert different == set(), (name, key)
    assert lasts >= {0, 1, 2}


FUNCTIONS = ("_hand_over", "_collect_gradient", "take_seconds")


def cut_in_all(rank: int, folder: str) -> list[list[str]]:
    return [cut_while_a_step_is_sent(rank, f"{folder}/{each}", each) for each in FUNCTIONS]


def cut_while_a_step_is_sent(rank: int, run_dir: str, function: str) -> list[str]:
    """One rank catches Ctrl-C, and goes on with the batch that it was about to begin."""
    loop = Loop(rank, run_dir)
    for step in range(NUM_STEPS):
        if step == 3 and rank == 1:
            with Cut(0, function=function), pytest.raises(KeyboardInterrupt):
                loop.forward(step)
        loop.step(step)
    loop.close()
    return loop.warnings


cut = on_ranks(cut_in_all, 2)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_others_count_a_step_that_was_cut_short_here(cut, function):
    """Else this worker's steps would be held against other ones of the others from then on."""
    assert cut[0] == [[[]] * len(FUNCTIONS)] * 2
    run = Run.open(cut[1] / function)
    assert run.status == "complete"
    assert faults(run) == {}
    steps, norms_TW = run.per_worker("grad_norm")
    assert steps.tolist() == list(range(NUM_STEPS))
    _, losses_TW = run.per_worker("loss")
    _, digests_TW = run.per_worker("param_digest")
    for known_TW in (losses_TW == losses_TW, norms_TW == norms_TW):
        assert known_TW.tolist() == [[True, step != 2] for step in range(NUM_STEPS)]
    assert (digests_TW[[0, 1, 3, 4], 0] == digests_TW[[0, 1, 3, 4], 1]).all()
