"""The numbers of every sentence that a run or the gallery shows hold together."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.verdict.assessment import assess
from rankscope.verdict.dispersion import describe_dispersion
from rankscope.verdict.words import VerdictWords, tiles, verdict_of
from support.arithmetic import faults_of

GALLERY = Path(__file__).parents[2] / "docs" / "gallery.json"


def texts(verdict: VerdictWords) -> list[str]:
    assessment = verdict.assessment
    return [
        verdict.line,
        assessment.headline,
        assessment.recommendation,
        *assessment.statements,
        *(f"{tile['label']}: {tile['value']} | {tile['note']}" for tile in verdict.tiles),
        *(finding["explanation"] for finding in verdict.findings),
    ]


@pytest.mark.parametrize("name", ["healthy_run", "long_healthy_run", "copied_run", "rich_run"])
def test_the_numbers_of_a_run_hold_together(name, request):
    run = request.getfixturevalue(name)
    assert not [fault for text in texts(verdict_of(run, assess(run))) for fault in faults_of(text)]


def test_the_numbers_of_every_fault_in_the_gallery_hold_together():
    said = [row.get("says") or "" for row in json.loads(GALLERY.read_text("utf-8")).values()]
    assert not [fault for text in said for fault in faults_of(text)]


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-6, 1e4), st.floats(0.01, 100), st.floats(0.03, 0.5))
def test_a_dispersion_divides_by_what_sampling_explains(observed, ratio, width):
    values = {
        "num_workers": 8,
        "steps": 400,
        "loss_std": observed,
        "dispersion_ratio": ratio,
        "dispersion_ratio_low": ratio * (1 - width),
        "dispersion_ratio_high": ratio * (1 + width),
    }
    assert not faults_of(describe_dispersion(values))
    tile = tiles(values)[1]
    assert not faults_of(f"{tile['label']}: {tile['value']} | {tile['note']}")


@pytest.mark.parametrize(
    "wrong",
    [
        "Loss dispersion: 0.192 | 1.20 × the 0.174 that sampling explains",
        "Sampling alone would give a loss std of 0.174; the observed one, 0.192, is 1.10 times "
        "that (95 % interval 1.12 to 1.20), within the 0.65 to 1.55 that may be.",
        "In the whole run, 970 of the 960 samples drawn are different.",
        "The job cost 3 apples and 4 pears.",
    ],
)
def test_a_contradiction_is_seen(wrong):
    assert faults_of(wrong)
