import importlib
import itertools
import pkgutil

import pytest

from rankscope import evidence
from rankscope.agent.assembly import summarize
from rankscope.bus.detector import Detector, RunFacts
from rankscope.bus.finding import Severity
from rankscope.verdict.diagnosis import Diagnosis
from support.stepping import events_of
from support.streams import accumulated, gathered, replicated, reports, sharded, with_replacement

DUPLICATES, OVERLAP = "data.duplicate_batches", "data.overlapping_shards"
PADDING = "padding-duplicates"


def diagnose(stream, num_steps, *, num_workers=8, named=True):
    diagnosis = Diagnosis(RunFacts(num_workers))
    events = events_of(diagnosis, reports(stream, num_steps, named=named))
    events += diagnosis.close()
    return {finding.id: finding for finding in diagnosis.findings}, events


HEALTHY = {
    "padding at the border": lambda: sharded(1001, 8, 4),
    "sampler and loader drop": lambda: sharded(1005, 8, 4, drop_last=True, loader_drop_last=True),
    "tiny data": lambda: sharded(10, 8, 4),
    "accumulation over borders": lambda: accumulated(sharded(197, 8, 4, loader_drop_last=True), 4),
    "single samples": lambda: sharded(803, 8, 1),
}
PADDED = {  # step and number of the samples that fill the first epoch up
    "padding at the border": (31, 7),
    "tiny data": (0, 6),
    "single samples": (100, 5),
}


@pytest.mark.parametrize(
    ("name", "named"), [*((name, True) for name in HEALTHY), ("padding at the border", False)]
)
def test_healthy_jobs_have_no_finding(name, named):
    found, events = diagnose(HEALTHY[name](), 200, named=named)
    assert set(found) == ({PADDING} if name in PADDED else set())
    if name in PADDED:
        step, repeats = PADDED[name]
        note = found[PADDING]
        assert (note.severity, note.first_step) == (Severity.NOTE, step)
        assert note.evidence["repeated"] == repeats
        assert events == [note]


def test_a_healthy_job_resumed_inside_an_epoch_has_a_note_at_most():
    found, _ = diagnose(itertools.islice(sharded(1001, 8, 4), 25, None), 200)
    assert all(finding.severity is Severity.NOTE for finding in found.values())


@pytest.mark.parametrize("batch", [1, 4])
def test_equal_seeds_without_sharding_are_duplicate_batches_and_nothing_else(batch):
    found, events = diagnose(replicated(900, batch, [0] * 8), 150)
    assert set(found) == {DUPLICATES}
    finding = found[DUPLICATES]
    assert finding.severity is Severity.ERROR
    assert finding.ranks == tuple(range(8))
    assert (finding.first_step, finding.last_step) == (0, 149)
    assert finding.evidence["workers_with_own_batches"] == 1
    assert "Ranks 0–7" in finding.explanation
    assert events[0].step == {1: 2, 4: 0}[batch]
    assert len(events) <= 12


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


@pytest.mark.parametrize(("odd", "named"), [(0, True), (5, False)], ids=["ids", "content"])
def test_a_single_sampler_seed_that_differs_is_named(odd, named):
    seeds = [0] * 8
    seeds[odd] = 1
    found, events = diagnose(sharded(4096, 8, 4, seeds=seeds), 100, named=named)
    assert set(found) == {OVERLAP}
    assert found[OVERLAP].ranks == (odd,)
    assert found[OVERLAP].severity is Severity.ERROR
    assert f"Rank {odd} drew" in found[OVERLAP].explanation
    assert len(events) < 10


@pytest.mark.parametrize(("num_workers", "seed"), [(2, 0), (8, 1)])
def test_sampling_with_replacement_is_a_note_at_most_in_the_end(num_workers, seed):
    stream = with_replacement(2000, num_workers, 4, seed)
    found, events = diagnose(stream, 250, num_workers=num_workers)
    assert set(found) == {OVERLAP}
    assert found[OVERLAP].severity is Severity.NOTE
    assert "with replacement" in found[OVERLAP].explanation
    assert max(e.severity for e in events) < Severity.ERROR
    assert len(events) < 25


def of_300_contents_twice():
    for batches in sharded(4000, 8, 4):
        yield [batch % 3700 for batch in batches]


def of_one_content_very_often():
    for t, batches in enumerate(sharded(100_000, 8, 4)):
        if t % 2 == 0:
            batches[t // 2 % 8][0] = -1
        yield batches


@pytest.mark.parametrize("stream", [of_300_contents_twice, of_one_content_very_often])
def test_content_that_occurs_again_in_the_data_is_a_note_at_most(stream):
    found, _ = diagnose(stream(), 150, named=False)
    assert all(finding.severity is Severity.NOTE for finding in found.values())


def test_triplets_beside_each_other_in_an_unshuffled_file_are_no_error():
    def stream():
        for batches in sharded(4000, 8, 4, shuffle=False):
            yield [batch // 3 for batch in batches]

    found, _ = diagnose(stream(), 100, named=False)
    assert found[OVERLAP].severity is Severity.WARNING


@pytest.mark.parametrize("samples", [[[1, 2], []], [[3]]])
def test_workers_without_samples_and_single_workers_have_no_finding(samples):
    found, _ = diagnose(itertools.repeat(samples), 50, num_workers=len(samples))
    assert found == {}


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


def below(kind):
    return [each for one in kind.__subclasses__() for each in (one, *below(one))]


def takes_steps(kind):
    """Return whether a class is a detector itself, and no base of others."""
    return (kind.observe, kind.observe_step) != (Detector.observe, Detector.observe_step)


def test_every_detector_is_asked():
    for module in pkgutil.walk_packages(evidence.__path__, f"{evidence.__name__}."):
        importlib.import_module(module.name)
    assert {
        kind
        for kind in below(Detector)
        if kind.__module__.startswith("rankscope.") and takes_steps(kind)
    } == {type(detector) for detector in Diagnosis(RunFacts(4))._detectors}
