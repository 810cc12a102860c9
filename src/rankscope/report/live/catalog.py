"""The runs of a directory, the state of their files, and a summary of each.

Pages name a run by an id made from its path below the served directory. An id is looked up among
the runs that were found, never turned into a path; links are not followed, and a run whose files
lead out of the served directory is not read. So nothing outside of it can be reached.
"""

import contextlib
import hashlib
import heapq
import itertools
import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rankscope.bus.evidence import Table
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.words import ranks_of_job
from rankscope.errors import RunError
from rankscope.files import unreadable as unreadable_file
from rankscope.record import Run
from rankscope.record.begin import writer_is_gone
from rankscope.record.states import START_FILE
from rankscope.record.tables import step_range
from rankscope.stats.arrays import Floats, Ints
from rankscope.verdict.assessment import progress_of, siblings_of, worst_of
from rankscope.verdict.coverage import COLUMNS, checks_of, coverage_of, missing_steps
from rankscope.verdict.rules import ranked
from rankscope.verdict.verdicts import without_parts, without_steps
from rankscope.verdict.words import title_of, title_of_finding

MAX_DEPTH = 6  # levels below the served directory at which runs are looked for
MAX_DIRECTORIES = 20_000  # directories that one look lists at most
SPARK_POINTS = 48  # points of the small curve of the averaged loss
MIN_PATIENCE = 60.0  # seconds without a new step after which a run may be called stalled
START_PATIENCE = 600.0  # the same before the first step, which includes reading data and compiling
_STEPS_OF_PATIENCE = 8
_FLUSH_SECONDS = 10.0
_RECENT = 50

MOST_SETTINGS = 40  # settings that the list of runs offers as columns
_MOST_READ = 400
_LONGEST = 40
_LONGEST_NAME = 80  # of a setting, with those around it

UNREADABLE = "unreadable"
ORDER = ("error", "warning", UNREADABLE, "note", "early", "healthy")  # severities, worst first

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_UNPLAIN = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class ListedPlace:
    """The place of a run.

    ``id`` is its name in addresses: letters, digits and ``. _ - ~ /`` only; ``name``, for people,
    is the path below the served directory.
    """

    id: str
    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class Stamp:
    """The state of a run's files, found without reading them.

    ``token`` differs when a file has changed, come or gone; ``changed`` is the time of the youngest
    file, in seconds since 1970.
    """

    token: str
    changed: float


class FoundRuns(NamedTuple):
    """The runs of a directory by id, upper levels first; ``cut``: it has too many directories."""

    places: dict[str, ListedPlace]
    cut: bool


def places(root: Path) -> FoundRuns:
    """Return the runs in a directory; the directory itself may be one.

    Every directory shares its weight evenly among those in it, and the heaviest are looked into
    first. So where there are more than ``MAX_DIRECTORIES``, the ones left out are those that lie
    among many: 20,000 folders of a data set hide no run beside them.

    """
    if Run.is_run(root):
        name = root.name or "run"
        return FoundRuns({id_of(name): ListedPlace(id_of(name), root, name)}, cut=False)
    runs: list[ListedPlace] = []
    waiting = [(1, 0, "", root)]  # one over the weight, the level, the name below root, the path
    for _ in range(MAX_DIRECTORIES):
        if not waiting:
            break
        crowd, level, name, path = heapq.heappop(waiting)
        below = []
        for child in _directories(path):
            inside = f"{name}/{child.name}" if name else child.name
            if Run.is_run(child.path):
                runs.append(ListedPlace(id_of(inside), Path(child.path), inside))
            elif level + 1 < MAX_DEPTH:
                below.append((inside, Path(child.path)))
        for inside, child_path in below:
            heapq.heappush(waiting, (crowd * len(below), level + 1, inside, child_path))
    runs.sort(key=lambda place: (place.name.count("/"), place.name))
    return FoundRuns({place.id: place for place in runs}, cut=bool(waiting))


def id_of(name: str) -> str:
    """Return the id of a run: its relative path where that is plain, else a like one and a digest.

    >>> id_of("sft/first"), id_of("<b>")
    ('sft/first', 'b~e54bd95e')
    """
    parts = name.split("/")
    if all(_PLAIN.fullmatch(part) for part in parts):
        return name
    digest = hashlib.blake2b(os.fsencode(name), digest_size=4).hexdigest()
    like = "/".join(_UNPLAIN.sub("-", part).strip("-") or "run" for part in parts)
    return f"{like}~{digest}"


def stamp(place: ListedPlace, root: Path) -> Stamp | None:
    """Return the state of a run's files, None if gone; RunError if one leads out of the root."""
    lines = []
    changed = 0.0
    try:
        for entry in _files(place.path, root):
            try:
                known = entry.stat()
            except FileNotFoundError:
                continue  # replaced just now: the next look sees it
            times = f"{known.st_mtime_ns}\0{known.st_ctime_ns}"  # the second: its permissions, too
            lines.append(f"{entry.path}\0{known.st_size}\0{times}\0{known.st_ino}")
            changed = max(changed, known.st_mtime)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable_file(place.path, error) from error
    if not any(line.startswith(f"{place.path / 'run.json'}\0") for line in lines):
        return None
    if writer_is_gone(place.path):
        lines.append("its writer is gone")
    text = "\n".join(sorted(lines)).encode(errors="surrogateescape")
    return Stamp(hashlib.blake2b(text, digest_size=9).hexdigest(), changed)


def _files(path: Path, root: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the files of a run's page; RunError if one is a link out of the served directory."""
    with os.scandir(path) as entries:
        listed = list(entries)
    for entry in listed:
        if entry.name in ("run.json", "findings.jsonl", START_FILE):
            _stay_inside(entry, root)
            yield entry
        elif not entry.name.startswith(".") and _is_directory(entry, links=True):
            yield from _parts(entry, root, levels=int(entry.name == "rollups"))


def _parts(folder: os.DirEntry[str], root: Path, *, levels: int) -> Iterator[os.DirEntry[str]]:
    """Yield the Parquet files of a table, or of the tables in a directory: roll-ups lie deeper."""
    _stay_inside(folder, root)
    for entry in _entries(folder.path):
        if entry.name.startswith("."):
            continue
        if entry.name.endswith(".parquet"):
            _stay_inside(entry, root)
            yield entry
        elif levels and _is_directory(entry, links=True):
            yield from _parts(entry, root, levels=levels - 1)


def _stay_inside(entry: os.DirEntry[str], root: Path) -> None:
    if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root):
        raise RunError(
            f"{entry.name} of this run is a link that leads out of the served directory, and is "
            "not read: copy what it links to into the run, or serve a directory that holds both"
        )


def _directories(path: Path) -> list[os.DirEntry[str]]:
    found = [
        entry
        for entry in _entries(path)
        if not entry.name.startswith(".") and _is_directory(entry, links=False)
    ]
    return sorted(found, key=lambda entry: entry.name)


def _entries(path: Path | str) -> list[os.DirEntry[str]]:
    """Return the content of a directory; nothing if it cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def _is_directory(entry: os.DirEntry[str], *, links: bool) -> bool:
    try:
        return entry.is_dir(follow_symlinks=links)
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Glance:
    """The summary of a run in the list of runs; times are in seconds since 1970.

    ``severity`` is one of ``ORDER``; ``headline`` names the problem (empty without any),
    ``since_step`` and ``since`` are the first step that shows the worst finding, and when it was;
    ``ended`` is ``running``, or how the run ended; ``changed`` is when the youngest file was
    written; after ``patience`` seconds without a change it counts as stalled. ``spark`` are points
    of the averaged loss between 0 (bottom) and 1, None where it is undefined. ``settings`` are text
    by name: host, seed, learning rate, the values of its configuration.
    """

    place: ListedPlace
    title: str
    severity: str
    headline: str
    since_step: int | None
    since: float | None
    ended: str
    num_workers: int
    num_steps: int
    last_step: int | None
    last_time: float | None
    changed: float
    patience: float
    spark: tuple[float | None, ...]
    last_loss: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    def state(self, now: float) -> str:
        """Return ``running``, ``starting``, ``stalled``, or how the run ended."""
        if self.severity == UNREADABLE:
            return UNREADABLE
        if self.ended != "running":
            return self.ended
        if now - self.changed > self.patience:
            return "stalled"
        return "running" if self.num_steps else "starting"

    @property
    def line(self) -> str:
        """The small curve as the points of an SVG polyline in a box of 100 × 24."""
        width = max(1, len(self.spark) - 1)
        known = [(i, value) for i, value in enumerate(self.spark) if value is not None]
        return " ".join(f"{100 * i / width:.1f},{22 - 20 * value:.1f}" for i, value in known)


def unreadable(place: ListedPlace, why: str, changed: float = 0.0) -> Glance:
    """Return the row of a run that cannot be read."""
    return Glance(
        place, place.name, UNREADABLE, why, None, None, "", 0, 0, None, None, changed, 0.0, ()
    )


def in_order(glances: list[Glance]) -> list[Glance]:
    """Return the rows with the worst first, among equals the youngest."""
    return sorted(glances, key=lambda g: (ORDER.index(g.severity), -g.changed, g.place.id))


def glance(place: ListedPlace, at: Stamp) -> Glance:
    """Summarise a run; RunError if it cannot be read."""
    run = Run.open(place.path)
    columns = run.steps("time", *COLUMNS)
    coverage = coverage_of(run, columns)
    known = step_range(run.path, Table.STEPS)
    step_T = columns["step"]
    time_T = columns["time"]
    num_steps = run.num_rows(Table.STEPS)
    last_T = time_T
    if len(time_T) < num_steps:
        last_T = run.latest(Table.STEPS, "time", max_rows=_RECENT)["time"]
    findings = run.findings()
    worst = next(iter(ranked(findings)), None)  # its effects may be worse
    gravest = max((one.severity for one in findings), default=None)
    severity = "healthy"
    headline = ""
    unseen = coverage.severity if num_steps else None
    if unseen is not None and (gravest is None or gravest < unseen):
        worst = None
        severity = str(unseen)
        headline = f"{coverage.verdict[0].upper()}{coverage.verdict[1:]}"
    elif worst is not None:
        severity = str(gravest)
        headline = title_of_finding(worst)
    elif missing_steps(checks_of(run.num_workers, run.info.get("options")), num_steps):
        severity = "early"
    elsewhere = worst_of(siblings_of(run))
    fault = None if elsewhere is None else elsewhere.worst
    is_worse = fault is not None and ORDER.index(str(fault.severity)) < ORDER.index(severity)
    if elsewhere is not None and fault is not None and is_worse:
        severity = str(fault.severity)
        headline = f"Among {elsewhere.ranks} of this job: {title_of_finding(fault)}"
        worst = fault
    progress = progress_of(run)
    mild = severity in ("healthy", "early", "note")
    lost = bool(progress.lost) and progress.ended
    if mild and (lost or not num_steps):
        verdict = without_parts(progress) if lost else without_steps(progress)
        severity = str(verdict.severity)
        headline = verdict.headline.removesuffix(".")
    elif progress.cut_short and mild:
        severity = str(Severity.NOTE)
        with ranks_of_job(run.info):
            headline = progress.endings.headline.removesuffix(".") or "Ended early"
    return Glance(
        place=place,
        title=title_of(run.info, place.path),
        severity=severity,
        headline=headline,
        since_step=None if worst is None else worst.first_step,
        since=None if worst is None else _time_of(worst, step_T, time_T),
        ended=run.status,
        num_workers=run.num_workers,
        num_steps=num_steps,
        last_step=None if known is None else known[1],
        last_time=_time_at(last_T, -1) if len(last_T) else None,
        changed=at.changed,
        patience=_patience(last_T),
        spark=_spark(columns["loss_mean"]),
        last_loss=_last_known(columns["loss_mean"]),
        settings=_settings(run),
    )


def settings_that_differ(glances: Sequence[Glance]) -> list[str]:
    """Return the names of settings that are not the same in all runs, those of most runs first."""
    values: dict[str, list[str]] = {}
    for one in glances:
        for name, value in one.settings.items():
            values.setdefault(name, []).append(value)
    readable = sum(one.severity != UNREADABLE for one in glances)
    differ = [n for n, v in values.items() if len(set(v)) > 1 or len(v) < readable]
    return sorted(differ, key=lambda name: -len(values[name]))[:MOST_SETTINGS]


def _settings(run: Run) -> dict[str, str]:
    """Return the settings of a run by name."""
    info = run.info
    found: dict[str, Any] = {}
    with contextlib.suppress(KeyError, TypeError, IndexError, AttributeError):
        found["host"] = ", ".join(dict.fromkeys(str(r["host"]) for r in info["ranks"]))
        found["seed"] = info["ranks"][0].get("seed")
    with contextlib.suppress(KeyError, TypeError, IndexError, AttributeError):
        optimizer = info["training"]["optimizer"]
        found["optimizer"] = str(optimizer["class"]).rpartition(".")[2]
        found["learning rate"] = optimizer["groups"][0]["lr"]
    with contextlib.suppress(RunError):  # its page shows the damage
        drawn = run.latest(Table.WORKERS, "num_samples", max_rows=max(1, run.num_workers))
        known = [number for number in drawn["num_samples"].tolist() if number >= 0]
        found["samples per step"] = sum(known) if known else None
    _flatten(info.get("config"), "", found)
    return {name: _text(value) for name, value in found.items() if value is not None}


def _flatten(value: Any, name: str, found: dict[str, Any]) -> None:
    """Collect the numbers, words and switches in a configuration by their paths.

    Settings of people have short paths; the others would make columns that nobody can read.
    """
    if len(name) > _LONGEST_NAME:
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}" if name else str(key), found)
    elif isinstance(value, str | int | float) and len(found) < _MOST_READ and name:
        found.setdefault(name, value)


def _text(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _last_known(values_T: Floats) -> float | None:
    known_T = values_T[np.isfinite(values_T)]
    return float(known_T[-1]) if len(known_T) else None


def _time_of(finding: Finding, step_T: Ints, time_T: Floats) -> float | None:
    at = int(np.searchsorted(step_T, finding.first_step))
    return _time_at(time_T, at) if at < len(time_T) else None


def _time_at(time_T: Floats, at: int) -> float | None:
    time = float(time_T[at])
    return time if math.isfinite(time) else None


def _patience(time_T: Floats) -> float:
    """Return the longest pause that is usual for this run, in seconds."""
    if not len(time_T):
        return START_PATIENCE
    recent = [b - a for a, b in itertools.pairwise(time_T[-_RECENT:].tolist()) if b > a]
    usual = statistics.median(recent) if recent else 0.0
    return max(MIN_PATIENCE, _STEPS_OF_PATIENCE * usual + _FLUSH_SECONDS)


def _spark(loss_T: Floats) -> tuple[float | None, ...]:
    if not np.isfinite(loss_T).any():
        return ()
    bins = [part[np.isfinite(part)] for part in np.array_split(loss_T, SPARK_POINTS) if len(part)]
    means = [float(part.mean()) if len(part) else None for part in bins]
    known = [value for value in means if value is not None]
    low = min(known)
    room = max(known) - min(known)
    return tuple(None if v is None else round((v - low) / room if room else 0.5, 3) for v in means)
