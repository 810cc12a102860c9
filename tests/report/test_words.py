import json
import re

import numpy as np
import pyarrow as pa
import pytest

import rankscope
from rankscope.bus.evidence import Table
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.numbers import number
from rankscope.errors import RunError
from rankscope.evidence import columns_of
from rankscope.record import Run
from rankscope.report.markdown import code, escaped, run_markdown
from rankscope.verdict.assessment import assess
from rankscope.verdict.dispersion import describe_dispersion
from rankscope.verdict.words import finding_view, tiles
from report.recorded_runs import changing, record_run, with_everything


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.25349, "0.253"), (1.3e-16, "0.000"), (2.1e-7, "2.1e-07"), (12345.6, "12,346"), (None, "–")],
)
def test_numbers_are_written_as_they_are_read(value, words):
    assert number(value) == words


@pytest.mark.parametrize("loss_std", [0.192, 3.1e-5, 7.0])
@pytest.mark.parametrize("ratio", [0.021, 12.7])
def test_the_dispersion_and_what_sampling_explains_divide_as_they_are_printed(loss_std, ratio):
    values = {"loss_std": loss_std, "dispersion_ratio": ratio, "num_workers": 4, "steps": 60}
    values |= {"dispersion_ratio_low": 0.9 * ratio, "dispersion_ratio_high": 1.1 * ratio}
    tile = next(tile for tile in tiles(values) if tile["label"] == "Loss dispersion")
    told, explained = re.findall(r"[0-9][0-9.,e-]*", tile["note"])
    observed, expected = (float(text.replace(",", "")) for text in (tile["value"], explained))
    assert told == f"{observed / expected:.2f}"
    assert float(told) == pytest.approx(ratio, rel=0.01, abs=0.005)
    words = f"{explained}; the observed one, {tile['value']}, is {told} times"
    assert words in describe_dispersion(values)


def test_evidence_of_any_shape_is_one_line_which_names_are_whole_in():
    names = [f"layers.{index}.weight" for index in range(40)]
    evidence = {
        "many": list(range(40)),
        "names": names,
        "deep": {"a": 1.23456789, "b": None},
        "yes": True,
        "workers": {"2": [{"signal": "loss", "far_out": 3.25}, {"far_out": 1}]},
    }
    view = finding_view(Finding("i", "c", Severity.NOTE, (), 4, 4, "e", "n", evidence), 8)
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


@pytest.fixture(scope="module")
def run(folder):
    return record_run(folder / "<b>run", num_workers=4, num_steps=16, change=with_everything)


@pytest.mark.parametrize("table", Table)
def test_every_table_is_there_with_all_of_its_columns(run, table):
    rows = getattr(rankscope.load(run.path), table)
    assert isinstance(rows, pa.Table)
    named = [f"{signal.name}_in_words" for signal in columns_of(table) if signal.bits]
    assert rows.drop_columns(named).equals(run.table(table))
    assert rows.drop_columns(named).column_names == [signal.name for signal in columns_of(table)]
    assert len(rows.to_pandas()) == len(rows)


def test_one_opening_gives_tables_and_arrays(run):
    loaded = rankscope.load(run.path)
    assert isinstance(loaded.run, Run)
    np.testing.assert_array_equal(loaded.run.per_worker("loss")[1], run.per_worker("loss")[1])
    with pytest.raises(RunError, match="cannot reach"):
        Run.open("gs-nowhere://bucket/run")


def test_flags_have_names_beside_them(tmp_path):
    @changing
    def change(step, workers):
        workers["rng_used"][:] = (0, 4, 1 + 2, 8 + 16 * 2)
        workers["loader_rng_repeats"][1:] = (1, 4, 5)

    path = record_run(tmp_path / "run", num_workers=4, num_steps=1, change=change).path
    rows = rankscope.load(path).workers
    used = ["", "torch", "Python, numpy", "accelerator, numpy between passes"]
    assert rows["rng_used_in_words"].to_pylist() == used
    repeated = [None, "Python", "torch", "Python, torch"]
    assert rows["loader_rng_repeats_in_words"].to_pylist() == repeated


def test_what_watching_costs_is_said_in_every_step_and_for_each_read(tmp_path):
    @changing
    def change(step, workers):
        observed = step.step % 2 == 0
        workers["overhead_seconds"][:] = 0.002 + 0.003 * observed
        workers["read_seconds"][:] = 0.003 * observed
        workers["overhead_seconds"][1] += 0.002
        return {"interval": 2, "observed": observed}

    run = record_run(tmp_path / "run", num_workers=4, num_steps=16, change=change)
    said = rankscope.load(run.path).assess()
    assert said.values["overhead_fixed_seconds"] == pytest.approx(0.004)
    assert said.values["overhead_read_seconds"] == pytest.approx(0.003)
    [cost] = [line for line in said.statements if line.startswith("Watching took")]
    assert "gradients were measured every 2 steps at the widest" in cost
    assert "4 ms in every step whatever its length, and 3 ms to read the gradient" in cost
    assert cost.endswith("both are 7.00% of a step of 100 ms, and 0.70% of one of 1 second.")
    info = json.loads((run.path / "run.json").read_text())
    overhead = {"within_budget": False, "budget": 0.01}
    (run.path / "run.json").write_text(json.dumps({**info, "overhead": overhead}))
    said = rankscope.load(run.path).assess()
    [cost] = [line for line in said.statements if line.startswith("Watching took")]
    assert "The budget of 1.00% was not kept" in cost
