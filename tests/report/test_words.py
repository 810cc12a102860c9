import re
from dataclasses import replace

import numpy as np
import pytest

from rankscope.bus.finding import Finding, Severity
from rankscope.bus.rules import RULES
from rankscope.bus.step import MISSING_INT
from rankscope.report.study_words import Entry, headline_of, why_heading, why_they_differ
from rankscope.verdict.dispersion import describe_dispersion
from rankscope.verdict.words import (
    facts,
    finding_view,
    number,
    ranks_in_words,
    steps_in_words,
    tiles,
    title_of_finding,
    whole,
)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.25349, "0.253"),
        (0.0, "0.000"),
        (1.3e-16, "0.000"),
        (2.1e-7, "2.1e-07"),
        (-0.5, "-0.500"),
        (12345.6, "12,346"),
        (5e9, "5.0e+09"),
        (960, "960"),
        (np.int64(1024), "1,024"),
        (None, "–"),
        (float("nan"), "–"),
        (MISSING_INT, "–"),
    ],
)
def test_numbers_are_written_as_they_are_read(value, words):
    assert number(value) == words


def test_whole_numbers():
    assert [whole(960.0), whole(1e6), whole(None)] == ["960", "1,000,000", "–"]


@pytest.mark.parametrize(
    ("ranks", "num_workers", "words"),
    [
        ((), 8, "the whole run"),
        ((3,), 8, "rank 3"),
        ((0,), 1, "rank 0"),
        ((0, 1), 2, "both workers"),
        ((1, 2, 3, 7), 8, "ranks 1–3 and 7"),
    ],
)
def test_ranks_in_words(ranks, num_workers, words):
    assert ranks_in_words(ranks, num_workers) == words


@pytest.mark.parametrize(
    ("first", "last", "status", "words"),
    [
        (4, 4, "open", "step 4"),
        (4, 1119, "open", "steps 4 to 1,119"),
        (4, 119, "closed", "steps 4 to 119, over since"),
    ],
)
def test_steps_in_words(first, last, status, words):
    finding = Finding("id", "cause", Severity.NOTE, (), first, last, "It is.", "Look.", {})
    assert steps_in_words(replace(finding, status=status)) == words


def test_tiles_of_undefined_values_say_what_is_not_known():
    shown = {tile["label"]: tile for tile in tiles({})}
    assert shown["Mean cosine"]["value"] == "–"
    assert shown["Loss dispersion"]["note"] == (
        "mean over steps; no reference: sampling's part is unknown"
    )
    assert shown["Different samples"]["note"] == "samples were not identified"


@pytest.mark.parametrize("loss_std", [0.192, 0.0218, 3.1e-5, 7.0, 1234.5])
@pytest.mark.parametrize("ratio", [0.021, 0.97, 1.2, 1.333, 12.7])
def test_the_dispersion_and_what_sampling_explains_divide_as_they_are_printed(loss_std, ratio):
    values = {
        "loss_std": loss_std,
        "dispersion_ratio": ratio,
        "dispersion_ratio_low": 0.9 * ratio,
        "dispersion_ratio_high": 1.1 * ratio,
        "num_workers": 4,
        "steps": 60,
    }
    tile = next(tile for tile in tiles(values) if tile["label"] == "Loss dispersion")
    told, explained = re.findall(r"[0-9][0-9.,e-]*", tile["note"])
    observed, expected = (float(text.replace(",", "")) for text in (tile["value"], explained))
    assert told == f"{observed / expected:.2f}"
    assert float(told) == pytest.approx(ratio, rel=0.01, abs=0.005)
    assert (
        f"{explained}; the observed one, {tile['value']}, is {told} times"
        in describe_dispersion(values)
    )


def test_tiles_say_when_not_all_samples_were_identified():
    values = {"distinct_samples": 50, "samples_drawn": 200, "samples_exact": False}
    shown = {tile["label"]: tile for tile in tiles(values)}
    assert shown["Different samples"]["note"] == "of 200 drawn, about 4.0 times each"


@pytest.mark.parametrize(
    ("name", "cause", "title"),
    [
        ("state.something_new", "state.something_new", "state.something_new"),
        ("outlier-1", "data.worker_outlier", RULES["data.worker_outlier"].title),
        ("gross-outlier", "inconclusive", RULES["gross-outlier"].title),
    ],
)
def test_a_finding_is_titled_by_its_rule_or_its_cause_or_the_name_of_that(name, cause, title):
    finding = Finding(name, cause, Severity.NOTE, (), 1, 2, "It is.", "Look.", {})
    assert title_of_finding(finding) == title


def test_evidence_of_any_shape_is_one_short_line():
    evidence = {"many": list(range(40)), "deep": {"a": 1.23456789, "b": None}, "yes": True}
    finding = Finding("i", "c", Severity.NOTE, (), 4, 4, "e", "n", evidence)
    finding = replace(
        finding,
        evidence={
            **evidence,
            "workers": {"2": [{"signal": "loss", "far_out": 3.25}, {"far_out": 1}]},
        },
    )
    view = finding_view(finding, 8)
    assert view["evidence_tables"] == [
        ("workers", (["rank", "signal", "far out"], [["2", "loss", "3.25"], ["2", "–", "1"]]))
    ]
    assert view["steps"] == "step 4"
    assert dict(view["evidence"]) == {
        "many": "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, … (40 in all)",
        "deep": "a 1.235, b –",
        "yes": "yes",
    }


def test_facts_leave_out_what_is_not_known():
    shown = dict(facts({"model": "tiny", "seed": 0}, "running", {"overhead": 0.004}, 8, 30))
    assert shown == {
        "Workers": "8",
        "Steps": "30",
        "Status": "running",
        "Model": "tiny",
        "Seed": "0",
        "Watching took": "4 ms in the median step, on its slowest worker",
    }


def entry(reading: str, setting: str, severity: str | None = None, **values: object) -> Entry:
    return Entry({"reading": reading, "setting": setting, "severity": severity, **values})


def test_a_study_is_as_severe_as_its_worst_run():
    healthy, bad = entry("sharded", "s1-1"), entry("sharded", "s1-2", "error")
    assert headline_of([healthy])[0] == "healthy"
    assert headline_of([healthy, bad]) == ("error", "1 of 2 configurations needs attention.")
    assert headline_of([healthy, entry("sharded", "s1-3", "note")])[0] == "note"


def test_why_the_readings_differ_is_told_with_the_studys_numbers():
    entries = [
        entry("sharded", "s1-1", cosine_mean=0.035, distinct_samples=960, samples_drawn=960),
        entry("sharded", "s1-2", cosine_mean=0.034, distinct_samples=930, samples_drawn=960),
        entry("replicated", "s1-1", cosine_mean=1.0, distinct_samples=120, samples_drawn=960),
    ]
    told = dict(why_they_differ(entries))
    assert "0.035 under S1-1 and 0.034 under S1-2" in told["Sharded"]
    assert "of 960 drawn: 960 under S1-1 and 930 under S1-2" in told["Sharded"]
    assert "the mean cosine is 1.000 under S1-1" in told["Replicated"]
    assert "What follows" in told
    assert why_heading(entries) == "Why the two readings differ"

    only = dict(why_they_differ(entries[:2]))
    assert list(only) == ["Sharded"]
    assert why_heading(entries[:2]) == "What the settings change"
