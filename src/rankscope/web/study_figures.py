"""The figures that set the runs of a study side by side: readings in rows, settings in columns."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import altair as alt

from rankscope.web.figures import heatmap
from rankscope.web.parts import Tables, Width, column, finish, rate_domain, step_axis
from rankscope.web.series import Row

SETTING_WORDS = {
    "s1-1": "every rank has the same seed",
    "s1-2": "rank 0 has a seed of its own",
    "s1-3": "every rank has its own seed",
}
SHORT_WORDS = {"s1-1": "equal seeds", "s1-2": "rank 0 differs", "s1-3": "all differ"}
READING_WORDS = {
    "sharded": "Sharded: each worker reads its own shard",
    "replicated": "Replicated: every worker reads the whole data set",
}
METRICS = (
    ("loss_std", "Loss dispersion", "std over workers, nats per token"),
    ("grad_norm_std", "Gradient-norm dispersion", "std over workers"),
    ("cosine_mean", "Gradient-direction consistency", "mean cosine over pairs"),
)
"""The three metrics: column, name, unit."""


@dataclass(frozen=True, slots=True)
class StudyRun:
    """What the figures need of one run of a study.

    Attributes:
        setting: Such as ``s1-1``.
        reading: ``sharded`` or ``replicated``.
        num_workers: W.
        means: Mean over steps of each of the three metrics, None where undefined.
        loss_mean: Rows ``{step, value}`` of the averaged loss.
        loss_lines: Rows ``{step, rank, value}`` of the workers' losses.
        metrics: Rows ``{step, value}`` of each of the three metrics.
        cosines: Rows ``{frame, cosines}`` of the heatmap; empty when there are none.
    """

    setting: str
    reading: str
    num_workers: int
    means: dict[str, float | None]
    loss_mean: list[Row]
    loss_lines: list[Row]
    metrics: dict[str, list[Row]]
    cosines: list[Row] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The setting as it is shown: ``S1-1``."""
        return self.setting.upper()


def in_order(values: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the different values, known ones first and in their usual order."""
    different = list(dict.fromkeys(values))
    rest = [value for value in different if value not in known]
    return [value for value in known if value in different] + rest


def readings(runs: Sequence[StudyRun]) -> list[str]:
    """Return the readings of a study, sharded first."""
    return in_order([run.reading for run in runs], list(READING_WORDS))


def settings(runs: Sequence[StudyRun]) -> list[str]:
    """Return the settings of a study, in order."""
    return in_order([run.setting for run in runs], list(SETTING_WORDS))


def _setting_colour(runs: Sequence[StudyRun], legend: bool = True) -> alt.Color:
    names = [setting.upper() for setting in settings(runs)]
    shown = alt.Legend(title=None, orient="top", symbolType="stroke") if legend else None
    return alt.Color("setting:N", scale=alt.Scale(domain=names), legend=shown)


def loss_domain(runs: Sequence[StudyRun]) -> list[float]:
    """Return one vertical domain for the losses of all workers of all runs."""
    known = [v for run in runs for v in column(run.loss_lines, "value") if v is not None]
    return [min(known, default=0.0), max(known, default=1.0)]


def dashboard(
    tables: Tables,
    runs: Sequence[StudyRun],
    *,
    width: Width = "container",
    height: int = 170,
) -> alt.Chart:
    """Return the averaged losses alone, all runs over each other: all that a dashboard shows."""
    rows = [
        {"step": p["step"], "value": p["value"], "setting": run.label, "reading": run.reading}
        for run in runs
        for p in run.loss_mean
    ]
    y = alt.Y("value:Q", axis=alt.Axis(title=None), scale=alt.Scale(zero=False))
    dashes = alt.Scale(domain=list(READING_WORDS), range=[[1, 0], [4, 3]])
    legend = alt.Legend(title=None, orient="top", symbolType="stroke")
    dash = alt.StrokeDash("reading:N", scale=dashes, legend=legend)
    chart: alt.Chart = (
        alt.Chart(tables.add(rows))
        .mark_line(style="setting")
        .encode(x=step_axis(), y=y, color=_setting_colour(runs), strokeDash=dash)
        .properties(width=width, height=height)
    )
    return chart


def worker_panel(
    tables: Tables,
    run: StudyRun,
    domain: Sequence[float],
    *,
    width: Width = "container",
    height: int = 180,
) -> alt.LayerChart:
    """Return the losses of the workers of one run with their average in front."""
    y = alt.Y(
        "value:Q",
        axis=alt.Axis(title=None),
        scale=alt.Scale(domain=list(domain), nice=True, zero=False),
    )
    each = alt.Chart(tables.add(run.loss_lines)).mark_line(style="worker")
    mean = alt.Chart(tables.add(run.loss_mean)).mark_line(style="mean")
    tips = [
        alt.Tooltip("rank:O", title="rank"),
        alt.Tooltip("step:Q", title="step", format=",d"),
        alt.Tooltip("value:Q", title="loss", format=".4~g"),
    ]
    lines = each.encode(x=step_axis(ticks=4), y=y, detail="rank:N", tooltip=tips)
    return finish([lines, mean.encode(x=step_axis(ticks=4), y=y)], width, height)


def metric_panel(
    tables: Tables,
    runs: Sequence[StudyRun],
    name: str,
    domain: Sequence[float],
    *,
    width: Width = "container",
    height: int = 170,
) -> alt.Chart:
    """Return one metric over time, one line per setting; the runs are those of one reading."""
    rows = [
        {"step": point["step"], "value": point["value"], "setting": run.label}
        for run in runs
        for point in run.metrics[name]
    ]
    y = alt.Y("value:Q", axis=alt.Axis(title=None), scale=alt.Scale(domain=list(domain)))
    tips = [
        alt.Tooltip("setting:N"),
        alt.Tooltip("step:Q", format=",d"),
        alt.Tooltip("value:Q", format=".4~g"),
    ]
    chart: alt.Chart = (
        alt.Chart(tables.add(rows))
        .mark_line(style="setting")
        .encode(x=step_axis(ticks=4), y=y, color=_setting_colour(runs, legend=False), tooltip=tips)
        .properties(width=width, height=height)
    )
    return chart


def metric_domain(runs: Sequence[StudyRun], name: str) -> list[float]:
    """Return one vertical domain for a metric over all runs."""
    return rate_domain(*(column(run.metrics[name], "value") for run in runs), floor=0.01)


def progression(
    tables: Tables,
    runs: Sequence[StudyRun],
    name: str,
    *,
    width: Width = "container",
    height: int = 220,
) -> alt.LayerChart:
    """Return a metric's mean by setting, one connected line per reading, with its values."""
    labels = {name: f"{name.upper()}|{SHORT_WORDS.get(name, '')}" for name in settings(runs)}
    rows = [
        {"setting": labels[run.setting], "reading": run.reading, "value": run.means[name]}
        for run in runs
    ]
    low, high = rate_domain(column(rows, "value"), floor=0.01)
    room = 0.16 * (high - low)
    y = alt.Y(
        "value:Q",
        axis=alt.Axis(title=None),
        scale=alt.Scale(domain=[low - room, high + room / 2], nice=False),
    )
    axis = alt.Axis(title=None, labelAngle=0, labelExpr="split(datum.label, '|')")
    x = alt.X("setting:N", sort=list(labels.values()), axis=axis)
    base = alt.Chart(tables.add(rows)).encode(x=x, y=y)
    kinds = readings(runs)
    shown = alt.Legend(title=None, orient="top", symbolType="circle")
    colour = alt.Color("reading:N", scale=alt.Scale(domain=kinds), legend=shown)
    tips = ["reading:N", "setting:N", alt.Tooltip("value:Q", format=".4~g")]
    layers = [
        base.mark_line(strokeWidth=2).encode(color=colour),
        base.mark_point(size=70, filled=True, opacity=1).encode(color=colour, tooltip=tips),
    ]
    for index, kind in enumerate(kinds):
        words = base.transform_filter(alt.FieldEqualPredicate(field="reading", equal=kind))
        words = words.encode(text=alt.Text("value:Q", format=".3f"))
        place = 16 if index else -14
        layers.append(words.mark_text(style="halo", dy=place))
        layers.append(words.mark_text(dy=place, fontSize=11).encode(color=colour))
    return finish(layers, width, height)


def averaged_loss_sheet(tables: Tables, runs: Sequence[StudyRun]) -> alt.VConcatChart:
    """Return the figure "smooth averaged loss over disagreeing workers", 1,200 pixels wide."""
    domain = loss_domain(runs)
    rows: list[alt.Chart | alt.HConcatChart] = [
        dashboard(tables, runs, width=1090).properties(
            title=_title("What a dashboard shows", "the loss averaged over the workers, all runs")
        )
    ]
    for reading in readings(runs):
        panels = [
            worker_panel(tables, run, domain, width=339).properties(
                title=_title(run.label, SETTING_WORDS.get(run.setting, ""))
            )
            for run in _of(runs, reading)
        ]
        rows.append(alt.hconcat(*panels, title=_title(*_reading_title(reading))))
    return _sheet(
        rows,
        "A smooth average over workers that disagree",
        "Thin lines: the local loss of each worker. Thick line: their average. Nats per token.",
    )


def heatmap_sheet(tables: Tables, runs: Sequence[StudyRun]) -> alt.VConcatChart:
    """Return the mean cosines of all pairs of workers, one heatmap per run."""
    rows = []
    for reading in readings(runs):
        panels = [
            alt.LayerChart.from_dict(
                heatmap(tables, run.num_workers, [], run.cosines, size=300)
            ).properties(title=_title(run.label, SETTING_WORDS.get(run.setting, "")))
            for run in _of(runs, reading)
            if run.cosines
        ]
        rows.append(alt.hconcat(*panels, title=_title(*_reading_title(reading))))
    return _sheet(
        rows,
        "Do the workers' gradients point the same way?",
        "Cosine between the local gradients of each pair of workers, before the reduction, "
        "mean over the run.",
    )


def metrics_sheet(tables: Tables, runs: Sequence[StudyRun]) -> alt.HConcatChart:
    """Return the mean of the three metrics by setting and reading."""
    panels = [
        progression(tables, runs, name, width=310, height=280).properties(title=_title(words, unit))
        for name, words, unit in METRICS
    ]
    return alt.hconcat(*panels, spacing=62, bounds="flush").properties(
        title=_heading(
            "The three metrics by setting and by how the data is read",
            "Mean over the run. Workers with shards of their own see different samples whatever "
            "the seeds; replicated workers with equal seeds see equal batches.",
        )
    )


def _reading_title(reading: str) -> tuple[str, str]:
    name, _, words = READING_WORDS.get(reading, reading).partition(": ")
    return name, words


def _of(runs: Sequence[StudyRun], reading: str) -> list[StudyRun]:
    return [run for run in runs if run.reading == reading]


def _title(text: str, subtitle: str = "") -> alt.TitleParams:
    return alt.TitleParams(text=text, subtitle=subtitle) if subtitle else alt.TitleParams(text=text)


def _heading(text: str, subtitle: str) -> alt.TitleParams:
    return alt.TitleParams(
        text=text, subtitle=subtitle, fontSize=21, subtitleFontSize=14, offset=18, anchor="start"
    )


def _sheet(
    rows: Sequence[alt.Chart | alt.HConcatChart], text: str, subtitle: str
) -> alt.VConcatChart:
    return alt.VConcatChart(vconcat=list(rows), spacing=30, title=_heading(text, subtitle))
