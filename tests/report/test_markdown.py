import re

import pytest

from rankscope.record import Run
from rankscope.report.markdown import code, escaped, run_markdown
from rankscope.verdict.assessment import assess
from rankscope.verdict.words import number

HOSTILE = "a|b\n# c <script>x</script> [l](http://x) `d` @all *e* ~f~ $g$ ![p](q)"


def rows_of(text: str) -> list[list[str]]:
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


@pytest.mark.parametrize("words", [HOSTILE, "x\x1b[2J\u202ey"])
def test_words_of_a_record_stay_in_their_cell(words: str):
    shown = escaped(words)
    assert code(words) == shown
    assert shown.isprintable()
    assert not re.search(r"(?<!\\)[|`*_\[\]~#$]", shown.replace("&#64;", "").replace("&#47;", ""))
    assert not {"<", ">", "@"} & set(shown)
    assert "://" not in shown
