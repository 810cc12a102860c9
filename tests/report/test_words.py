import re

import pytest

from rankscope.bus.finding import Finding, Severity
from rankscope.verdict.dispersion import describe_dispersion
from rankscope.verdict.words import finding_view, number, tiles


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.25349, "0.253"), (1.3e-16, "0.000"), (2.1e-7, "2.1e-07"), (12345.6, "12,346"), (None, "–")],
)
def test_numbers_are_written_as_they_are_read(value, words):
    assert number(value) == words


@pytest.mark.parametrize("loss_std", [0.192, 3.1e-5, 7.0])
@pytest.mark.parametrize("ratio", [0.021, 12.7])
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


def test_evidence_of_any_shape_is_one_line_which_names_are_whole_in():
    names = [f"layers.{index}.weight" for index in range(40)]
    evidence = {
        "many": list(range(40)),
        "names": names,
        "deep": {"a": 1.23456789, "b": None},
        "yes": True,
        "workers": {"2": [{"signal": "loss", "far_out": 3.25}, {"far_out": 1}]},
    }
    finding = Finding("i", "c", Severity.NOTE, (), 4, 4, "e", "n", evidence)
    view = finding_view(finding, 8)
    assert view["evidence_tables"] == [
        ("workers", (["rank", "signal", "far out"], [["2", "loss", "3.25"], ["2", "–", "1"]]))
    ]
    assert view["steps"] == "step 4"
    assert dict(view["evidence"]) == {
        "many": "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, … (40 in all)",
        "names": ", ".join(names),
        "deep": "a 1.235, b –",
        "yes": "yes",
    }
