"""The table of causes, and the words for ranks."""

import ast
import re
from dataclasses import replace
from pathlib import Path
from string import Formatter

import pytest

from rankscope import evidence
from rankscope.bus.detector import RULES, FaultEvidence, finding_of
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.words import name_ranks, named, ranks_of_job, shortened
from rankscope.verdict.rules import first_sentence, ranked


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
        (
            PROJECTIONS,
            "the gradient of {} is 0",
            f"the gradient of {PROJECTIONS[0]} and 3 more is 0",
        ),
        (PROJECTIONS[:2], "Look at {}", f"Look at {PROJECTIONS[0]} and 1 more"),
        (SCATTERED, "Parameters ({}) differ", "Parameters (norm and 4 more) differ"),
        (PROJECTIONS[:1], "Parameters ({}) differ", f"Parameters ({PROJECTIONS[0]}) differ"),
        (
            ["0.weight", "0.bias", "a", "b"],
            "({}) differ",
            "(0.weight, 0.bias, a and 1 other) differ",
        ),
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
    words = "Rank 0 computes a different result."
    code = Finding(
        "canary-code", "compute.code_differs", Severity.ERROR, (0,), 32, 32, words, "Look."
    )
    modes = Finding(
        "modes", "compute.modes_differ", Severity.WARNING, (0,), 25, 60, "Modes differ.", "Call."
    )
    assert [one.id for one in ranked([code, modes])] == ["modes", "canary-code"]
    elsewhere = replace(code, ranks=(1,))
    assert [one.id for one in ranked([elsewhere, modes])] == ["canary-code", "modes"]


def fault_at(
    step: int, words: str, *, name: str = "roles-differ", evidence: dict[str, object] | None = None
) -> Finding:
    cause = "state.parameters_differ"
    return Finding(name, cause, Severity.ERROR, (0, 1), step, 79, words, "Look.", evidence or {})
