"""Numbers, titles and records in words, for page and terminal, without extra packages."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import pyarrow as pa

from rankscope.bus.detector import RULES
from rankscope.bus.evidence import Table
from rankscope.bus.finding import Finding
from rankscope.bus.numbers import UNKNOWN, missing, number
from rankscope.bus.words import all_workers, count, name_ranks, ranks_of_job
from rankscope.evidence import columns_of
from rankscope.record import Run
from rankscope.verdict.assessment import Assessment, assess
from rankscope.verdict.dispersion import dispersion_figures, short, short_pair
from rankscope.verdict.rules import explanations, next_check_of, ranked, section_of


class Look(NamedTuple):
    """How a severity is shown."""

    sign: str
    colour: str  # in a terminal
    page_colour: str  # in a notebook


LOOKS = {
    "healthy": Look("●", "green", "#2e7d32"),
    "early": Look("◌", "cyan", "#00838f"),
    "note": Look("○", "blue", "#1565c0"),
    "warning": Look("▲", "yellow", "#b26a00"),
    "error": Look("◆", "red", "#c62828"),
}
Values = Mapping[str, Any]

TOKENS = "nats per token"

METRICS = ("loss_std", "grad_norm_std", "cosine_mean")  # columns of the three metrics

TITLES: dict[str, tuple[str, str]] = {
    "timeline": ("Findings over the steps", ""),
    "loss": ("Averaged loss over the range of the workers", TOKENS),
    "loss_std": ("Loss dispersion", f"std over workers, {TOKENS}"),
    "grad_norm_std": ("Gradient-norm dispersion", "std over workers"),
    "cosine_mean": ("Gradient-direction consistency", "mean cosine over pairs"),
    "map-loss": ("Local loss", TOKENS),
    "map-grad_norm": ("Gradient norm", "L2, before the reduction"),
    "map-cosine_rest": ("Direction", "cosine with the sum of all others"),
    "map-rollout_gap": ("Gap to the rollouts", "nats, mean over tokens"),
    "map-step_seconds": ("Step time", "seconds since the step before"),
    "workers-loss": ("Local loss", TOKENS),
    "workers-grad_norm": ("Gradient norm", "L2, before the reduction"),
    "workers-cosine_rest": ("Direction", "cosine with the sum of all others"),
    "workers-rollout_gap": ("Gap to the rollouts", "nats, mean over tokens"),
    "apart-loss": ("Loss, apart from the mean", TOKENS),
    "apart-grad_norm": ("Norm, apart from the mean", ""),
    "apart-cosine_rest": ("Direction, apart from the mean", "cosine"),
    "apart-rollout_gap": ("Gap, apart from the mean", "nats"),
    "group-norm": ("Gradient norm of each group", ""),
    "group-cosine": ("Direction of each group", ""),
    "heatmap": ("Cosine of each pair of workers", "mean over the run"),
    "coverage": ("Different samples so far", ""),
    "residual": ("Reduction residual", "relative, logarithmic"),
    "time": ("Time per step", "ms, slowest worker, logarithmic"),
    "interval": ("Steps between measurements", "chosen to stay in the budget"),
}
TITLES |= {f"compare-{name}": TITLES[name] for name in ("loss", *METRICS)}
"""Title and unit by the figure's name."""

_TITLES_WITHOUT_TOKENS = {
    name: (title, unit.replace(TOKENS, "").removesuffix(", "))
    for name, (title, unit) in TITLES.items()
}


def titles_of(values: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
    """Return titles and units of a run's figures, given the values of its assessment."""
    return TITLES if values.get("loss_per_token") else _TITLES_WITHOUT_TOKENS


def writable(text: str) -> str:
    """Return a text for output: characters of a name that are no UTF-8 become question marks."""
    return text.encode(errors="replace").decode()


def ranks_in_words(ranks: Sequence[int], num_workers: int) -> str:
    """Return ranks as words: ``rank 3``, ``ranks 0 and 2–5``, ``all 8 workers``, ``the job``."""
    if not ranks:
        return "the job"
    if len(set(ranks)) == num_workers > 1:
        return all_workers(num_workers)
    return name_ranks(ranks)


def steps_in_words(finding: Finding) -> str:
    """Return the steps of a finding: ``step 4`` or ``steps 4 to 119``, and whether it is over."""
    over = ", over since" if finding.status == "closed" else ""
    if finding.first_step == finding.last_step:
        return f"step {finding.first_step:,}{over}"
    return f"steps {finding.first_step:,} to {finding.last_step:,}{over}"


def ratio_in_words(values: Values) -> str:
    """Return the loss dispersion against its null: ``1.02 × what sampling explains``."""
    figures = dispersion_figures(values)
    if figures is None:
        return "no reference: sampling's part is unknown"
    _, ratio, expected = figures
    return f"{ratio} × the {expected} that sampling explains"


def coverage_in_words(values: Values) -> str:
    """Return the number of samples drawn, and how often each."""
    distinct: Any = values.get("distinct_samples")
    drawn: Any = values.get("samples_drawn")
    if missing(distinct) or missing(drawn) or not drawn:
        return "samples were not identified"
    about = "" if values.get("samples_exact", True) else "about "
    return f"of {number(int(drawn))} drawn, {about}{drawn / distinct:.1f} times each"


def tiles(values: Values) -> list[dict[str, str]]:
    """Return the key numbers of a run: label, value, note, and the share of a full bar if any."""
    unit = TOKENS if values.get("loss_per_token") else "mean over the workers"
    ends = values.get("loss_ends", 5)
    batch: Any = values.get("effective_batch")
    batch_note = "" if missing(batch) else f"{float(batch):.1f} different per step"
    cells = (
        ("Averaged loss", _first_and_last(values), f"{unit}; first and last {ends} steps"),
        (
            "Loss dispersion",
            _short(values.get("loss_std")),
            f"mean over steps; {ratio_in_words(values)}",
        ),
        (
            "Gradient-norm dispersion",
            _short(values.get("grad_norm_std")),
            "std over workers, mean over steps",
        ),
        (
            "Mean cosine",
            number(values.get("cosine_mean")),
            f"over pairs and steps; norm-weighted {number(values.get('cosine_weighted'))}",
        ),
        (
            "Different samples",
            number(values.get("distinct_samples")),
            "; ".join(part for part in (coverage_in_words(values), batch_note) if part),
        ),
    )
    return [{"label": label, "value": value, "note": note} for label, value, note in cells]


def _first_and_last(values: Values) -> str:
    first = values.get("loss_first")
    last = values.get("loss_last")
    if missing(first) or missing(last):
        return f"{_short(first)} → {_short(last)}"
    return " → ".join(short_pair(float(first), float(last)))  # type: ignore[arg-type]


def _short(value: Any) -> str:
    """Return a number as the statements print it, or a dash if undefined."""
    return UNKNOWN if missing(value) else short(value)


def anchors(findings: Sequence[Finding], key: str = "") -> list[str]:
    """Return unique ids for the articles of a run's findings on a page; ``key`` begins them."""
    ids: list[str] = []
    for finding in findings:
        name = f"{key}finding-{re.sub('[^a-z0-9]+', '-', finding.id.lower()).strip('-')}"
        ids.append(name if name not in ids else f"{name}-{len(ids)}")
    return ids


def finding_view(
    finding: Finding,
    num_workers: int,
    cause: Finding | None = None,
    *,
    known: Iterable[Finding] = (),
    anchor: str = "",
) -> dict[str, Any]:
    """Return the view of a finding for the page; one of the ``known`` may settle its question."""
    return {
        "anchor": anchor,
        "first_step": finding.first_step,
        "last_step": finding.last_step,
        "severity": str(finding.severity),
        "title": title_of_finding(finding),
        "cause": finding.cause,
        "named": finding.ranks,
        "ranks": ranks_in_words(finding.ranks, num_workers),
        "steps": steps_in_words(finding),
        "explanation": finding.explanation,
        "next_check": next_check_of(finding, known) if cause is None else consequence_of(cause),
        "groups": ", ".join(finding.groups),
        "about": section_of(finding.id, finding.cause),
        "evidence": [
            (_spaced(name), ", ".join(value) if _are_names(value) else _shown(value))
            for name, value in finding.evidence.items()
            if not _records(value)
        ],
        "evidence_tables": [
            (_spaced(name), _table_of(_records(value)))
            for name, value in finding.evidence.items()
            if _records(value)
        ],
    }


def _are_names(value: Any) -> TypeGuard[list[str]]:
    """Return whether evidence is a list of names: it is shown whole, a headline only counts it."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _records(value: Any) -> list[Mapping[str, Any]]:
    """Return evidence that is a list of objects, or such lists by rank; empty for any other."""
    if isinstance(value, Mapping):
        parts = [(rank, _records(rows)) for rank, rows in value.items()]
        whole = all(rows for _, rows in parts)
        return [{"rank": rank, **row} for rank, rows in parts for row in rows] if whole else []
    if not isinstance(value, list) or not all(isinstance(row, Mapping) for row in value):
        return []
    return value


def _table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the header of a table, and its first dozen rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    shown = [[_shown(row.get(name)) for name in names] for row in rows[:12]]
    return [_spaced(name) for name in names], shown


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def consequence_of(cause: Finding) -> str:
    """Return the advice for a finding that another one explains."""
    return f"First the finding '{title_of_finding(cause)}': this one follows from it."


def title_of_finding(finding: Finding) -> str:
    """Return the title of a finding: its own rule's, or its cause's."""
    rule = RULES.get(finding.id) or RULES.get(finding.cause)
    return finding.cause if rule is None else rule.title


def title_of(info: Values, path: Path | str) -> str:
    """Return the name of a run: its own, or its directory's."""
    return writable(str(info.get("name") or Path(path).resolve().name))


def run_line(run: Run, assessment: Assessment) -> str:
    """Return a run in one line: ``8 workers · 120 steps · tiny``."""
    steps = assessment.values.get("steps")
    parts = [
        count(run.num_workers, "worker"),
        count(int(steps), "step") if steps is not None else "",
        str(run.info.get("model") or ""),
        "" if run.status == "complete" else run.status,
        f"continues {run.info['continues']}" if run.info.get("continues") else "",
    ]
    return " · ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class VerdictWords:
    """The words about a run, for terminal, Markdown and pages."""

    title: str  # the run's name
    severity: str  # ``healthy``, ``early``, ``note``, ``warning`` or ``error``
    line: str  # the run in one line
    assessment: Assessment  # headline, recommendation and statements
    tiles: Sequence[Mapping[str, str]]  # the key numbers
    findings: Sequence[Mapping[str, Any]]  # the findings, worst first, from ``finding_view``


def verdict_of(run: Run, assessment: Assessment, key: str = "") -> VerdictWords:
    """Return a run's verdict in words; ``key`` begins the ids of its findings."""
    found = ranked(run.findings())
    causes = explanations(found)
    with ranks_of_job(run.info):
        findings = [
            finding_view(one, run.num_workers, causes[one.id], known=found, anchor=anchor)
            for one, anchor in zip(found, anchors(found, key), strict=True)
        ]
    return VerdictWords(
        title=title_of(run.info, run.path),
        severity=assessment.word,
        line=run_line(run, assessment),
        assessment=assessment,
        tiles=tiles(assessment.values),
        findings=findings,
    )


def facts(info: Values, status: str, num_workers: int, num_steps: int) -> list[tuple[str, str]]:
    """Return facts about a run besides its measurements, as label and words."""
    versions = info.get("versions")
    listed = versions if isinstance(versions, dict) else {}
    rows = [
        ("Workers", f"{num_workers:,}"),
        ("Steps", f"{num_steps:,}"),
        ("Status", status),
        *((label, _shown(info.get(key))) for label, key in _FACTS),
        *((label, _time(info.get(key))) for label, key in _TIMES),
        *_tracked(info.get("tracked")),
        ("Backend", _shown(info.get("backend"))),
        ("Versions", ", ".join(f"{name} {version}" for name, version in listed.items())),
    ]
    return [(label, words) for label, words in rows if words and words != UNKNOWN]


_FACTS = (
    ("Model", "model"),
    ("Data", "data"),
    ("Setting", "setting"),
    ("Reading", "reading"),
    ("Batch size per worker", "batch_size"),
    ("Accumulation", "accumulation"),
    ("Learning rate", "lr"),
    ("Precision", "precision"),
    ("Seed", "seed"),
)
_TIMES = (("Started", "started"), ("Finished", "finished"))


def _tracked(tracked: Any) -> list[tuple[str, str]]:
    """Return the facts of the tracker's run, if the training had one open."""
    if not isinstance(tracked, dict):
        return []
    name = _shown(tracked.get("name"))
    url = _shown(tracked.get("url"))
    there = name if url == UNKNOWN else f"{name}, {url}"
    return [
        (f"Run in {_shown(tracked.get('tracker'))}", there),
        *((label, _shown(tracked.get(label.lower()))) for label in ("Group", "Tags", "Notes")),
    ]


def _time(value: Any) -> str:
    """Return a time as ``run.json`` has it without what only programs need."""
    return _shown(value).replace("T", " ", 1).replace("+00:00", " UTC")


def _shown(value: Any) -> str:
    """Return any JSON value in one short line."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        shown = ", ".join(_shown(item) for item in value[:12])
        return f"{shown}, … ({len(value)} in all)" if len(value) > 12 else shown
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(item)}" for name, item in list(value.items())[:12])
    return str(value)


_FINDINGS = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "status", "cause", "severity")),
        *((name, pa.int64()) for name in ("step", "first_step", "last_step")),
        ("ranks", pa.list_(pa.int64())),
        ("groups", pa.list_(pa.string())),
        *((name, pa.string()) for name in ("explanation", "next_check", "evidence")),
    ]
)
_CELL = '<td style="text-align:left;padding:2px 12px 2px 0">'


def load(path: str | Path) -> "LoadedRun":
    """Open a recorded run, finished or still being written.

    What it returns gives Arrow tables and the verdict. Its attribute ``run`` is a
    :class:`rankscope.Run`, for numpy arrays and for runs of any length.

    Args:
        path: Its directory, or its address in an object store, such as ``s3://bucket/runs/sft``.

    Returns:
        The run: ``load(path).workers.to_pandas()`` has a row for each step and worker.

    Raises:
        RunError: There is no such directory, it is not a run, its ``run.json`` is damaged, a
            newer rankscope wrote it, or the object store cannot be read.
    """
    return LoadedRun(Run.open(path))


class LoadedRun:
    """A run's tables as Arrow tables, which pandas and Polars take as they are.

    Every attribute reads the files as they are then. A notebook shows the verdict.

    Args:
        run: The run.

    Attributes:
        run: The same run for numpy arrays, see :class:`rankscope.Run`.
        path: Its directory.
        info: The content of ``run.json``: versions, options, configuration.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.path = run.path
        self.info = run.info

    @property
    def steps(self) -> pa.Table:
        """A row for each step."""
        return self.run.table(Table.STEPS)

    @property
    def workers(self) -> pa.Table:
        """A row for each step and worker.

        A column that is a sum of flags, such as ``rng_used``, has one with their names beside it,
        such as ``rng_used_in_words``.
        """
        rows = self.run.table(Table.WORKERS)
        for column in (column for column in columns_of(Table.WORKERS) if column.bits):
            values = rows[column.name].to_pylist()
            names = [None if value is None else column.bit_names(value) for value in values]
            place = rows.column_names.index(column.name) + 1
            rows = rows.add_column(
                place, "_".join((column.name, "in_words")), pa.array(names, pa.string())
            )
        return rows

    @property
    def micro(self) -> pa.Table:
        """A row for each micro-batch of steps with accumulation."""
        return self.run.table(Table.MICRO)

    @property
    def groups(self) -> pa.Table:
        """A row for each measured step, worker and group of parameters."""
        return self.run.table(Table.GROUPS)

    @property
    def samples(self) -> pa.Table:
        """The samples of each worker's batch, where they are known."""
        return self.run.table(Table.SAMPLES)

    @property
    def pairs(self) -> pa.Table:
        """Cosines of all pairs of workers, for up to 64 workers."""
        return self.run.table(Table.PAIRS)

    @property
    def traces(self) -> pa.Table:
        """Digests and sketches of the tensors of rank 0, where the run was traced."""
        return self.run.table(Table.TRACES)

    @property
    def digests(self) -> pa.Table:
        """Differences between workers whose state should be equal."""
        return self.run.table(Table.DIGESTS)

    @property
    def findings(self) -> pa.Table:
        """A row for each finding in its last state; ``evidence`` is a JSON object."""
        events = [finding.to_json() for finding in self.run.findings()]
        rows = [{**event, "evidence": json.dumps(event["evidence"])} for event in events]
        return pa.Table.from_pylist(rows, schema=_FINDINGS)

    def assess(self) -> Assessment:
        """Return the verdict: headline, what to do, statements and the numbers behind them.

        Raises:
            RunError: A file of the run cannot be read.
        """
        return assess(self.run)

    def __repr__(self) -> str:
        verdict = self._verdict()
        found = verdict.assessment
        steps = count(self.run.num_rows(Table.STEPS), "step")
        return f"<rankscope run {verdict.title}, {found.word}, {steps}: {found.headline}>"

    def _repr_html_(self) -> str:
        verdict = self._verdict()
        assessment = verdict.assessment
        look = LOOKS[verdict.severity]
        rows = "".join(map(_row, verdict.findings))
        return (
            f'<div style="border-left:4px solid {look.page_colour};padding:4px 14px;'
            'max-width:60em">'
            f'<b style="color:{look.page_colour}">{look.sign} {verdict.severity}</b> '
            f"{escape(verdict.title)} · {escape(verdict.line)}<br>"
            f"<b>{escape(assessment.headline)}</b><br>"
            f"What to do: {escape(assessment.recommendation)}"
            f"<table>{rows}</table></div>"
        )

    def _verdict(self) -> VerdictWords:
        return verdict_of(self.run, self.assess())


def _row(finding: Mapping[str, Any]) -> str:
    cells = (finding["severity"], finding["title"], finding["ranks"], finding["steps"])
    return f"<tr>{''.join(f'{_CELL}{escape(cell)}</td>' for cell in cells)}</tr>"
