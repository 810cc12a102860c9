"""Workers that differ: blamed, described, merged, healed; and ties that nothing breaks."""

import re
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from rankscope.bus.detector import RunFacts
from rankscope.bus.evidence import Column, Compared, DType, Source, Table, Tail
from rankscope.bus.finding import Severity
from rankscope.bus.step import StepReport
from rankscope.evidence import COLUMNS
from rankscope.evidence.outliers.judge import WorkerOutliers
from rankscope.record.schema import arrow_schema
from rankscope.verdict.diagnosis import Diagnosis
from support.stepping import describe, events_of, evidence_of
from support.streams import gathered

NO_SAMPLES = np.empty(0, np.int64)


class Job:
    """A simulated job whose workers have losses, norms, directions and groups of parameters."""

    def __init__(self, num_workers=8, groups=6, seed=0, hosts=()):
        self.rng = np.random.default_rng(seed)
        self.num_workers, self.groups, self.hosts = num_workers, groups, hosts
        self.step = 0

    def report(self, change=None, **columns):
        width, rng = self.num_workers, self.rng
        values = {
            "loss": 2 + 0.1 * rng.standard_normal(width),
            "grad_norm": 1 + 0.07 * rng.standard_normal(width),
            "cosine_rest": 0.3 + 0.05 * rng.standard_normal(width),
            "group_norms": 1 + 0.07 * rng.standard_normal((width, self.groups)),
            "group_cosines": 0.3 + 0.05 * rng.standard_normal((width, self.groups)),
        }
        if change is not None:
            change(values)
        directions = {"cosine_rest": values.pop("cosine_rest")}
        norms, cosines = values.pop("group_norms"), values.pop("group_cosines")
        step = replace(
            gathered(self.step, [NO_SAMPLES] * width, None, **values, **columns),
            observed=True,
            groups=tuple(f"block {i}" for i in range(self.groups)),
            group_norms_WG=norms,
        )
        self.step += 1
        return StepReport(step, {}, directions, None, cosines)

    def run(self, detector, num_steps, change=None, **columns):
        return evidence_of(detector, *(self.report(change, **columns) for _ in range(num_steps)))


def times(column, ranks, factor):
    def change(values):
        values[column][list(ranks)] *= factor

    return change


def say(evidence):
    return describe(evidence)[0]


def test_a_worker_with_bad_data_is_named_with_its_beginning_and_size():
    job, detector = Job(), WorkerOutliers(8)
    assert job.run(detector, 200) == []
    told = job.run(detector, 80, times("loss", [5], 1.13))
    first = told[0]
    assert (first.cause, first.severity, first.ranks) == (
        "data.worker_outlier",
        Severity.WARNING,
        (5,),
    )
    assert abs(first.first_step - 200) <= 5
    assert first.groups == ()
    assert "Rank 5 differs" in say(told[-1])
    assert "loss × 1.1" in say(told[-1])
    assert "probability of at most 0.0003" in say(told[-1])
    assert all(float(one.fields["bound"]) >= one.numbers["false_alarm_probability"] for one in told)
    assert len({one.key for one in told}) == 1


def observed(detector, seed, center, steps, above=0.06):
    """Feed losses around a center that the steps share, rank 5's above it; return the evidence."""
    rng = np.random.default_rng([seed, steps.start])
    told = []
    for step in steps:
        losses = center + 0.01 * rng.standard_normal() + 0.02 * rng.standard_normal(8)
        losses[5] += above
        report = StepReport(gathered(step, [NO_SAMPLES] * 8, None, loss=losses), {}, {}, None, None)
        told += evidence_of(detector, report)
    return told


@pytest.mark.parametrize(
    ("center", "restarted"), [(0.002, False), (0.0, True), (-0.01, False), (-40.0, True)]
)
def test_of_losses_around_zero_or_below_the_difference_is_told_and_no_part_of_them(
    center, restarted
):
    detector = WorkerOutliers(8)
    told = observed(detector, 0, center, range(60))
    if restarted:
        state = detector.state()
        detector = WorkerOutliers(8)
        detector.restore(state)
    told += observed(detector, 0, center, range(60, 140))
    told += detector.close()
    assert (told[-1].severity, told[-1].ranks) == (Severity.WARNING, (5,))
    for one in told:
        text, _, size = one.fields["what"].partition(" +")
        assert text == "loss"
        assert 0.04 < float(size) < 0.08
        [numbers] = one.numbers["workers"]["5"]
        assert numbers["unit"] == "absolute"
        assert 0.04 < numbers["deviation"] < 0.08


def test_of_positive_losses_the_difference_is_told_in_parts_of_them():
    detector = WorkerOutliers(8)
    told = observed(detector, 0, 3.0, range(140))
    assert (told[-1].severity, told[-1].ranks) == (Severity.WARNING, (5,))
    for one in told:
        assert 1.013 < float(one.fields["what"].removeprefix("loss × ")) < 1.027
        assert "unit" not in one.numbers["workers"]["5"][0]


def test_a_fault_of_the_release_before_is_restored_without_the_kind_of_its_size():
    detector = WorkerOutliers(8)
    observed(detector, 0, 3.0, range(60))
    state = detector.state()
    for fault in state["faults"]:
        for _, traces in fault["traces"]:
            for trace in traces:
                del trace[-1]
    again = WorkerOutliers(8)
    again.restore(state)
    assert state["faults"]
    assert [one.fields["what"] for one in again.close()] == [
        one.fields["what"] for one in detector.close()
    ]


@pytest.mark.parametrize("column", ["grad_norm", "group_norms"])
def test_the_beginning_is_known_where_the_sampling_interval_changes_after_it(column):
    job, detector = Job(), WorkerOutliers(8)
    fault = times(column, [5], 1.13)
    assert job.run(detector, 100) == []
    assert job.run(detector, 4, fault) == []
    told = []
    while not told and job.step < 5000:
        job.step += 63  # every 64th step is measured from now on
        told = job.run(detector, 1, fault)
    assert abs(told[0].first_step - 100) <= 10


def test_the_beginning_is_known_where_directions_are_measured_in_turns():
    job, detector = Job(), WorkerOutliers(8)

    def in_turns(values):
        values["group_cosines"][5, 2] -= 0.15 * (job.step >= 200)
        values["group_cosines"][:, np.arange(6) % 3 != job.step % 3] = np.nan

    assert job.run(detector, 200, in_turns) == []
    told = job.run(detector, 120, in_turns)
    assert told[0].ranks == (5,)
    assert abs(told[0].first_step - 200) <= 6


def test_a_fault_in_one_block_names_the_block():
    def change(values):
        values["group_norms"][3, 4] *= 1.4

    told = Job().run(WorkerOutliers(8), 40, change)
    assert told[-1].cause == "compute.worker_outlier"
    assert told[-1].ranks == (3,)
    assert told[-1].groups == ("block 4",)
    assert "gradient norm of block 4 × 1." in say(told[-1])


def test_rare_large_errors_are_found_within_a_hundred_steps():
    job, detector = Job(seed=3), WorkerOutliers(8)
    told = []
    for step in range(100):
        factor = 1 + 0.455 * job.rng.choice([-1, 1]) if step % 5 == 0 else 1.0
        told += job.run(detector, 1, times("grad_norm", [4], factor))
    assert told[0].ranks == (4,)
    assert "in some steps a gradient norm far from theirs" in say(told[0])


def test_two_workers_with_one_fault_are_one_finding():
    told = Job(seed=1).run(WorkerOutliers(8), 60, times("loss", [2, 6], 1.15))
    assert {one.key for one in told} == {"outlier-1"}
    assert told[-1].ranks == (2, 6)
    assert told[-1].severity is Severity.WARNING


def test_workers_with_faults_of_their_own_are_findings_of_their_own():
    job, detector = Job(seed=2), WorkerOutliers(8)
    told = job.run(detector, 50, times("loss", [1], 1.2))
    both = times("grad_norm", [6], 1.4)
    told += job.run(detector, 60, lambda values: (times("loss", [1], 1.2)(values), both(values)))
    assert {one.key: one.ranks for one in told} == {"outlier-1": (1,), "outlier-2": (6,)}


def test_a_faulty_host_is_one_finding_that_names_it():
    hosts = [f"node{rank // 8}" for rank in range(64)]
    told = Job(64, seed=4).run(
        WorkerOutliers(64, hosts), 90, times("grad_norm", range(16, 24), 1.12)
    )
    assert {one.key for one in told} == {"outlier-1"}
    assert told[-1].ranks == tuple(range(16, 24))
    assert "all of the workers on host node2" in say(told[-1])


def test_a_fault_that_heals_is_closed_and_may_come_again_under_its_name():
    job, detector = Job(seed=5), WorkerOutliers(8)
    told = job.run(detector, 60, times("loss", [5], 1.2))
    told += job.run(detector, 150)
    assert told[-1].status == "closed"
    assert abs(told[-1].last_step - 60) <= 25
    assert "last seen at step" in say(told[-1])
    again = job.run(detector, 60, times("loss", [5], 1.2))
    assert again[0].status == "open"
    assert again[0].key == told[0].key


@pytest.mark.parametrize("width", [4, 8])
def test_camps_of_equal_size_are_a_note_that_blames_nobody(width):
    told = Job(width, seed=6).run(WorkerOutliers(width), 300, times("loss", range(width // 2), 1.2))
    assert told[-1].cause == "inconclusive"
    assert {one.severity for one in told} == {Severity.NOTE}


def test_of_two_workers_nobody_knows_who_is_right():
    told = Job(2, seed=7).run(WorkerOutliers(2), 100, times("loss", [1], 1.2))
    assert told[0].cause == "inconclusive"
    assert told[0].severity is Severity.WARNING
    assert told[0].ranks == (0, 1)
    factor = float(re.fullmatch(r"loss by a factor of (\d\.\d\d)", told[0].fields["what"])[1])
    assert factor == pytest.approx(1.2, abs=0.1)
    said, _ = describe(told[0])
    assert said.startswith("Ranks 0 and 1 differ from each other since about step")


def test_two_losses_below_zero_differ_by_a_number_of_nats():
    def change(values):
        values["loss"] += np.array([-3.0, -2.5])

    told = Job(2, seed=7).run(WorkerOutliers(2), 100, change)
    size = float(re.fullmatch(r"loss by (\d\.\d+)", told[-1].fields["what"])[1])
    assert size == pytest.approx(0.5, abs=0.1)


def test_workers_that_all_differ_take_back_what_was_said_of_one():
    def change(values):
        values["loss"] += 0.2 * np.arange(8)

    told = Job(seed=8).run(WorkerOutliers(8), 200, change)
    last = {one.key: one for one in told}
    assert {one.severity for one in last.values()} == {Severity.NOTE}
    assert [key for key, one in last.items() if one.status == "open"] == ["workers-differ"]


def test_a_tie_that_ends_is_closed():
    job, detector = Job(seed=9), WorkerOutliers(8)
    job.run(detector, 100, times("loss", range(4), 1.2))
    told = job.run(detector, 1500)
    assert [one.status for one in told] == ["closed"]


def test_batches_that_come_again_are_not_compared():
    """A worker that knows its few batches by heart has a low loss for no fault of its own."""
    job, detector = Job(seed=10), WorkerOutliers(8)
    for step in range(300):
        digests = 1000 * np.arange(8) + np.where(np.arange(8) == 3, step % 4, step)
        assert job.run(detector, 1, times("loss", [3], 0.7), batch_digest=digests) == [] or step < 4


def test_workers_with_identical_batches_do_not_make_an_outlier_of_one_with_its_own():
    """Copies agree with copies, and exact evidence speaks of them."""
    job, detector = Job(seed=16), WorkerOutliers(8)
    for step in range(100):
        report = job.report()
        for column in (report.gathered.workers["loss"], report.gathered.workers["grad_norm"]):
            column[1:] = column[1]
        report.derived["cosine_rest"][1:] = 0.9
        report.derived["cosine_rest"][0] = 0.2
        same = np.array([step, -step - 1])
        samples = (np.array([1000 + step, 2000 + step]), *[same] * 7)
        report = replace(report, gathered=replace(report.gathered, samples=samples))
        assert evidence_of(detector, report) == []


def test_a_shorter_batch_is_not_compared():
    job, detector = Job(seed=11), WorkerOutliers(8)
    sizes = [4, 4, 4, 2, 4, 4, 4, 4]
    assert job.run(detector, 100, times("grad_norm", [3], 1.5), num_samples=sizes) == []


def test_healthy_workers_of_every_number_are_silent():
    for width in (1, 2, 3, 16):
        assert Job(width, seed=width).run(WorkerOutliers(width), 300) == []


def test_a_worker_without_values_and_steps_without_gradients_do_no_harm():
    job, detector = Job(seed=12), WorkerOutliers(8)
    told = []
    for step in range(120):
        report = job.report(times("loss", [2], 1.2))
        report.gathered.workers["loss"][7] = np.nan
        if step % 3:
            report = replace(report, gathered=replace(report.gathered, observed=False))
        told += evidence_of(detector, report)
    assert told[0].ranks == (2,)


def test_a_restored_detector_goes_on():
    job, detector = Job(seed=13), WorkerOutliers(8)
    job.run(detector, 60, times("loss", [5], 1.2))
    copy = WorkerOutliers(8)
    copy.restore(detector.state())
    later = [Job(seed=14).report(times("loss", [5], 1.2)) for _ in range(1)]
    reports = [*later, *(Job(seed=s).report() for s in range(20, 120))]
    for report in reports:
        assert evidence_of(copy, report) == evidence_of(detector, report)


def canary_of(suspect, digests):
    """Return the columns of a canary: of the workers, those with equal digests agree."""
    columns = {"canary_of": [suspect] * 8, "canary_against": [(suspect + 1) % 8] * 8}
    values = dict.fromkeys(("loss", "norm", "against_loss", "against_norm"), np.array(digests))
    bits = dict.fromkeys(("digest", "again", "against_digest"), digests)
    return columns | {f"canary_{name}": each for name, each in (values | bits).items()}


@pytest.mark.parametrize(
    ("suspect", "digests", "cause"),
    [
        (5, [1] * 8, "data.worker_outlier"),
        (4, [1] * 8, "compute.worker_outlier"),
        (5, [1, 1, 1, 1, 1, 2, 1, 1], "compute.worker_outlier"),
    ],
)
def test_a_canary_in_which_all_agree_turns_a_difference_to_data(suspect, digests, cause):
    job, detector = Job(), WorkerOutliers(8)
    change = times("grad_norm", [5], 1.3)
    assert {one.cause for one in job.run(detector, 60, change)} == {"compute.worker_outlier"}
    job.run(detector, 1, change, **canary_of(suspect, digests))
    job.run(detector, 3, change)
    [last] = detector.close()
    assert (last.cause, last.ranks, last.severity) == (cause, (5,), Severity.WARNING)
    told = "in the canary of step 60 all workers computed the same" in say(last)
    assert told == (cause == "data.worker_outlier")
    assert not told or "another worker" not in describe(last)[1]


def test_a_single_value_far_out_is_a_note_at_once_and_not_every_time():
    job = Job(seed=15)
    diagnosis = Diagnosis(RunFacts(8))
    told = []
    for step in range(200):
        factor = 5.0 if step in (100, 150) else 1.0
        told += diagnosis.observe(job.report(times("grad_norm", [6], factor)))
    notes = [one for one in told if one.id == "gross-outlier"]
    assert [(note.step, note.ranks, note.severity) for note in notes] == [
        (100, (6,), Severity.NOTE)
    ]
    assert "At step 100 the gradient norm of rank 6" in notes[0].explanation


@pytest.mark.parametrize("start", [0, 100])
def test_a_gradient_that_is_far_out_in_every_fifth_step_is_told_within_60_steps(start):
    job = Job(4, seed=2)
    diagnosis = Diagnosis(RunFacts(4))
    told = []
    for step in range(start + 60):
        bad = step >= start and step % 5 == 4
        told += diagnosis.observe(job.report(times("grad_norm", [2], 10.0 if bad else 1.0)))
    [note] = [one for one in told if one.id == "gross-outliers"]
    assert note.ranks == (2,)
    assert note.step - start < 60
    assert "8 of the last 8 values that were far out belong to rank 2" in note.explanation


def test_what_chance_makes_of_gross_outliers_is_told_where_not_all_belong_to_one_worker():
    job, diagnosis, told = Job(4, seed=2), Diagnosis(RunFacts(4)), []
    for step in range(60):
        factor = 10.0 if step % 5 == 4 else 1.0
        told += diagnosis.observe(job.report(times("grad_norm", [0 if step == 9 else 2], factor)))
    [note] = [one for one in told if one.id == "gross-outliers"]
    assert "10 of the last 11 values that were far out belong to rank 2" in note.explanation
    of_11 = reduce(np.convolve, [[3 / 4, 1 / 4]] * 11)  # binomial
    assert note.evidence["chance"] == pytest.approx(4 * of_11[10:].sum())


@pytest.mark.parametrize(
    ("width", "named", "column"),
    [(2, (0, 1), "loss"), (3, (1,), "grad_norm"), (4, (1,), "grad_norm"), (4, (1,), "grad_max")],
)
def test_a_value_far_above_its_peers_is_told_in_that_step_and_once_per_episode(
    width, named, column
):
    job, diagnosis, told = Job(width, seed=3), Diagnosis(RunFacts(width)), []
    lately = {}
    factor = 16.0 if column == "grad_max" else 10.0  # an element may be 12 times the others'
    for step in range(60):
        bad = step < 20 and step % 5 == 4

        def change(values, bad=bad):
            values["grad_max"] = 0.1 * np.exp(0.05 * job.rng.standard_normal(width))
            values[column][1] *= factor if bad else 1.0

        told += diagnosis.observe(job.report(change))
        if bad:
            [now] = [one for one in diagnosis.findings if one.id == "gross-value"]
            lately[step] = now.evidence["times_in_50_steps"]
    assert lately == {4: 1, 9: 2, 14: 3, 19: 4}
    notes = [one for one in told if one.id == "gross-value"]
    assert [(note.step, note.status) for note in notes] == [
        (4, "open"), (9, "open"), (19, "open"), (35, "closed")  # as often as its steps double
    ]  # fmt: skip
    assert {(note.severity, note.ranks, note.first_step) for note in notes} == {
        (Severity.NOTE, named, 4)
    }
    label = {"grad_norm": "gradient norm", "loss": "loss"}.get(column, "largest gradient element")
    begins = (
        f"At step 4 ranks 0 and 1 differed in their {label} by a factor of "
        if width == 2
        else f"At step 4 the {label} of rank 1 was "
    )
    assert notes[0].explanation.startswith(begins)


def test_workers_that_cannot_be_compared_have_no_gross_values():
    job, detector = Job(4, seed=4), WorkerOutliers(4)
    short = {"num_samples": [8, 1, 8, 8]}  # an epoch's last batch
    assert job.run(detector, 5, times("grad_norm", [1], 10.0), **short) == []
    zero = times("grad_norm", [0, 2, 3], 0.0)  # as of experts that got no tokens
    assert job.run(detector, 5, zero) == []


@pytest.mark.parametrize("width", [2, 8])
def test_heavy_tails_early_in_training_raise_hardly_a_note(width):
    job, detector, told = Job(width, seed=5), WorkerOutliers(width), []

    def spread(values):
        values["grad_norm"] = np.exp(0.3 * job.rng.standard_normal(width))

    for _ in range(1000):
        told += job.run(detector, 1, spread)
    assert [one.key for one in told if one.key == "gross-value"] == []


def test_gross_values_of_a_run_that_has_them_now_and_then_are_told_a_few_times():
    """As of two workers whose losses are rounding errors by now."""
    job, factors = Job(2, seed=6), {3000: 40.0, 3100: 70.0}
    changes = [
        times("loss", [1], factors.get(step, 12.0) if step % 100 == 0 else 1.0)
        for step in range(3200)
    ]
    told = events_of(Diagnosis(RunFacts(2)), map(job.report, changes))
    notes = [one for one in told if one.id == "gross-value"]
    opened = [note.step for note in notes if note.status == "open"]
    assert opened == [*range(0, 800, 100), 3000]
    assert notes[-1].status == "closed"
    assert notes[-1].evidence["steps"] == 31  # all of them, up to there


def test_values_far_out_on_any_worker_are_no_sign_of_one():
    job, detector = Job(4, seed=2), WorkerOutliers(4)
    told = []
    for step in range(600):
        factor = 10.0 if step % 5 == 4 else 1.0
        told += job.run(detector, 1, times("grad_norm", [job.rng.integers(4)], factor))
    assert [one.key for one in told if one.key == "gross-outliers"] == []


def followed_by_norms(job, ranks=(), factor=1.0):
    """Return a change that lets norms follow label tokens, and the tokens of each step."""
    tokens_W = np.empty(job.num_workers)

    def change(values):
        tokens_W[:] = 400 * np.exp(0.3 * job.rng.standard_normal(job.num_workers))
        tokens_W[list(ranks)] *= factor
        follows_W = np.sqrt(tokens_W / 400)
        values["grad_norm"] *= follows_W
        values["group_norms"] *= follows_W[:, None]

    return change, tokens_W


def run_with_tokens(job, detector, num_steps, change, tokens_W):
    told = []
    for _ in range(num_steps):
        report = job.report(change)
        report.gathered.workers["loss_weight"][:] = tokens_W
        told += evidence_of(detector, report)
    return told


def test_larger_batches_that_explain_a_difference_are_no_finding():
    job, detector = Job(), WorkerOutliers(8)
    assert run_with_tokens(job, detector, 100, *followed_by_norms(job)) == []
    assert run_with_tokens(job, detector, 300, *followed_by_norms(job, [5], 2.0)) == []


def test_a_difference_that_sizes_do_not_explain_is_a_warning():
    job, detector = Job(), WorkerOutliers(8)
    follow, tokens_W = followed_by_norms(job, [5], 1.3)

    def change(values):
        follow(values)
        values["grad_norm"][5] *= 2
        values["group_norms"][5] *= 2

    told = run_with_tokens(job, detector, 60, change, tokens_W)
    assert {(one.cause, one.severity, one.ranks) for one in told} == {
        ("compute.worker_outlier", Severity.WARNING, (5,))
    }


def test_sizes_do_not_explain_a_loss_that_does_not_follow_them():
    job, detector = Job(), WorkerOutliers(8)
    follow, tokens_W = followed_by_norms(job, [5], 2.0)

    def change(values):
        follow(values)
        values["loss"][5] *= 1.13

    told = run_with_tokens(job, detector, 80, change, tokens_W)
    assert {(one.cause, one.severity, one.ranks) for one in told} == {
        ("data.worker_outlier", Severity.WARNING, (5,))
    }


def test_sizes_that_one_worker_alone_has_explain_nothing():
    job, detector = Job(), WorkerOutliers(8)
    tokens_W = np.full(8, 400.0)
    tokens_W[5] = 800
    told = run_with_tokens(job, detector, 100, times("grad_norm", [5], 1.3), tokens_W)
    assert {(one.severity, one.ranks) for one in told} == {(Severity.WARNING, (5,))}


@pytest.mark.parametrize(("every", "steady"), [(1, (2,)), (5, ())])
def test_a_worker_that_differs_in_some_steps_only_is_not_steadily_apart(every, steady):
    job, detector = Job(num_workers=4), WorkerOutliers(4)

    def sometimes(values):
        values["grad_norm"][2] += 5.0 * (job.step % every == 0)

    job.run(detector, 200, sometimes)
    assert detector.flagged == (2,)
    assert detector.steadily_flagged == steady


def test_a_signal_that_is_declared_as_compared_is_compared_and_recorded(monkeypatch):
    momentum = Column(
        "momentum_norm",
        Table.WORKERS,
        DType.FLOAT,
        "",
        "L2 norm of the optimizer's momentum",
        Source.LOCAL,
        Tail.BOTH,
        Compared("momentum norm", observed=False),
    )
    monkeypatch.setattr("rankscope.evidence.COLUMNS", (*COLUMNS, momentum))
    detector, rng, told = WorkerOutliers(4), np.random.default_rng(0), []
    for step in range(60):
        samples = [np.array([100 * step + rank]) for rank in range(4)]
        norms = rng.lognormal(0, 0.05, 4) * np.where(np.arange(4) == 2, 1.5, 1)
        one = gathered(step, samples, loss=rng.normal(2, 0.1, 4), momentum_norm=norms)
        told += evidence_of(detector, StepReport(one, {}))
    assert {evidence.ranks for evidence in told} == {(2,)}
    assert told[-1].fields["what"].startswith("momentum norm")
    assert "momentum_norm" in arrow_schema(Table.WORKERS).names
