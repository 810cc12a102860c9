import itertools
import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import vl_convert

from rankscope.bus.finding import Finding, Severity
from rankscope.errors import RunError
from rankscope.record import Run
from rankscope.report import document, write_figures, write_report, write_study_report
from rankscope.report.document import VEGALITE, breakable, render
from rankscope.report.page import run_view
from rankscope.report.parts import Tables
from rankscope.verdict import words
from rankscope.verdict.assessment import assess
from report.html_reader import Page
from report.recorded_runs import changing, record_run

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'</style>{{ 7*7 }}"
RUN_FIGURES = {
    "loss", "loss_std", "grad_norm_std", "cosine_mean", "heatmap", "coverage", "time",
    "map-loss", "map-grad_norm", "map-cosine_rest",
    "workers-loss", "workers-grad_norm", "workers-cosine_rest",
    "apart-loss", "apart-grad_norm", "apart-cosine_rest",
}  # fmt: skip


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def assert_renders(page: Page, names: list[str]) -> None:
    """Every figure is drawn by the Vega that the page carries, in light and dark in turn."""
    for name, mode in zip(names, itertools.cycle(("light", "dark")), strict=False):
        assert "<path" in vl_convert.vegalite_to_svg(
            _with_width(page.specs[name]),
            vl_version=VEGALITE,
            config=page.configs[mode],
            allowed_base_urls=[],
        ), name


def _with_width(spec):
    return {**spec, "width": 400} if spec.get("width") == "container" else spec


@pytest.fixture(scope="module")
def page(copied_run, folder):
    return read(write_report(copied_run, folder / "report.html"))


def test_page_of_a_run_shows_every_figure_and_each_can_be_drawn(page):
    assert set(page.figures) == set(page.specs) == RUN_FIGURES | {"timeline"}
    assert_renders(page, sorted(page.specs))


def test_every_figure_has_a_title_and_a_place():
    templates = Path(document.__file__).parent / "templates"
    text = "".join(path.read_text() for path in sorted(templates.glob("*.html")))
    placed = set(re.findall(r'\bfigure\([a-z_]+, "([a-z_-]+)"', text))
    placed |= set(re.findall(r'data-figure="\{\{ view\.key \}\}([a-z_-]+)"', text))
    assert placed == set(words.TITLES)


def test_two_workers_have_one_cosine_which_is_drawn_once(tmp_path: Path):
    run = record_run(tmp_path / "run", num_workers=2, num_steps=4)
    page = read(write_report(run, tmp_path / "report.html"))
    assert {n for n in page.specs if "cosine" in n} == {"cosine_mean", "workers-cosine_rest"}


def test_page_says_what_was_found_and_in_which_ranks(copied_run, page):
    words = page.words
    for told in ("Error", "data.duplicate_batches", "ranks 1–7", "steps 0 to 29"):
        assert told in words
    for finding in copied_run.findings():
        assert finding.explanation in words
        assert finding.next_check in words


def test_ranks_stand_out_beside_findings_that_name_all(tmp_path: Path):
    """The worst findings name the ranks in red, until those would be more than half of all."""
    record_run(tmp_path / "run", num_workers=4, num_steps=4)
    found = [
        Finding("a", "inconclusive", Severity.WARNING, (2,), 1, 3, "Rank 2 differs.", "Look."),
        Finding("b", "inconclusive", Severity.NOTE, (0, 1, 2, 3), 1, 3, "All differ.", "Look."),
    ]
    events = "".join(f"{json.dumps(one.to_json())}\n" for one in found)
    (tmp_path / "run" / "findings.jsonl").write_text(events)
    page = read(write_report(Run.open(tmp_path / "run"), tmp_path / "report.html"))
    assert "In red: rank 2, named above." in page.words


def test_a_line_ends_after_a_dot_of_a_long_name_and_nowhere_in_a_short_one():
    long = "model.layers.0.self_attn.q_proj.weight"
    text = f"<b> {long} of 0.25, fc.weight; {long}."
    broken = "model.<wbr>layers.<wbr>0.<wbr>self_attn.<wbr>q_proj.<wbr>weight"
    assert breakable(text) == f"&lt;b&gt; {broken} of 0.25, fc.weight; {broken}."
    assert breakable("at most 0.01 %.") == "at most 0.01&nbsp;%."


def test_a_headline_with_a_long_name_may_break_at_its_dots(tmp_path: Path):
    run = record_run(tmp_path / "run", num_workers=2, num_steps=4)
    view = run_view(Tables(), run, replace(assess(run), headline="decoder.layers.17.mlp.weight"))
    page = render("run.html", {"view": view, "title": "run"}, {}, Tables())
    assert "<h1>decoder.<wbr>layers.<wbr>17.<wbr>mlp.<wbr>weight</h1>" in page


def test_page_of_a_healthy_run_says_so(long_healthy_run: Run):
    path = write_report(long_healthy_run)
    words = read(path).words

    assert path == long_healthy_run.path / "report.html"
    assert "Healthy" in words
    assert "2,048 different of 2,048 drawn" in words
    assert "Findings None:" in words


def test_page_loads_nothing_and_only_its_own_scripts_may_run(page):
    assert page.loads[0] == "#verdict"
    assert all(address.startswith("#") for address in page.loads)
    assert not {"link", "iframe", "img", "object", "embed", "base"} & page.tags.keys()
    assert "url(" not in page.styles
    assert "@import" not in page.styles
    assert "default-src 'none'" in page.policy
    assert "connect-src 'none'" in page.policy
    assert "'unsafe-inline'" not in page.policy.split("script-src")[1].split(";")[0]
    assert all(digest in page.policy for digest in page.digests())
    own = page.scripts[-1]
    assert not [word for word in ("fetch(", "XMLHttpRequest", "import(", "http") if word in own]
    assert "http" not in json.dumps(page.specs)


def test_every_link_inside_a_page_leads_somewhere(page, study):
    assert {"#step-0", "#findings", "#cost"} <= set(page.loads)
    for one in (page, read(write_study_report(study))):
        targets = {address.removeprefix("#") for address in one.loads}
        steps = {target for target in targets if re.fullmatch(r"(run\d-)?step-\d+", target)}
        assert steps
        assert targets - steps <= set(one.ids)
        assert len(one.ids) == len(set(one.ids))
    assert {"table", "why", "each"} <= targets


def test_hostile_names_are_inert(tmp_path: Path):
    names = dict.fromkeys(("name", "model", "data"), HOSTILE)
    run = record_run(tmp_path / "run", num_workers=2, num_steps=3, **names)
    page = read(write_report(run))

    assert page.tags["script"] == 3
    assert "img" not in page.tags
    assert page.words.count(HOSTILE) >= 3


def test_steps_without_losses_gradients_or_samples_leave_their_figures_out(tmp_path):
    @changing
    def bare(step, workers):
        for name in ("loss", "loss_sem", "grad_norm"):
            workers[name][:] = np.nan
        return {"observed": False, "sketches_WK": None, "samples": (np.empty(0, np.int64),) * 2}

    page = read(write_report(record_run(tmp_path / "run", num_workers=2, num_steps=3, change=bare)))
    assert page.figures == ["time"]
    assert "No step of this run has observed gradients." in page.words


def test_study_page_compares_all_runs_and_holds_their_details(study: Path):
    page = read(write_study_report(study))

    assert all(address.startswith("#") for address in page.loads)
    assert set(page.figures) == set(page.specs)
    runs = [f"run{index}-{name}" for index in range(6) for name in RUN_FIGURES]
    assert set(runs) <= set(page.figures)
    comparing = [n for n in page.figures if n not in runs and not n.endswith("-timeline")]
    assert len(comparing) == 1 + 6 + 3 + 6 + 6
    assert_renders(page, sorted(comparing))
    assert "Why the two readings differ" in page.words
    for entry in json.loads((study / "summary.json").read_text()):
        assert entry["headline"] in page.words
        assert entry["recommendation"] in page.words


def test_study_figures_are_legible_pngs(study: Path):
    paths = write_figures(study)

    assert {path.name for path in paths} == {
        "averaged-loss.png", "cosine-heatmap.png", "metrics.png",
    }  # fmt: skip
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", content[16:24])
        assert 2 * 1100 <= width <= 2 * 1250, path
        assert height >= 600
    assert not list((study / "figures").glob(".*"))


@pytest.mark.parametrize(
    ("summary", "message"), [(None, "no summary.json"), ("{}", "should be a list")]
)
def test_a_study_that_cannot_be_read_says_why(tmp_path: Path, summary: str | None, message: str):
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    with pytest.raises(RunError, match=message):
        write_study_report(tmp_path)


def test_the_script_that_draws_figures_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = document.vega_script.__wrapped__()
    assert "vegaEmbed" in made
    monkeypatch.setattr(document, "_bundle", None)
    assert document.vega_script.__wrapped__() == made
    [kept] = (tmp_path / "rankscope").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
