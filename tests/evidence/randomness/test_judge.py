import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from rankscope.bus.finding import Severity
from rankscope.bus.plan import Plan
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.step import StepReport
from rankscope.evidence.randomness import KEY
from rankscope.evidence.randomness.judge import (
    BETWEEN,
    DIFFERS,
    IDENTICAL,
    LOADERS,
    RESUMED,
    UNUSED,
    EqualRandom,
    RandomRestart,
    UnusedRandom,
)
from rankscope.evidence.randomness.probe import RandomMeter
from rankscope.record.states import pack_state, unpack_state
from rankscope.stats.arrays import MISSING_INT
from support.stepping import evidence_of, observe, run, words
from support.streams import gathered

SAME = Plan(random="same")
UNKNOWN = [9, MISSING_INT, 8, 7]


def test_a_seed_that_leaves_out_a_part_of_the_rank_is_a_warning():
    pairs = {"rng_used": [4] * 4, "rng_digest": [7, 8, 7, 8]}
    (told,) = run(EqualRandom(4), 3, start=10, **pairs)
    assert (told.cause, told.severity, told.ranks) == (IDENTICAL, Severity.WARNING, (0, 1, 2, 3))
    assert (told.first_step, told.last_step, told.count) == (10, 12, 3)
    json.dumps(told.numbers)
    assert "of ranks 0 and 2 and ranks 1 and 3 started the forward pass in equal" in words(told)
    one_moved = {"rng_used": [4] * 4, "rng_digest": [7, 8, 8, 8]}  # as where rank 0 logs samples
    assert run(EqualRandom(4), 3, **one_moved)[-1].severity is Severity.NOTE
    parts = EqualRandom(4)  # of the same sequences, as keys and values are gathered
    assert evidence_of(parts, step_of(0, StateKind.EXCHANGED, [2] * W)) == []
    (told,) = run(parts, 3, start=1, **pairs)
    assert told.severity is Severity.NOTE
    assert "of ranks 0 and 2 and ranks 1 and 3" in words(told)


def test_a_worker_that_draws_nothing_where_others_do_is_named():
    used = [4, 4, 0, 4 + 32]  # and one that logs alone
    assert run(UnusedRandom(4), 23, rng_used=used) == []
    told = run(UnusedRandom(4), 30, rng_used=used)[-1]
    assert (told.key, told.severity, told.ranks) == (UNUSED, Severity.WARNING, (2,))
    assert "drew no random number in the forward pass in 30 steps in a row" in words(told)
    told = run(UnusedRandom(4), 30, rng_used=[32, 0, 32, 0])[-1]
    assert (told.key, told.severity, told.ranks) == (f"{UNUSED}-between", Severity.NOTE, (1, 3))
    assert "(numpy's): augmentation or sampling may be off" in words(told)
    for steps_of_all, severity in ((2, Severity.NOTE), (3, Severity.WARNING)):
        stops = UnusedRandom(4)
        assert run(stops, steps_of_all, rng_used=[4] * 4) == []
        told = run(stops, 30, start=steps_of_all, rng_used=[4, 0, 4, 0])[-1]
        assert (told.severity, told.ranks) == (severity, (1, 3))


def test_equal_random_numbers_outside_the_model_are_told_after_three_steps_in_a_row():
    detector = EqualRandom(4)
    outside = {"rng_used": [16 * 4] * 4, "rng_digest": [9] * 4}
    assert run(detector, 2, **outside) == []
    assert observe(detector, 2, rng_used=[0] * 4) == []  # as when an epoch begins
    assert run(detector, 2, start=3, **outside) == []
    (told,) = observe(detector, 5, **outside)
    assert (told.key, told.cause, told.severity) == (BETWEEN, IDENTICAL, Severity.WARNING)
    assert (told.first_step, told.ranks) == (3, (0, 1, 2, 3))
    assert "moved between the forward passes" in words(told)


def test_a_generator_that_moves_at_the_start_of_every_epoch_is_healthy():
    detector = EqualRandom(4)
    for step in range(60):
        moved = {"rng_used": [64] * 4, "rng_digest": [step] * 4} if step % 5 < 2 else {}
        assert observe(detector, step, **(moved or {"rng_used": [0] * 4})) == []


@pytest.mark.parametrize(
    ("plan", "columns"),
    [
        (None, {"rng_used": [4] * 4, "rng_digest": [1, 2, 3, 4]}),
        (None, {"rng_used": [0] * 4, "rng_digest": [9] * 4}),  # nobody draws
        (None, {"rng_used": [1, 2, 4, 8], "rng_digest": UNKNOWN, "rng_digest_numpy": [9] * 4}),
        (None, {"rng_used": [4, 0, 0, 0], "rng_digest": [9, 9, 9, 9]}),
        (SAME, {"rng_used": [12] * 4, "rng_digest": [9] * 4}),
        (None, {"loader_rng_numpy": [1, 2, 3, 4], "loader_rng_repeats": [0] * 4}),
        (None, {"loader_rng_repeats": [MISSING_INT] * 4}),
    ],
)
def test_generators_of_their_own_that_rest_or_that_are_planned_alike_are_no_finding(plan, columns):
    assert run(EqualRandom(4, plan), 50, **columns) == []


def test_generators_that_part_by_batches_of_other_sizes_are_no_fault_against_the_plan():
    def found(**sizes):
        detector = EqualRandom(4, SAME)
        assert run(detector, 2, rng_used=[4] * 4, rng_digest=[9] * 4) == []
        return run(detector, 3, rng_used=[4] * 4, rng_digest=[9, 9, 9, 1], **sizes)

    assert [one.severity for one in found()] == [Severity.WARNING]
    [note] = found(sequence_length=[48.0, 48.0, 48.0, 64.0])
    assert (note.cause, note.severity) == (DIFFERS, Severity.NOTE)
    assert "began in equal states, and are in different ones in 3 steps" in words(note)


def test_random_numbers_that_differ_against_the_plan_are_told():
    odd = {"rng_used": [4] * 4, "rng_digest": [9, 9, 9, 1]}
    told = run(EqualRandom(4, SAME), 3, **odd)
    assert [(one.cause, one.ranks) for one in told] == [(DIFFERS, (3,))]
    assert "but the generators of rank 3 (torch's on the CPU) were in other" in words(told[0])
    outside = {"rng_used": [64] * 4, "rng_digest": [9, 9, 9, 1]}
    [found] = run(EqualRandom(4, SAME), 3, **outside)
    assert (found.key, found.cause, found.ranks) == ("rng-differs-between", DIFFERS, (3,))


def test_loader_processes_of_one_rank_that_are_alike_are_told():
    columns = {"loader_rng_numpy": [1, 2, 3, 4], "loader_rng_repeats": [0, 2, 0, 0]}
    told = run(EqualRandom(4), 3, **columns)
    assert [(one.key, one.cause, one.ranks) for one in told] == [(LOADERS, IDENTICAL, (1,))]
    assert told[0].severity is Severity.WARNING
    assert "numpy's random generator" in words(told[0])
    assert "several processes of rank 1" in words(told[0])


W = 4
FIRST, SAVED = [1, 2, 3, 4], [11, 12, 13, 14]


def step_of(number, kind, values_W, name="numpy's"):
    row = StateDifference(kind, f"{KEY}: {name}", np.array(values_W), np.zeros(W, bool))
    return StepReport(replace(gathered(number, [[]] * W), differences=(row,)), {})


def after_restart(now_W, first_W=FIRST, saved_W=SAVED):
    before, after = RandomRestart(W), RandomRestart(W)
    assert evidence_of(before, step_of(0, StateKind.STARTED, first_W)) == []
    assert evidence_of(before, step_of(9, StateKind.SAVED, saved_W)) == []
    before.close()
    after.restore(unpack_state(pack_state(before.state())))
    return evidence_of(after, step_of(10, StateKind.STARTED, now_W))


@pytest.mark.parametrize(
    ("now_W", "ranks", "text"),
    [
        ([11, 11, 11, 11], (1, 2, 3), "ranks 1–3 hold rank 0's random state (numpy's)"),
        ([12, 11, 13, 14], (0, 1), "rank 0 holds rank 1's and rank 1 holds rank 0's random state"),
        ([7, 7, 7, 7], (0, 1, 2, 3), "ranks 0–3 hold one and the same random state"),
    ],
)
def test_a_copy_or_a_permutation_is_named(now_W, ranks, text):
    [found] = after_restart(now_W)
    assert (found.cause, found.severity, found.ranks) == (RESUMED, Severity.WARNING, ranks)
    assert text in words(found)


@pytest.mark.parametrize(
    ("now_W", "first_W", "saved_W"),
    [
        (SAVED, FIRST, SAVED),  # restored
        (FIRST, FIRST, SAVED),  # seeded as before
        ([2, 1, 3, 4], FIRST, FIRST),  # nobody draws from it
        ([5, 5, 5, 5], [5, 5, 5, 5], SAVED),  # seeded alike from the start
    ],
)
def test_other_restarts_are_healthy(now_W, first_W, saved_W):
    assert after_restart(now_W, first_W, saved_W) == []


def test_the_states_are_those_of_the_generators():
    meter = RandomMeter(torch.device("cpu"))
    before = meter.held()
    assert before == meter.held()
    torch.rand(1)
    after = meter.held()
    assert {name for name in before if before[name] != after[name]} == {"torch's on the CPU"}
