import re
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from rankscope.bus.detector import RunFacts
from rankscope.bus.finding import Severity
from rankscope.bus.step import StepReport
from rankscope.evidence.outliers.judge import WorkerOutliers
from rankscope.verdict.diagnosis import Diagnosis
from support.stepping import describe, evidence_of
from support.streams import gathered


class Job:
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
        groups = tuple(f"block {i}" for i in range(self.groups))
        step = gathered(self.step, [[]] * width, **values, **columns)
        step = replace(step, observed=True, groups=groups, group_norms_WG=norms)
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
    assert (first.cause, first.severity) == ("data.worker_outlier", Severity.WARNING)
    assert first.ranks == (5,)
    assert abs(first.first_step - 200) <= 5
    assert first.groups == ()
    assert "Rank 5 differs" in say(told[-1])
    assert "loss × 1.1" in say(told[-1])
    assert "probability of at most 0.0003" in say(told[-1])
    assert all(float(one.fields["bound"]) >= one.numbers["false_alarm_probability"] for one in told)
    assert len({one.key for one in told}) == 1


def observed(detector, center, steps):
    """Feed losses around a center that the steps share, rank 5's above it; return the evidence."""
    rng, reports = np.random.default_rng([0, steps.start]), []
    for step in steps:
        losses = center + 0.01 * rng.standard_normal() + 0.02 * rng.standard_normal(8)
        losses[5] += 0.06
        reports.append(StepReport(gathered(step, [[]] * 8, loss=losses), {}, {}, None, None))
    return evidence_of(detector, *reports)


def restarted(detector, width):
    again = WorkerOutliers(width)
    again.restore(detector.state())
    return again


@pytest.mark.parametrize(("center", "restarts"), [(0.002, False), (-40.0, True)])
def test_of_losses_around_zero_or_below_the_difference_is_told(center, restarts):
    detector = WorkerOutliers(8)
    told = observed(detector, center, range(60))
    detector = restarted(detector, 8) if restarts else detector
    told += observed(detector, center, range(60, 140))
    told += detector.close()
    assert (told[-1].severity, told[-1].ranks) == (Severity.WARNING, (5,))
    for one in told:
        text, _, size = one.fields["what"].partition(" +")
        assert text == "loss"
        assert 0.04 < float(size) < 0.08
        [numbers] = one.numbers["workers"]["5"]
        assert numbers["unit"] == "absolute"
        assert 0.04 < numbers["deviation"] < 0.08


@pytest.mark.parametrize(("width", "factor"), [(2, 1.2), (3, 1.6), (8, 1.2)])
def test_a_difference_that_is_over_has_an_end_and_the_figures_of_its_steps(width, factor):
    job, diagnosis = Job(width), Diagnosis(RunFacts(width))

    def change(values):
        for column in ("loss", "grad_norm"):
            values[column][width - 1] *= factor

    for step in range(200):
        diagnosis.observe(job.report(change if 60 <= step < 90 else None))
    diagnosis.close()
    [found] = [one for one in diagnosis.findings if not one.id.startswith("gross")]
    assert found.status == "closed"
    assert abs(found.first_step - 60) <= 5
    assert abs(found.last_step - 90) <= 10
    when = f"from about step {found.first_step} to about step {found.last_step}"
    others = "each other" if width == 2 else "the other workers"
    assert f"differed from {others} {when}" in found.explanation
    expected = (factor - 1) / (factor + 1) if width == 2 else factor - 1
    for signal in found.evidence["workers"][str(width - 1)]:
        assert signal["deviation"] == pytest.approx(expected, rel=0.5)


def test_a_lasting_difference_of_two_workers_stays_one_open_finding():
    job, detector = Job(2), WorkerOutliers(2)
    told = job.run(detector, 1000, times("loss", [1], 1.05))
    assert {(one.status, one.key) for one in told} == {("open", "workers-differ")}
    [last] = detector.close()
    assert last.last_step > 900


def test_rare_large_errors_are_found_within_a_hundred_steps():
    job, detector = Job(seed=3), WorkerOutliers(8)
    told = []
    for step in range(100):
        factor = 1 + 0.455 * job.rng.choice([-1, 1]) if step % 5 == 0 else 1.0
        told += job.run(detector, 1, times("grad_norm", [4], factor))
    assert told[0].ranks == (4,)
    assert "in some steps a gradient norm far from theirs" in say(told[0])


@pytest.mark.parametrize("width", [2, 8])
@pytest.mark.parametrize(("norm", "common"), [(3.0, True), (1.3, False)])
def test_one_factor_in_loss_and_gradient_leads_to_the_code_of_the_loss(width, norm, common):
    def change(values):
        values["loss"][1] *= 3
        values["grad_norm"][1] *= norm

    found = Job(width).run(WorkerOutliers(width), 60, change)[-1]
    words, check = describe(found)
    assert ("nearly the same factor" in words) is common
    if width > 2:
        assert check.startswith("Compare the code that computes the loss on rank 1") is common


def test_two_workers_with_one_fault_are_one_finding():
    told = Job(seed=1).run(WorkerOutliers(8), 60, times("loss", [2, 6], 1.15))
    assert {one.key for one in told} == {"outlier-1"}
    assert (told[-1].ranks, told[-1].severity) == ((2, 6), Severity.WARNING)


def test_a_faulty_host_is_one_finding_that_names_it():
    hosts = [f"node{rank // 8}" for rank in range(64)]
    change = times("grad_norm", range(16, 24), 1.12)
    told = Job(64, seed=4).run(WorkerOutliers(64, hosts), 90, change)
    assert {one.key for one in told} == {"outlier-1"}
    assert told[-1].ranks == tuple(range(16, 24))
    assert "all of the workers on host node2" in say(told[-1])


def test_of_two_workers_nobody_knows_who_is_right():
    told = Job(2, seed=7).run(WorkerOutliers(2), 100, times("loss", [1], 1.2))
    assert (told[0].cause, told[0].severity) == ("inconclusive", Severity.WARNING)
    assert told[0].ranks == (0, 1)
    factor = float(re.fullmatch(r"loss by a factor of (\d\.\d\d)", told[0].fields["what"])[1])
    assert factor == pytest.approx(1.2, abs=0.1)
    said, _ = describe(told[0])
    assert said.startswith("Ranks 0 and 1 differ from each other since about step")


@pytest.mark.parametrize(
    ("lengths", "factor", "severity"),
    [((20.0, 18.0), 1.1, "note"), ((18.0, 20.0), 1.1, "note"), ((20.0, 18.0), 3.0, "warning")],
)
def test_small_differences_are_meant_where_samples_are_dealt_by_length(lengths, factor, severity):
    detector = WorkerOutliers(2)
    job = Job(2, seed=7)
    told = job.run(detector, 150, times("loss", [1], factor), sequence_length=list(lengths))
    assert {str(one.severity) for one in told} == {severity}
    first = "the longest" if lengths[0] > lengths[1] else "the shortest"
    assert (f"{first} ones to the first worker" in say(told[0])) == (severity == "note")


def test_label_tokens_and_a_canary_that_agrees_are_in_the_words_of_a_tie():
    job, detector = Job(2, seed=7), WorkerOutliers(2)
    change = times("loss", [1], 1.2)
    [told, *_] = job.run(detector, 100, change, loss_weight=[158.0, 214.0])
    assert "; rank 0 counts 158 label tokens a step, and rank 1 214." in say(told)
    assert describe(told)[1].startswith("Run the same batch on both")
    canary = {name: values[:2] for name, values in canary_of(1, [1] * 8).items()}
    job.run(detector, 1, change, **canary | {"canary_against": [0, 0]})
    [last] = detector.close()
    assert "the data, or what the loop does with the loss: in the canary of step 100" in say(last)
    assert describe(last)[1].startswith("Compare the batches of both")
    same = Job(2, seed=7).run(WorkerOutliers(2), 100, change, loss_weight=[200.0] * 2)
    assert "label tokens" not in say(same[0])


def test_two_losses_below_zero_differ_by_a_number_of_nats():
    def change(values):
        values["loss"] += np.array([-3.0, -2.5])

    told = Job(2, seed=7).run(WorkerOutliers(2), 100, change)
    size = float(re.fullmatch(r"loss by (\d\.\d+)", told[-1].fields["what"])[1])
    assert size == pytest.approx(0.5, abs=0.1)


def no_gradient(ranks, groups):
    def change(values):
        values["group_norms"][np.ix_(ranks, groups)] = 0
        values["grad_norm"] = np.linalg.norm(values["group_norms"], axis=1)

    return change


ZERO_ON_THREE = "The gradient of ranks 1–3 in block 1 and block 2 was exactly zero in all of"
KEEPS_AWAY = "Look for what keeps ranks 1–3 from a gradient there"


@pytest.mark.parametrize("restarts", [False, True])
def test_where_the_others_have_no_gradient_the_one_that_has_is_not_compared_by_hardware(restarts):
    job, detector = Job(4, seed=2), WorkerOutliers(4)
    change = no_gradient([1, 2, 3], [1, 2])
    told = job.run(detector, 30, change)
    detector = restarted(detector, 4) if restarts else detector
    told += [*job.run(detector, 30, change), *detector.close()]
    said, check = describe(told[-1])
    assert (told[-1].cause, told[-1].ranks) == ("compute.worker_outlier", (0,))
    assert f"{ZERO_ON_THREE} 60 steps; other workers have one there." in said
    assert check.startswith(KEEPS_AWAY)
    assert "hardware" not in check


def test_of_half_the_workers_without_a_gradient_shards_of_other_kinds_are_no_explanation():
    told = Job(4, seed=2).run(WorkerOutliers(4), 60, no_gradient([1, 3], [1, 2]))
    said, check = describe(told[-1])
    assert (told[-1].cause, told[-1].severity) == ("inconclusive", Severity.NOTE)
    assert "The gradient of ranks 1 and 3 in block 1 and block 2 was exactly zero" in said
    assert "Shards of different kinds" not in said
    assert "shuffle" not in check


def test_a_gradient_that_was_there_once_is_not_called_zero():
    job, detector = Job(4, seed=2), WorkerOutliers(4)
    told = job.run(detector, 1)
    told += job.run(detector, 60, no_gradient([1, 2, 3], [1, 2]))
    said, check = describe(told[-1])
    assert "zero" not in said
    assert check.startswith("Compare parameters")


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
        samples = (np.array([1000 + step, 2000 + step]), *[np.array([step, -step - 1])] * 7)
        report = replace(report, gathered=replace(report.gathered, samples=samples))
        assert evidence_of(detector, report) == []


def test_healthy_workers_of_every_number_are_silent():
    for width in (1, 2, 16):
        assert Job(width, seed=width).run(WorkerOutliers(width), 300) == []


def canary_of(suspect, digests):
    """Return the columns of a canary: of the workers, those with equal digests agree."""
    columns = {"canary_of": [suspect] * 8, "canary_against": [(suspect + 1) % 8] * 8}
    values = dict.fromkeys(("loss", "norm", "against_loss", "against_norm"), np.array(digests))
    bits = dict.fromkeys(("digest", "again", "against_digest"), digests)
    return columns | {f"canary_{name}": each for name, each in (values | bits).items()}


@pytest.mark.parametrize(
    ("suspect", "digests", "cause"),
    [(5, [1] * 8, "data.worker_outlier"), (5, [1, 1, 1, 1, 1, 2, 1, 1], "compute.worker_outlier")],
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
    ("width", "named", "column", "begins"),
    [
        (2, (0, 1), "loss", "ranks 0 and 1 differed in their loss by a factor of "),
        (3, (1,), "grad_norm", "the gradient norm of rank 1 was "),
        (4, (1,), "grad_max", "the largest gradient element of rank 1 was "),
    ],
)
def test_a_value_far_above_its_peers_is_told_once_per_episode(width, named, column, begins):
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
    assert {note.severity for note in notes} == {Severity.NOTE}
    assert {(note.ranks, note.first_step) for note in notes} == {(named, 4)}
    first, last = notes[0].explanation, notes[-1].explanation
    assert first.startswith(f"At step 4 {begins}")
    assert first.endswith("(1 step of that kind so far). A single step proves nothing.")
    assert last.endswith("(4 steps of that kind so far, in each of them rank 1's the larger).")


def test_of_values_far_above_in_several_steps_it_is_told_whose_they_were():
    job, diagnosis, told = Job(2, seed=3), Diagnosis(RunFacts(2)), []
    for step in range(8):
        told += diagnosis.observe(job.report(times("grad_norm", [int(step == 5)], 10.0)))
    note = [one for one in told if one.id == "gross-value"][-1]
    said = "(8 steps of that kind so far; the larger was rank 0's in 7 and rank 1's in 1)."
    assert note.explanation.endswith(said)


def test_heavy_tails_early_in_training_raise_hardly_a_note():
    job = Job(2, seed=5)

    def spread(values):
        values["grad_norm"] = np.exp(0.3 * job.rng.standard_normal(2))

    told = job.run(WorkerOutliers(2), 500, spread)
    assert [one.key for one in told if one.key == "gross-value"] == []


def test_values_far_out_on_any_worker_are_no_sign_of_one():
    job, detector = Job(4, seed=2), WorkerOutliers(4)
    told = []
    for step in range(300):
        factor = 10.0 if step % 5 == 4 else 1.0
        told += job.run(detector, 1, times("grad_norm", [job.rng.integers(4)], factor))
    assert [one.key for one in told if one.key == "gross-outliers"] == []


def followed_by_norms(job, ranks=(), factor=1.0):
    def change(values):
        tokens_W = 400 * np.exp(0.3 * job.rng.standard_normal(job.num_workers))
        tokens_W[list(ranks)] *= factor
        values["loss_weight"] = tokens_W
        follows_W = np.sqrt(tokens_W / 400)
        values["grad_norm"] *= follows_W
        values["group_norms"] *= follows_W[:, None]

    return change


def test_larger_batches_that_explain_a_difference_are_no_finding():
    job, detector = Job(), WorkerOutliers(8)
    assert job.run(detector, 100, followed_by_norms(job)) == []
    assert job.run(detector, 150, followed_by_norms(job, [5], 2.0)) == []


def test_a_difference_that_sizes_do_not_explain_is_a_warning():
    job, detector = Job(), WorkerOutliers(8)
    follow = followed_by_norms(job, [5], 1.3)

    def change(values):
        follow(values)
        values["grad_norm"][5] *= 2
        values["group_norms"][5] *= 2

    told = job.run(detector, 60, change)
    kinds = {(one.cause, one.severity, one.ranks) for one in told}
    assert kinds == {("compute.worker_outlier", Severity.WARNING, (5,))}
