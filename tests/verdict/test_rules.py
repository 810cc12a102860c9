"""The table of causes, and the words for ranks."""

import ast
import re
from pathlib import Path
from string import Formatter

import pytest

from rankscope import evidence
from rankscope.bus.detector import RULES, FaultEvidence, finding_of
from rankscope.bus.finding import Severity
from rankscope.bus.words import name_ranks, ranks_of_job


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
