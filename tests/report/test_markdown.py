import json
import re
from pathlib import Path

import pytest

from rankscope.record import Run
from rankscope.report.markdown import code, escaped, run_markdown, study_markdown
from rankscope.report.study_words import open_study
from rankscope.verdict.assessment import assess
from rankscope.verdict.words import number

HOSTILE = "a|b\n# c <script>x</script> [l](http://x) `d` @all *e* ~f~ $g$ ![p](q)"


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of all tables' rows."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_a_run_says_verdict_findings_and_numbers(copied_run: Run):
    verdict = assess(copied_run)
    text = run_markdown(copied_run, verdict, ["figures/overview.png"])

    assert text.startswith(f"## ◆ Error: {verdict.headline}\n")
    assert f"**What to do.** {verdict.recommendation}" in text
    cells = rows_of(text)
    worst = ["◆ error", "Workers train on the same batches", "ranks 1–7", "steps 0 to 29"]
    assert [*worst, "`data.duplicate_batches`"] in cells
    assert len({len(row) for row in cells if "Finding" in row or "◆ error" in row}) == 1
    values = verdict.values
    assert ["Mean cosine", f"**{number(values['cosine_mean'])}**"] in [row[:2] for row in cells]
    for finding in copied_run.findings():
        assert escaped(finding.explanation) in text
        assert escaped(finding.next_check) in text
    assert "](<figures/overview.png>)" in text


def test_a_study_sets_its_configurations_side_by_side(study: Path):
    text = study_markdown(open_study(study), ["figures/metrics.png"])

    cells = rows_of(text)
    assert [row[0] for row in cells[2:]] == [
        f"S1-{index}, {reading}" for reading in ("sharded", "replicated") for index in (1, 2, 3)
    ]
    assert len({len(row) for row in cells}) == 1
    assert "### Configuration assessment" in text
    assert "### Why the two readings differ" in text
    for entry in json.loads((study / "summary.json").read_text()):
        assert escaped(entry["headline"]) in text
        assert escaped(entry["recommendation"]) in text
    assert "![The three metrics by setting](<figures/metrics.png>)" in text


@pytest.mark.parametrize("words", [HOSTILE, "x\x1b[2J\u202ey"])
def test_words_of_a_record_stay_in_their_cell(words: str):
    shown = escaped(words)
    assert code(words) == shown
    assert shown.isprintable()
    assert not re.search(r"(?<!\\)[|`*_\[\]~#$]", shown.replace("&#64;", "").replace("&#47;", ""))
    assert not {"<", ">", "@"} & set(shown)
    assert "://" not in shown
