"""Which finding is the cause, and which are its consequences."""

from itertools import permutations

from rankscope.bus.detector import LATENESS
from rankscope.bus.finding import Finding, Severity
from rankscope.verdict.news import with_causes
from rankscope.verdict.rules import explanations, ranked


def finding(cause, severity=Severity.ERROR, first=0, id=None, ranks=(1,)):  # noqa: A002
    return Finding(id or cause, cause, severity, ranks, first, first, "It is.", "Look.")


def causes(*findings):
    return [one.cause for one in ranked(findings)]


def test_consequences_come_last():
    drift = finding("state.parameters_differ", first=2)
    outlier = finding("compute.worker_outlier", Severity.WARNING, first=1)
    root = finding("sync.not_reduced", first=3)
    assert ranked([drift, outlier, root]) == [root, drift, outlier]
    assert explanations([drift, outlier, root])[drift.id] is root
    assert explanations([drift, outlier, root])[root.id] is None


def test_of_two_that_explain_each_other_the_one_that_names_the_id_is_the_cause():
    reduced = finding("numerics.reduction_error", id="reduction-one-worker")
    layout = finding("state.parameters_differ", id="state-layout")
    roles = finding("state.parameters_differ", id="roles-differ")
    found = [reduced, layout, roles]
    assert ranked(found)[0] is roles
    assert explanations(found)["roles-differ"] is None
    assert explanations(found)["reduction-one-worker"] is roles


def test_the_cause_does_not_depend_on_the_order_of_the_findings():
    scaled = finding("state.parameters_differ", id="applied-scale")
    follows = [finding(cause) for cause in ("state.parameters_differ", "state.optimizer_differs")]
    settings = finding("state.hyperparameters_differ")
    for found in permutations([scaled, *follows, settings]):
        assert ranked(found)[0] is settings


def test_a_cause_that_comes_much_later_explains_nothing():
    drift = finding("state.parameters_differ", first=0)
    late = finding("sync.not_reduced", first=LATENESS + 1)
    assert explanations([drift, late])[drift.id] is None


def test_stale_rollouts_explain_outliers_of_the_same_workers_alone():
    stale = finding("rollout.worker_outlier", Severity.WARNING, id="rollout-1", ranks=(1, 2))
    named = {"outlier-1": (2,), "outlier-2": (1, 2), "outlier-3": (2, 3)}
    outliers = [
        finding("data.worker_outlier", Severity.WARNING, 5, name, ranks)
        for name, ranks in named.items()
    ]
    causes = explanations([*outliers, stale])
    assert [causes[name] for name in named] == [stale, stale, None]


def test_a_factor_on_the_loss_of_one_worker_explains_its_gradient_also_where_a_canary_agrees():
    factor = finding("loss.scale", Severity.WARNING, id="loss-scale-one-worker", ranks=(1,))
    for cause, name in (("data.worker_outlier", "outlier-1"), ("inconclusive", "gross-outliers")):
        outlier = finding(cause, Severity.WARNING, 5, name, (1,))
        assert explanations([outlier, factor])[name] is factor
        [sent] = with_causes([outlier], [factor, outlier])
        assert sent.next_check.startswith("First the finding 'A worker's loss has another factor'")


def test_among_causes_the_most_severe_and_then_the_earliest_is_first():
    assert causes(
        finding("loss.scale", Severity.WARNING, first=0),
        finding("data.overlapping_shards", first=9),
        finding("data.duplicate_batches", first=5),
    ) == ["data.duplicate_batches", "data.overlapping_shards", "loss.scale"]
