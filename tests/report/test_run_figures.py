import re

import altair as alt
import numpy as np
import pytest
import vl_convert
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rankscope.report import figures, series, write_report
from rankscope.report.compare import compare_view
from rankscope.report.document import LIGHT, VEGALITE, config
from rankscope.report.parts import Tables
from rankscope.report.series import BinnedGroups
from report.html_reader import Page
from report.recorded_runs import ODD, record_run

ROLLOUTS = ("map-rollout_gap", "workers-rollout_gap", "apart-rollout_gap")
NEW = {"timeline", "residual", "time", "interval", "group-norm", "group-cosine", *ROLLOUTS}
DRAWN = {"map-loss": ["light", "dark"], **{name: ["dark"] for name in NEW}}
"""The modes in which figures are drawn here; tests of the page draw the others."""


@pytest.fixture(scope="module")
def page(rich_run, tmp_path_factory):
    path = write_report(rich_run, tmp_path_factory.mktemp("page") / "report.html")
    return Page(path.read_text(encoding="utf-8"))


def rows_of(page, name, field):
    return next(rows for rows in page.specs[name]["datasets"].values() if rows and field in rows[0])


def test_figures_are_valid_and_can_be_drawn(page):
    assert NEW <= set(page.figures) == set(page.specs)
    for name, modes in DRAWN.items():
        spec = page.specs[name]
        bare = {key: value for key, value in spec.items() if key != "datasets"}
        alt.LayerChart.from_dict(bare, validate=True)
        for mode in modes:
            sized = {**spec, "width": 300} if spec["width"] == "container" else spec
            svg = vl_convert.vegalite_to_svg(sized, vl_version=VEGALITE, config=page.configs[mode])
            assert svg.count("<path") > 3, name


def test_the_maps_single_out_the_odd_worker(page, rich_run):
    columns = ("loss", "grad_norm", "rollout_gap")
    for name, column in [(f"map-{column}", column) for column in columns]:
        rows = rows_of(page, name, "deviation")
        for row in rows:
            if row["first"] >= 10:
                assert int(np.nanargmax(np.abs(np.array(row["deviation"], float)))) == ODD
        steps_T, values_TW = rich_run.per_worker(column)
        known = {int(s): v for s, v in zip(steps_T, values_TW, strict=True) if np.isfinite(v).any()}
        assert [row["first"] for row in rows] == list(known)
        np.testing.assert_allclose(rows[-1]["value"], known[rows[-1]["first"]], rtol=1e-3)


def test_the_timeline_leads_to_each_finding(page, rich_run):
    rows = rows_of(page, "timeline", "anchor")
    findings = {finding.id: finding for finding in rich_run.findings()}
    assert len(rows) == len(findings) >= 1
    for row in rows:
        assert f"#{row['anchor']}" in page.loads
        assert row["anchor"] in page.ids
    first = findings["outlier-1"]
    outlier = next(row for row in rows if row["anchor"] == "finding-outlier-1")
    assert (outlier["first"], outlier["last"]) == (first.first_step, first.last_step)
    assert outlier["severity"] == str(first.severity)
    assert [p["name"] for p in page.specs["timeline"]["params"] if "select" in p] == ["finding"]


def test_a_run_of_many_workers_has_maps_of_bounded_size(tmp_path):
    run = record_run(tmp_path / "run", num_workers=96, num_steps=3)
    page = Page(write_report(run).read_text(encoding="utf-8"))
    rows = rows_of(page, "map-loss", "deviation")
    assert {len(row["deviation"]) for row in rows} == {series.MAX_ROWS}
    assert "A row holds up to 2 workers" in page.words
    assert len({row["rank"] for row in rows_of(page, "workers-loss", "rank")}) == 48
    assert "48 of 96 workers are drawn" in page.words
    assert "heatmap" not in page.specs


@pytest.mark.parametrize("width", [190, 900])
def test_a_map_of_groups_has_its_legends_whole_at_any_width(width):
    names = [f"base_model.model.model.layers.{index}" for index in range(2)]
    cells = [{"deviation": [None, 0], "value": [0, 1], "mark": ["0", ""]}]
    cells += [{"deviation": [0, None], "value": [1, None], "mark": ["", "–"]}]
    rows = [{"group": n, "rank": [0, 1], **c} for n, c in zip(names, cells, strict=True)]
    tables = Tables()
    chart = figures.group_map(tables, rows, 2, "norm", "powers of 2 from the median", 1.0)
    fit = {"type": "fit-x", "contains": "padding"}  # as on the page
    spec = {**chart, "datasets": tables.rows, "width": width, "autosize": fit}
    svg = vl_convert.vegalite_to_svg(spec, vl_version=VEGALITE, config=config(LIGHT))
    for words in ("no gradient", "…model.model.layers.1"):
        assert f">{words}<" in svg
    marks = re.findall(r">(0|–)</text>", svg)
    assert marks.count("–") == 1
    assert marks.count("0") == 3  # the mark, a rank and the middle of the colours
    left = float(re.search(r"translate\(([\d.]+),", svg)[1])
    legend = (
        r'role-legend" [^>]*><g transform="translate\((-?[\d.]+),[^>]*><path [^>]*"M0,0h([\d.]+)'
    )
    ends = [left + float(x) + float(wide) for x, wide in re.findall(legend, svg)]
    assert len(ends) == 2
    assert max(ends) <= width


@pytest.mark.parametrize("share", [0.01, 0.7])
def test_labels_of_times_lie_on_no_curve(share):
    times = [40.0 + 900 * (step == 77) for step in range(80)]
    step = [{"step": at, "value": value} for at, value in enumerate(times)]
    monitor = [{"step": at, "value": share * (30 + 10 * (at % 2))} for at in range(80)]
    tables = Tables()
    chart = figures.time_per_step(tables, step, monitor)
    low, high = np.log(chart["layer"][0]["encoding"]["y"]["scale"]["domain"])
    curves = {"step": times, "monitor": [row["value"] for row in monitor]}
    for text in (layer for layer in chart["layer"] if layer["mark"]["type"] == "text"):
        (place,) = tables.rows[text["data"]["name"]]
        middle = (high - np.log(place["value"])) / (high - low) * chart["height"]
        middle += text["mark"]["dy"]
        assert 5 <= middle <= chart["height"] - 5
        for curve in curves.values():
            pixels = (high - np.log(curve[60:])) / (high - low) * chart["height"]
            over, under = pixels.max() < middle - 4, pixels.min() > middle + 4
            assert over or under, text["mark"]["text"]


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return record_run(tmp_path_factory.mktemp("other") / "less", num_workers=3, num_steps=20)


def test_both_runs_are_in_every_figure_and_can_be_told_apart_in_grey(healthy_run, other):
    tables = Tables()
    view = compare_view(tables, healthy_run, other, "x-")

    assert set(view.specs) == {
        f"x-compare-{name}" for name in ("loss", "loss_std", "grad_norm_std", "cosine_mean")
    }
    for name, spec in view.figures.items():
        assert name in view.titles
        whole = {**spec, "width": 300, "datasets": tables.rows}
        svg = vl_convert.vegalite_to_svg(whole, vl_version=VEGALITE)
        for words in ("stroke-dasharray", ">A<", ">B<"):
            assert words in svg
        letters = [layer["mark"] for layer in spec["layer"] if layer["mark"]["type"] == "text"]
        assert [mark["clip"] for mark in letters] == [False, False]  # curves are cut when zoomed


VALUES = st.one_of(st.floats(-1e6, 1e6), st.just(np.nan), st.just(np.inf))


@settings(max_examples=30, deadline=None)
@given(arrays(np.float64, st.integers(1, 400), elements=VALUES), st.integers(1, 40))
def test_extremes_keep_the_highest_and_lowest_of_every_bin(values_T, num_bins):
    kept = series.extremes(values_T, num_bins)

    assert np.all(np.diff(kept) > 0)
    assert kept[0] == 0
    assert kept[-1] == len(values_T) - 1
    assert len(kept) <= max(2 * num_bins + 2, 2)
    finite = values_T[np.isfinite(values_T)]
    if finite.size:
        left = values_T[kept][np.isfinite(values_T[kept])]
        assert left.max() == finite.max()
        assert left.min() == finite.min()


def test_copies_that_rounding_alone_sets_apart_are_not_apart():
    copies_TW = np.array([[0.3, 0.1 + 0.2, 0.3], [0.7, 0.7, 0.1 * 7]])
    assert np.ptp(copies_TW, axis=1).min() > 0
    rows = series.deviations(copies_TW)
    assert [(row["value"], row["low"], row["high"]) for row in rows] == [(0.0, 0.0, 0.0)] * 3
    apart = series.deviations(np.array([[1.0, 1.0 + 1e-4]] * 3))
    np.testing.assert_allclose([row["value"] for row in apart], [-5e-5, 5e-5], rtol=1e-3)


def groups_of(norms_SGW: np.ndarray, cosines_GW: np.ndarray | None = None) -> BinnedGroups:
    num_steps, *shape = norms_SGW.shape
    at_R = np.repeat(np.arange(num_steps), shape[0] * shape[1])
    cells_R = np.tile(np.arange(shape[0] * shape[1]), num_steps)
    known_GW = (~np.isnan(norms_SGW)).sum(axis=0)
    means_GW = np.nansum(norms_SGW, axis=0) / np.maximum(known_GW, 1)
    return BinnedGroups(
        names=[f"layers.{index}" for index in range(shape[0])],
        norm_GW=np.where(known_GW > 0, means_GW, np.nan),
        cosine_GW=np.full(shape, np.nan) if cosines_GW is None else cosines_GW,
        absent_GW=series.absent(at_R, cells_R, norms_SGW.ravel(), (shape[0], shape[1])),
        num_steps=num_steps,
        last_step=num_steps - 1,
    )


def marks_of(norms_SGW: np.ndarray) -> list[list[str]]:
    return [row["mark"] for row in series.norm_rows(groups_of(norms_SGW))]


def test_a_group_without_gradient_on_one_worker_is_marked_and_not_left_blank():
    norms_SGW = np.ones((5, 3, 3))
    norms_SGW[1:, 0, 0] = 0
    norms_SGW[2:, 1, 1] = np.nan  # beside groups of this worker that are known
    norms_SGW[3:, 2, 2] = 0  # in fewer than half of the steps
    assert marks_of(norms_SGW) == [["0", "", ""], ["", "0", ""], ["", "", ""]]
    frozen, *_ = series.norm_rows(groups_of(norms_SGW))
    assert frozen["deviation"] == [None, 0, 0]
    cosines_GW = np.array([[np.nan, 0.4, 0.5], [0.3, np.nan, 0.4], [0.3, 0.4, np.nan]])
    directions = series.direction_rows(groups_of(norms_SGW, cosines_GW))
    assert [row["mark"] for row in directions] == [["0", "", ""], ["", "0", ""], ["", "", "–"]]


def test_a_worker_that_was_not_observed_looks_otherwise_and_so_does_a_frozen_group():
    norms_SGW = np.ones((5, 2, 3))
    norms_SGW[:, :, 1] = np.nan
    assert marks_of(norms_SGW) == [["", "–", ""], ["", "–", ""]]
    norms_SGW = np.ones((5, 2, 3))
    norms_SGW[:, 0] = 0  # on all: nothing of it is trained
    assert marks_of(norms_SGW) == [["", "", ""]]


def test_of_many_workers_a_cell_shows_the_one_without_gradient():
    norms_SGW = np.ones((2, 1, 128))
    norms_SGW[:, 0, 7] = 0
    norms_SGW[:, 0, 6] = 1000
    (row,) = series.norm_rows(groups_of(norms_SGW))
    assert (row["rank"][3], row["mark"][3], len(row["mark"])) == (7, "0", series.MAX_ROWS)
