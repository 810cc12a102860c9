"""Diagnoses of simulated jobs, healthy and not."""

import itertools

import numpy as np
import pytest

from rankscope.agent.assembly import summarize
from rankscope.bus.detector import RunFacts
from rankscope.bus.finding import Severity
from rankscope.verdict.diagnosis import Diagnosis
from support.stepping import events_of
from support.streams import (
    accumulated,
    gathered,
    replicated,
    reports,
    shard,
    sharded,
    with_replacement,
)

DUPLICATES, OVERLAP, NONFINITE, PADDING = (
    "data.duplicate_batches",
    "data.overlapping_shards",
    "numerics.nonfinite",
    "padding-duplicates",
)


def diagnose(stream, num_steps, *, num_workers=8, named=True):
    """Return final findings by cause, and all events in order."""
    diagnosis = Diagnosis(RunFacts(num_workers))
    events = events_of(diagnosis, reports(stream, num_steps, named=named))
    events += diagnosis.close()
    return {finding.id: finding for finding in diagnosis.findings}, events


HEALTHY = {
    "one epoch": (lambda: sharded(960, 8, 4), 30),
    "many epochs": (lambda: sharded(960, 8, 4), 300),
    "padding at the border": (lambda: sharded(1001, 8, 4), 200),
    "sampler drops": (lambda: sharded(1005, 8, 4, drop_last=True), 200),
    "sampler and loader drop": (
        lambda: sharded(1005, 8, 4, drop_last=True, loader_drop_last=True),
        300,
    ),
    "padding and a loader that drops": (lambda: sharded(1001, 8, 4, loader_drop_last=True), 300),
    "tiny data": (lambda: sharded(10, 8, 4), 100),
    "epochs of one step": (lambda: sharded(30, 8, 4), 100),
    "accumulation over borders": (
        lambda: accumulated(sharded(197, 8, 4, loader_drop_last=True), 4),
        200,
    ),
    "accumulation, tiny": (lambda: accumulated(sharded(41, 8, 2), 3), 200),
    "single samples": (lambda: sharded(803, 8, 1), 400),
}
PADDED = {  # step and number of the samples that fill the first epoch up
    "padding at the border": (31, 7),
    "tiny data": (0, 6),
    "epochs of one step": (0, 2),
    "accumulation, tiny": (0, 7),
    "single samples": (100, 5),
}


@pytest.mark.parametrize(
    ("name", "named"),
    [
        *((name, True) for name in HEALTHY),
        *((name, False) for name in ("padding at the border", "accumulation over borders")),
    ],
)
def test_healthy_jobs_have_no_finding(name, named):
    make_stream, num_steps = HEALTHY[name]
    found, events = diagnose(make_stream(), num_steps, named=named)
    assert set(found) == ({PADDING} if name in PADDED else set())
    if name in PADDED:
        step, repeats = PADDED[name]
        note = found[PADDING]
        assert (note.severity, note.first_step) == (Severity.NOTE, step)
        assert note.evidence["repeated"] == repeats
        assert events == [note]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_same_order_in_each_epoch_is_no_overlap(shuffle):
    stream = sharded(1001, 8, 4, shuffle=shuffle, reshuffle=False)
    assert {DUPLICATES, OVERLAP}.isdisjoint(diagnose(stream, 200)[0])


@pytest.mark.parametrize("skipped", [3, 25])
def test_a_healthy_job_resumed_inside_an_epoch_has_a_note_at_most(skipped):
    stream = itertools.islice(sharded(1001, 8, 4), skipped, None)
    found, _ = diagnose(stream, 200)
    assert all(finding.severity is Severity.NOTE for finding in found.values())


@pytest.mark.parametrize(("num_workers", "batch"), [(1, 3), (2, 1), (3, 3), (8, 1), (32, 3)])
def test_healthy_jobs_of_any_size_have_no_finding(num_workers, batch):
    stream = sharded(517, num_workers, batch)
    found, _ = diagnose(stream, 400, num_workers=num_workers)
    padded = 517 % num_workers > 0 and 400 * num_workers * batch > 520
    assert set(found) == ({PADDING} if padded else set())


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_equal_seeds_without_sharding_are_duplicate_batches_and_nothing_else(batch):
    found, events = diagnose(replicated(900, batch, [0] * 8), 300)
    assert set(found) == {DUPLICATES}
    finding = found[DUPLICATES]
    assert finding.severity is Severity.ERROR
    assert finding.ranks == tuple(range(8))
    assert (finding.first_step, finding.last_step) == (0, 299)
    assert finding.evidence["workers_with_own_batches"] == 1
    assert "Ranks 0–7" in finding.explanation
    assert events[0].step == {1: 2, 2: 1, 4: 0}[batch]
    assert len(events) <= 12


def test_one_odd_worker_among_equal_ones():
    found, _ = diagnose(replicated(4096, 4, [9] + [0] * 7), 30)
    assert found[DUPLICATES].ranks == tuple(range(1, 8))
    assert found[DUPLICATES].evidence["groups"] == [list(range(1, 8))]
    assert found[DUPLICATES].evidence["workers_with_own_batches"] == 2


def test_the_odd_worker_overlaps_with_the_equal_ones_when_that_shows():
    found, _ = diagnose(replicated(300, 4, [9] + [0] * 7), 60)
    assert set(found) == {DUPLICATES, OVERLAP}
    assert found[OVERLAP].severity is Severity.ERROR
    assert found[OVERLAP].ranks == tuple(range(8))


def test_workers_that_each_shuffle_everything_overlap():
    found, events = diagnose(replicated(4096, 4, range(8)), 60)
    assert set(found) == {OVERLAP}
    finding = found[OVERLAP]
    assert finding.severity is Severity.ERROR
    assert finding.ranks == tuple(range(8))
    assert finding.evidence["drawn_from_own"] == 0
    assert "with replacement do not explain it" in finding.explanation
    assert [e.severity for e in events] == sorted(e.severity for e in events)
    assert len(events) < 15


def test_the_overlap_is_found_in_a_run_of_many_epochs_too():
    found, events = diagnose(replicated(200, 4, range(8)), 500)
    finding = found[OVERLAP]
    assert finding.severity is Severity.ERROR
    assert finding.first_step < 50
    assert finding.last_step >= 450  # shards overlap in each epoch of 50 steps
    assert len(events) < 20


def test_sampler_seeds_by_rank_are_found_under_sharding():
    found, _ = diagnose(sharded(4096, 8, 4, seeds=list(range(8))), 40)
    assert set(found) == {OVERLAP}
    assert found[OVERLAP].severity is Severity.ERROR
    assert found[OVERLAP].ranks == tuple(range(8))


@pytest.mark.parametrize("odd", [0, 5])
@pytest.mark.parametrize("named", [True, False], ids=["ids", "content"])
def test_a_single_sampler_seed_that_differs_is_named(odd, named):
    seeds = [0] * 8
    seeds[odd] = 1
    found, events = diagnose(sharded(4096, 8, 4, seeds=seeds), 100, named=named)
    assert set(found) == {OVERLAP}
    assert found[OVERLAP].ranks == (odd,)
    assert found[OVERLAP].severity is Severity.ERROR
    assert f"Rank {odd} drew" in found[OVERLAP].explanation
    assert len(events) < 10


def test_an_odd_worker_is_certain_before_its_repeats_are_many():
    found, _ = diagnose(sharded(4096, 8, 4, seeds=[1] + [0] * 7), 30)
    assert found[OVERLAP].severity is Severity.ERROR
    assert found[OVERLAP].ranks == (0,)
    assert found[OVERLAP].evidence["drawn_from_others"] < 40


@pytest.mark.parametrize("num_workers", [2, 4])
def test_few_workers_with_different_seeds(num_workers):
    stream = sharded(2000, num_workers, 4, seeds=list(range(num_workers)))
    found, _ = diagnose(stream, 150, num_workers=num_workers)
    assert found[OVERLAP].severity is Severity.ERROR
    assert found[OVERLAP].ranks == tuple(range(num_workers))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_workers", [2, 8])
def test_sampling_with_replacement_is_a_note_at_most_in_the_end(num_workers, seed):
    stream = with_replacement(2000, num_workers, 4, seed)
    found, events = diagnose(stream, 250, num_workers=num_workers)
    assert set(found) == {OVERLAP}
    assert found[OVERLAP].severity is Severity.NOTE
    assert "with replacement" in found[OVERLAP].explanation
    assert max(e.severity for e in events) < Severity.ERROR
    assert len(events) < 25


@pytest.mark.slow
def test_sampling_with_replacement_is_hardly_ever_called_an_error():
    calls = 0
    for seed in range(60):
        found, _ = diagnose(with_replacement(60, 2, 2, seed), 60, num_workers=2)
        calls += OVERLAP in found and found[OVERLAP].severity is Severity.ERROR
    assert calls <= 1  # the bound is 2 in 1,000


def test_content_that_occurs_twice_in_the_data_is_a_note_at_most():
    def stream():
        for batches in sharded(4000, 8, 4):
            yield [batch % 3700 for batch in batches]  # 300 contents occur twice

    found, _ = diagnose(stream(), 120, named=False)
    assert all(finding.severity is Severity.NOTE for finding in found.values())


@pytest.mark.parametrize("every", [2, 7])
def test_one_content_that_occurs_very_often_accuses_nobody(every):
    def stream():
        for t, batches in enumerate(sharded(100_000, 8, 4)):
            if t % every == 0:
                batches[t // every % 8][0] = -1
            yield batches

    found, _ = diagnose(stream(), 300, named=False)
    assert all(finding.severity is Severity.NOTE for finding in found.values())


def test_triplets_beside_each_other_in_an_unshuffled_file_are_no_error():
    def stream():
        for batches in sharded(4000, 8, 4, shuffle=False):
            yield [batch // 3 for batch in batches]

    found, _ = diagnose(stream(), 100, named=False)
    assert found[OVERLAP].severity is Severity.WARNING


def test_windows_that_share_samples_inside_each_step():
    def stream():
        for t in itertools.count():
            yield [np.arange(4) + 25 * t + 3 * rank for rank in range(8)]

    found, _ = diagnose(stream(), 40)
    assert set(found) == {OVERLAP}
    assert found[OVERLAP].severity is Severity.ERROR
    assert found[OVERLAP].ranks == tuple(range(8))


def test_batches_that_agree_once_by_chance_prove_nothing():
    generator = np.random.default_rng(2)

    def stream():
        for t in itertools.count():
            batches = [np.array([1000 * t + rank]) for rank in range(8)]
            if t % 10 == 0:
                i, j = generator.choice(8, 2, replace=False)
                batches[j] = batches[i]
            yield batches

    assert DUPLICATES not in diagnose(stream(), 200)[0]


def test_two_pairs_of_workers_are_two_groups_of_one_finding():
    stream = replicated(900, 4, [0, 1, 0, 1])
    found, _ = diagnose(stream, 5, num_workers=4)
    assert found[DUPLICATES].ranks == (0, 1, 2, 3)
    assert found[DUPLICATES].evidence["groups"] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("samples", [[[], []], [[1, 2], []], [[]], [[3]]])
def test_workers_without_samples_and_single_workers_have_no_finding(samples):
    found, _ = diagnose(itertools.repeat(samples), 50, num_workers=len(samples))
    assert found == {}


def test_the_order_of_workers_changes_nothing_but_their_names():
    order = [3, 0, 7, 1, 6, 2, 5, 4]
    seeds = [0] * 8
    seeds[3] = 1
    plain, _ = diagnose(sharded(4096, 8, 4, seeds=seeds), 60)
    mixed, _ = diagnose(([b[r] for r in order] for b in sharded(4096, 8, 4, seeds=seeds)), 60)
    assert mixed[OVERLAP].ranks == (0,)
    assert plain[OVERLAP].ranks == (3,)
    assert mixed[OVERLAP].evidence == plain[OVERLAP].evidence


def test_a_thousand_workers():
    stream = sharded(1 << 17, 1024, 8, seeds=[1] + [0] * 1023)
    found, _ = diagnose(stream, 12, num_workers=1024)
    assert found[OVERLAP].ranks == (0,)
    found, _ = diagnose(replicated(5000, 8, [0] * 1024), 5, num_workers=1024)
    assert found[DUPLICATES].ranks == tuple(range(1024))


def test_shards_of_the_simulated_sampler_are_what_they_should_be():
    shares = [shard(10, 4, rank, 0, 0) for rank in range(4)]
    assert sorted(set(np.concatenate(shares))) == list(range(10))
    assert [len(share) for share in shares] == [3] * 4
    cut = [shard(10, 4, rank, 0, 0, drop_last=True) for rank in range(4)]
    assert len(set(np.concatenate(cut))) == 8


# Values that are not finite ----------------------------------------------------------------


def steps_with(rows):
    """Return findings and events of two workers: (nonfinite, loss, optimizer_steps) per step."""
    diagnosis = Diagnosis(RunFacts(2))
    events = []
    for t, (nonfinite, loss, calls) in enumerate(rows):
        columns = {"nonfinite": nonfinite, "loss": loss, "optimizer_steps": calls}
        columns = {name: values for name, values in columns.items() if values is not None}
        step = gathered(t, [[2 * t], [2 * t + 1]], **columns)
        events += diagnosis.observe(summarize(step))
    live = {finding.id: finding for finding in diagnosis.findings}
    events += diagnosis.close()
    return live, {finding.id: finding for finding in diagnosis.findings}, events


NO_GRADIENT = "loss.no_gradient"


def with_norms(norms_TW):
    """Return events and findings of steps whose gradients have these norms; None: not measured."""
    diagnosis, events = Diagnosis(RunFacts(2)), []
    for t, norms_W in enumerate(norms_TW):
        columns = {} if norms_W is None else {"grad_norm": norms_W}
        step = gathered(t, [[2 * t], [2 * t + 1]], loss=[1.0, 2.0], **columns)
        events += [(t, e) for e in diagnosis.observe(summarize(step)) if e.cause == NO_GRADIENT]
    return events, [e for e in diagnosis.findings if e.cause == NO_GRADIENT]


def test_gradients_that_are_zero_everywhere_are_a_warning_from_the_eighth_step_on():
    zero, some = [0.0, 0.0], [0.0, 1e-30]
    events, findings = with_norms([some, zero, None, *[zero] * 7, *[some] * 16])
    ((opened, first), (closed, last)) = events
    assert (opened, first.id, first.severity) == (9, NO_GRADIENT, Severity.WARNING)
    assert (first.first_step, first.last_step, first.ranks) == (1, 9, (0, 1))
    assert "exactly zero in 8 steps since step 1" in first.explanation
    assert (closed, last.status) == (25, "closed")
    assert findings == [last]


@pytest.mark.parametrize("between", [[0.0, 1e-30], [np.inf, 0.0]])
def test_a_gradient_that_is_zero_now_and_then_or_unknown_is_none(between):
    assert with_norms([*[[0.0, 0.0]] * 7, between] * 3) == ([], [])
    assert with_norms([[0.0, np.nan]] * 30) == ([], [])


FINE = ([False, False], [1.0, 2.0], [1, 1])


def test_a_loss_that_is_not_finite_is_an_error_at_once():
    live, _, events = steps_with([FINE, ([False, True], [1.0, np.nan], [1, 1])])
    finding = live[NONFINITE]
    assert (finding.severity, finding.ranks, finding.first_step) == (Severity.ERROR, (1,), 1)
    assert "loss of rank 1" in finding.explanation
    assert len(events) == 1


def test_a_gradient_that_is_not_finite_is_an_error_at_once_when_the_optimizer_is_unknown():
    live, _, _ = steps_with([([True, False], [1.0, 2.0], None)])
    assert live[NONFINITE].severity is Severity.ERROR
    assert "gradient of rank 0" in live[NONFINITE].explanation


def test_a_gradient_that_is_not_finite_is_an_error_when_the_optimizer_goes_on():
    bad = ([True, False], [1.0, 2.0], [1, 1])
    live, _, _ = steps_with([FINE, bad, ([False, False], [1.0, 2.0], [0, 0])])
    assert live[NONFINITE].severity is Severity.ERROR
    assert "the optimizer went on" in live[NONFINITE].explanation
    assert (live[NONFINITE].first_step, live[NONFINITE].last_step) == (1, 1)


def test_one_worker_that_goes_on_alone_is_enough():
    alone = ([True, True], [1.0, 2.0], [0, 1])
    assert steps_with([FINE, alone, FINE])[0][NONFINITE].severity is Severity.ERROR


def test_steps_that_a_gradient_scaler_skips_are_a_note():
    skipped = ([True, True], [1.0, 2.0], [0, 0])
    live, closed, events = steps_with([FINE, skipped, FINE, FINE, skipped, FINE, FINE, skipped])
    assert live[NONFINITE].severity is Severity.NOTE
    assert closed[NONFINITE].severity is Severity.NOTE
    assert closed[NONFINITE].evidence["steps"] == 3
    assert len(events) == 3  # when it comes, when it has doubled, and the last at the end


def test_a_gradient_that_never_recovers_is_a_warning_though_no_update_is_applied():
    bad = ([True, False], [1.0, 2.0], [0, 0])
    assert steps_with([FINE, *[bad] * 10])[0][NONFINITE].severity is Severity.NOTE
    stuck = steps_with([FINE, *[bad] * 30])[0][NONFINITE]
    assert stuck.severity is Severity.WARNING
    assert "the parameters are as they were" in stuck.explanation


def test_closing_twice_tells_nothing_twice():
    diagnosis = Diagnosis(RunFacts(8))
    for report in reports(replicated(900, 4, [0] * 8), 7):
        diagnosis.observe(report)
    (last,) = diagnosis.close()
    assert last.last_step == 6
    assert diagnosis.close() == []
