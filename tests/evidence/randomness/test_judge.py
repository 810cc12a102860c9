"""Random numbers that workers share, or do not share though they should."""

import json

import pytest

from rankscope.bus.finding import Severity
from rankscope.bus.plan import Plan
from rankscope.bus.step import MISSING_INT
from rankscope.evidence.randomness.judge import BETWEEN, DIFFERS, IDENTICAL, LOADERS, EqualRandom
from support.stepping import observe, run, words

SAME = Plan(random="same")
OWN = {"rng_used": [4] * 4, "rng_digest": [1, 2, 3, 4]}
ALL = {"rng_used": [12] * 4, "rng_digest": [9] * 4}


def test_a_seed_that_leaves_out_a_part_of_the_rank_is_a_warning():
    pairs = {"rng_used": [4] * 4, "rng_digest": [7, 8, 7, 8]}
    (told,) = run(EqualRandom(4), 3, start=10, **pairs)
    assert (told.cause, told.severity, told.ranks) == (IDENTICAL, Severity.WARNING, (0, 1, 2, 3))
    assert (told.first_step, told.last_step, told.count) == (10, 12, 3)
    json.dumps(told.numbers)
    assert "of ranks 0 and 2 and ranks 1 and 3 started the forward pass in equal" in words(told)
    one_moved = {"rng_used": [4] * 4, "rng_digest": [7, 8, 8, 8]}  # as where rank 0 logs samples
    assert run(EqualRandom(4), 3, **one_moved)[-1].severity is Severity.NOTE


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
        (None, OWN),
        (None, {"rng_used": [0] * 4, "rng_digest": [9] * 4}),  # nobody draws
        (
            None,
            {
                "rng_used": [1, 2, 4, 8],
                "rng_digest": [9, MISSING_INT, 8, 7],
                "rng_digest_numpy": [9] * 4,
            },
        ),
        (None, {"rng_used": [4, 0, 0, 0], "rng_digest": [9, 9, 9, 9]}),
        (SAME, ALL),
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
    told = run(EqualRandom(4, SAME), 3, **outside)
    [found] = told
    assert (found.key, found.cause, found.ranks) == ("rng-differs-between", DIFFERS, (3,))
    assert words(found)


def test_loader_processes_of_one_rank_that_are_alike_are_told():
    columns = {"loader_rng_numpy": [1, 2, 3, 4], "loader_rng_repeats": [0, 2, 0, 0]}
    told = run(EqualRandom(4), 3, **columns)
    assert [(one.key, one.cause, one.ranks) for one in told] == [(LOADERS, IDENTICAL, (1,))]
    assert told[0].severity is Severity.WARNING
    assert "numpy's random generator" in words(told[0])
    assert "several processes of rank 1" in words(told[0])
