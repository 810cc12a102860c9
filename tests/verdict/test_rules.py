import ast
import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from string import Formatter

import pytest

from rankscope import evidence
from rankscope.bus.bundles import latest_bundle
from rankscope.bus.detector import LATENESS, RULES, FaultEvidence, finding_of
from rankscope.bus.finding import Finding, FindingEvent, Severity
from rankscope.bus.words import name_ranks, named, ranks_of_job, shortened
from rankscope.verdict import rules
from rankscope.verdict.news import Announcer, with_causes
from rankscope.verdict.rules import explanations, first_sentence, ranked


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        (range(8), "ranks 0–7"),
        ([0, 2, 5, 6, 7], "ranks 0, 2 and 5–7"),
        ([4, 5, 9], "ranks 4, 5 and 9"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10 and 14 others"),
        ([0, 2, 4, 6, 8, 10, 12], "ranks 0, 2, 4, 6, 8, 10 and 1 other"),
        ([7, 7, 7], "rank 7"),
    ],
)
def test_ranks_are_named_in_runs_and_long_lists_are_cut(ranks, words):
    assert name_ranks(ranks) == words


def test_ranks_are_those_of_the_job_where_it_has_several_groups():
    with ranks_of_job({"job": {"ranks": [1, 3, 5, 7]}}):
        assert name_ranks([1, 2]) == "ranks 3 and 5"
        assert name_ranks([1, 2], of_job=True) == "ranks 1 and 2"
    with ranks_of_job({}):
        assert name_ranks([1]) == "rank 1"


def test_every_cause_has_a_title_and_advice_that_is_a_sentence():
    assert all(rule.title[0].isupper() for rule in RULES.values())
    for advice in (advice for rule in RULES.values() for advice in rule.advice.values()):
        for text in (advice.explanation, advice.next_check):
            assert all(n.isidentifier() for _, n, _, _ in Formatter().parse(text) if n is not None)
            assert re.sub(r"(\{\w+\})+$", "", text).endswith(".")  # a field may add a sentence


NO_CAUSES = {
    *("findings.toml", "rankscope.evidence", "torch._dynamo", "triton.cudagraphs"),
    *("bundle.json", "run.json", "suspect.npz", "peer.npz"),
}
ALWAYS_WITH_A_KEY = {"compute.code_differs", "compute.nondeterministic"}
"""Causes whose findings all are special cases, which have a rule by their key."""


def test_every_cause_that_a_detector_names_has_a_rule():
    named = {
        node.value
        for file in Path(evidence.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[a-z]+\.[a-z_]+", node.value)
    }
    assert {"sync.not_reduced", "data.worker_outlier"} <= named
    assert named - NO_CAUSES - ALWAYS_WITH_A_KEY <= set(RULES)


FIELDS = dict.fromkeys(("axis", "ranks", "kept", "offered", "each"), "x")


@pytest.mark.parametrize(
    ("begun_at", "back"), [(0, "go back to a checkpoint before step 1"), (1, "start again with")]
)
def test_a_fault_is_undone_by_a_checkpoint_only_if_there_may_be_one(begun_at, back):
    evidence = FaultEvidence("loss.labels_lost", Severity.WARNING, (), 1, 2, 1, FIELDS)
    finding = finding_of(evidence, 2, name="here", begun_at=begun_at)
    assert (finding.id, finding.cause) == ("here", "loss.labels_lost")
    assert back in finding.next_check.lower()


HEAD = "model.layers.0.self_attn"
PROJECTIONS = [f"{HEAD}.{name}_proj.weight" for name in "qkvo"]
SCATTERED = ["norm", *(f"model.layers.{n}.mlp.up_proj.lora_A.default.weight" for n in range(4))]


@pytest.mark.parametrize(
    ("names", "sentence", "headline"),
    [
        (PROJECTIONS, "Parameters ({}) are frozen", f"Parameters (4 under {HEAD}) are frozen"),
        (PROJECTIONS, "gradients of {} are 0", f"gradients of {PROJECTIONS[0]} and 3 more are 0"),
        (PROJECTIONS[:2], "Look at {}", f"Look at {PROJECTIONS[0]} and 1 more"),
        (SCATTERED, "Parameters ({}) differ", "Parameters (norm and 4 more) differ"),
        (PROJECTIONS[:1], "Parameters ({}) differ", f"Parameters ({PROJECTIONS[0]}) differ"),
        (["0.weight", "0.bias", "a", "b"], "({}) part", "(0.weight, 0.bias, a and 1 other) part"),
    ],
)
def test_a_headline_names_one_parameter_at_most_of_a_long_list(names, sentence, headline):
    shown = sentence.format(shortened(names, 3))
    finding = fault_at(3, f"{shown}. More of it.", evidence=named(names))
    assert first_sentence(finding) == f"{headline}."


def test_names_that_the_record_lacks_are_in_no_common_part():
    names = [f"{HEAD}.{index}.weight" for index in range(70)]
    finding = fault_at(3, f"Parameters ({shortened(names, 3)}) differ.", evidence=named(names))
    assert first_sentence(finding) == f"Parameters ({names[0]} and 69 more) differ."


def test_a_headline_has_the_earliest_step_that_an_exact_consequence_shows():
    frozen = fault_at(32, "Parameters are frozen, since step 32 at the latest. More.")
    other = fault_at(21, "The model differs since step 21.", name="state-layout")
    assert first_sentence(frozen, [frozen, other]).endswith("since step 21 at the latest.")
    for apart in (
        replace(other, severity=Severity.WARNING),  # statistics only estimate the step
        replace(other, ranks=(7,)),
        replace(other, id="elsewhere", cause="sync.not_reduced"),
        replace(other, first_step=40),
    ):
        assert first_sentence(frozen, [frozen, apart]).endswith("since step 32 at the latest.")


def test_an_error_that_follows_from_the_mode_of_modules_does_not_hide_the_mode():
    code = finding("compute.code_differs", first=32, id="canary-code")
    modes = finding("compute.modes_differ", Severity.WARNING, 25, "modes")
    assert [one.id for one in ranked([code, modes])] == ["modes", "canary-code"]
    elsewhere = replace(code, ranks=(2,))
    assert [one.id for one in ranked([elsewhere, modes])] == ["canary-code", "modes"]


def fault_at(step, words, name="roles-differ", **fields):
    cause = "state.parameters_differ"
    return Finding(name, cause, Severity.ERROR, (0, 1), step, 79, words, "Look.", **fields)


def finding(cause, severity=Severity.ERROR, first=0, id=None, ranks=(1,)):  # noqa: A002
    return Finding(id or cause, cause, severity, ranks, first, first, "It is.", "Look.")


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
    roles, layout = (finding(follows[0].id, id=name) for name in ("roles-differ", "state-layout"))
    for cause, others in ((settings, follows), (roles, [layout, *follows])):
        for found in permutations([scaled, *others, cause]):
            assert ranked(found)[0] is cause


def test_a_cause_that_comes_much_later_explains_nothing():
    drift = finding("state.parameters_differ", first=0)
    assert explanations([drift, finding("sync.not_reduced", first=LATENESS + 1)])[drift.id] is None


def test_stale_rollouts_explain_outliers_of_the_same_workers_alone():
    stale = finding("rollout.worker_outlier", Severity.WARNING, id="rollout-1", ranks=(1, 2))
    named = {"outlier-1": (2,), "outlier-2": (1, 2), "outlier-3": (2, 3)}
    kind = ("data.worker_outlier", Severity.WARNING, 5)
    outliers = [finding(*kind, name, ranks) for name, ranks in named.items()]
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
    weak = finding("loss.scale", Severity.WARNING, first=0)
    late, soon = finding("data.overlapping_shards", first=9), finding("loss.none", first=5)
    assert ranked([weak, late, soon]) == [soon, late, weak]


OUTLIER = finding("data.worker_outlier", Severity.WARNING, 20, "outlier-2", (2,))
CANARY = replace(
    finding("data.worker_outlier", Severity.NOTE, 64, "canary-data", (2,)),
    explanation="The canary agrees: the data differ. More of it.",
    next_check="Look at the batch.",
)


def test_a_canary_settles_what_to_do_about_an_outlier():
    assert rules.next_check_of(OUTLIER, [OUTLIER]) == "Look."
    assert rules.settled_by(OUTLIER, [OUTLIER, CANARY]) == CANARY
    advice = "The canary agrees: the data differ. Look at the batch."
    assert rules.next_check_of(OUTLIER, [CANARY, OUTLIER]) == advice


def test_the_answer_is_told_while_the_training_goes_on():
    said: list[str] = []
    announcer = Announcer(lambda line, fault: said.append(line))
    announcer.announce([(CANARY, FindingEvent.OPENED)], [CANARY])
    assert said == []  # a note, about nothing that was told
    announcer.announce([(OUTLIER, FindingEvent.OPENED)], [OUTLIER])
    announcer.announce([(CANARY, FindingEvent.OPENED)], [OUTLIER, CANARY])
    assert said[1].startswith("note: The canary agrees: the data differ.")


def test_the_latest_bundle_of_a_finding(tmp_path):
    for name in ("rank-2-step-9", "rank-2-step-66", "rank-3-step-70", "scheduled-step-100"):
        (tmp_path / "replay" / name).mkdir(parents=True)
        (tmp_path / "replay" / name / "bundle.json").touch()
    replay = tmp_path / "replay"
    assert latest_bundle(tmp_path, {"rank-2"}) == replay / "rank-2-step-66"
    assert latest_bundle(tmp_path, {"canary-data"}, until=75) == replay / "rank-3-step-70"
    assert latest_bundle(tmp_path, {"rank-1"}) is None
    assert latest_bundle(tmp_path / "none", {"rank-1"}, until=9) is None
    assert latest_bundle(tmp_path, {"rank-2"}, over_by=50) == replay / "rank-2-step-9"


def test_every_rule_has_its_page_in_the_package():
    pages = rules.cause_pages()
    assert pages.keys() >= RULES.keys()
    for name in RULES:
        assert "**Do:**" in pages[name]
        assert "](" not in pages[name].replace("](http", "")
