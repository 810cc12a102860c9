"""A study's directory read and put into words, for the page and the terminal alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.bus.finding import Severity
from rankscope.bus.numbers import UNKNOWN, missing, number, whole
from rankscope.bus.words import count, listed
from rankscope.errors import RunError
from rankscope.files import is_directory, is_file, parse, read_file, unreadable
from rankscope.record import Run
from rankscope.verdict.verdicts import TOO_EARLY
from rankscope.verdict.words import LOOKS, writable

_ORDER = ("sharded", "replicated")
SETTING_WORDS = {
    "s1-1": "every rank has the same seed",
    "s1-2": "rank 0 has its own seed",
    "s1-3": "every rank has its own seed",
}
MEANS = "Loss std, norm std and cosine are means over the steps of a run."  # of the table
RATIO = "The ratio to sampling is one of root mean squares over the steps."
"""What the column of that name holds, where it is shown."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of a study, with its values in ``summary.json``."""

    values: dict[str, Any]

    def number(self, name: str) -> float | None:
        """Return a value of the entry, None if it is undefined."""
        value = self.values.get(name)
        return None if missing(value) or not isinstance(value, int | float) else float(value)

    def text(self, name: str) -> str:
        """Return a text of the entry, empty if it has none."""
        value = self.values.get(name)
        return "" if value is None else str(value)

    @property
    def setting(self) -> str:
        """Such as ``s1-1``."""
        return self.text("setting")

    @property
    def reading(self) -> str:
        """``sharded`` or ``replicated``."""
        return self.text("reading")

    @property
    def severity(self) -> str:
        """``healthy``, ``early``, ``note``, ``warning`` or ``error``."""
        known = {str(severity) for severity in Severity}
        if self.text("severity") in known:
            return self.text("severity")
        return "early" if self.text("headline").startswith(TOO_EARLY) else "healthy"

    @property
    def name(self) -> str:
        """Setting and reading as they are shown: ``S1-1, sharded``."""
        return f"{self.setting.upper()}, {self.reading}"

    @property
    def statements(self) -> list[str]:
        """The sentences of the assessment."""
        listed = self.values.get("statements")
        return [str(item) for item in listed] if isinstance(listed, list) else []

    @property
    def batch(self) -> float | None:
        """Samples in the global batch."""
        drawn = self.number("samples_drawn")
        steps = self.number("steps")
        return None if drawn is None or not steps else drawn / steps

    @property
    def distinct_share(self) -> float | None:
        """Different samples over drawn ones, between 0 and 1."""
        distinct = self.number("distinct_samples")
        drawn = self.number("samples_drawn")
        return None if distinct is None or not drawn else distinct / drawn


@dataclass(frozen=True, slots=True)
class Study:
    """A study's directory, its ``study.json``, and its summary's entries in order."""

    path: Path
    info: dict[str, Any]
    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        """The study's name: its directory's, if it was not given one."""
        return writable(str(self.info.get("name") or self.path.resolve().name))

    @property
    def settings(self) -> str:
        """The settings in a sentence."""
        names = dict.fromkeys(entry.setting for entry in self.entries)
        known = [
            f"{name.upper()}: {SETTING_WORDS[name]}" for name in names if name in SETTING_WORDS
        ]
        return f"{'; '.join(known)}." if known else ""

    @property
    def caption(self) -> str:
        """Workers, steps, batch, model and data in one line."""
        first = self.entries[0]
        parts = [
            _amount(first, "num_workers", "worker"),
            _amount(first, "steps", "step"),
            f"batch {number(first.values['batch_size'])} each"
            if first.number("batch_size")
            else "",
            first.text("model"),
            first.text("data"),
        ]
        return " · ".join(part for part in parts if part)

    def pairs(self) -> Iterator[tuple[Entry, Run | None]]:
        """Yield each entry with its run, None where the run's directory is not there."""
        for entry in self.entries:
            path = self.path / entry.text("run")
            yield entry, Run.open(path) if entry.text("run") and is_directory(path) else None


def is_study(path: Path) -> bool:
    """Return whether a directory looks like a study: it holds a ``summary.json``."""
    return is_file(path / "summary.json")


def open_study(path: Path | str) -> Study:
    """Read a study's directory; RunError if it has no usable ``summary.json``."""
    path = Path(path)
    if not is_study(path):
        raise RunError(f"{path} is not a study: it has no summary.json; check the path")
    listed = _read_json(path / "summary.json")
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise RunError(f"{path / 'summary.json'} should be a list of runs: run the study again")
    if not listed:
        raise RunError(f"{path / 'summary.json'} lists no run: run the study again")
    info = _read_json(path / "study.json") if is_file(path / "study.json") else {}
    rank = {reading: place for place, reading in enumerate(_ORDER)}
    entries = sorted(
        (Entry(item) for item in listed),
        key=lambda e: (rank.get(e.reading, len(_ORDER)), e.reading, e.setting),
    )
    return Study(path, info if isinstance(info, dict) else {}, tuple(entries))


def _read_json(path: Path) -> Any:
    try:
        return parse(read_file(path))
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise RunError(f"{path} cannot be read as JSON ({error}): run the study again") from error


def _amount(entry: Entry, name: str, noun: str) -> str:
    value = entry.number(name)
    return "" if value is None else count(int(value), noun)


def headline_of(entries: Sequence[Entry]) -> tuple[str, str]:
    """Return the worst severity of a study, and its headline in one sentence."""
    order = ["healthy", "early", *(str(severity) for severity in Severity)]
    worst = max((entry.severity for entry in entries), key=order.index)
    bad = [entry for entry in entries if order.index(entry.severity) >= order.index("warning")]
    if not bad:
        short = sum(entry.severity == "early" for entry in entries)
        if short:
            of = count(len(entries), "configuration")
            has = "has" if short == 1 else "have"
            return worst, f"No fault found; {short} of {of} {has} too few steps to be judged."
        if len(entries) == 1:
            return worst, "The one configuration of this study passes."
        return worst, f"All {len(entries)} configurations of this study pass."
    total = count(len(entries), "configuration")
    verb = "needs" if len(bad) == 1 else "need"
    return worst, f"{len(bad)} of {total} {verb} attention."


def cells_of(entry: Entry) -> dict[str, str]:
    """Return the cells of a configuration's row in a table, by the heading of the column."""
    first = entry.number("loss_first")
    last = entry.number("loss_last")
    batch = f" of {whole(entry.batch)}" if entry.batch else ""
    drawn = entry.number("samples_drawn")
    return {
        "Setting": entry.name,
        "Verdict": f"{LOOKS[entry.severity].sign} {entry.severity}",
        "Loss std": number(entry.number("loss_std")),
        "× sampling": number(entry.number("dispersion_ratio"), 2),
        "Norm std": number(entry.number("grad_norm_std")),
        "Cosine": number(entry.number("cosine_mean")),
        "Different samples": f"{whole(entry.number('distinct_samples'))} of {whole(drawn)}"
        if drawn
        else UNKNOWN,
        "Different per step": f"{number(entry.number('effective_batch'), 1)}{batch}",
        "Averaged loss": f"{number(first, 2)} → {number(last, 2)}",
    }


def alike(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Group the entries that have the same assessment, so that it is shown once."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        assessment = (entry.severity, entry.text("headline"), entry.text("recommendation"))
        groups.setdefault(assessment, []).append(entry)
    return list(groups.values())


def why_heading(entries: Sequence[Entry]) -> str:
    """Return the heading of these words, which depends on the readings that the study has."""
    both = {"sharded", "replicated"} <= {entry.reading for entry in entries}
    return "Why the two readings differ" if both else "What the settings change"


def why_they_differ(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """Return why the two readings of the experiment differ: pairs of a heading and a paragraph.

    The settings differ in seeds only. The effect of a seed depends on how the data is read, which
    is explained for the readings that the study has.
    """
    sharded = _numbers_of(entries, "sharded")
    replicated = _numbers_of(entries, "replicated")
    paragraphs = []
    if sharded:
        paragraphs.append(("Sharded", f"{_SHARDED} {sharded}"))
    if replicated:
        paragraphs.append(("Replicated", f"{_REPLICATED} {replicated}"))
    if replicated and sharded:
        paragraphs.append(("What follows", _BOTH))
    return paragraphs


_SHARDED = (
    "A distributed sampler shuffles once and deals the samples out. Workers see different samples "
    "even when all seeds are equal, and disagree as much as different samples do. When seeds "
    "differ, each worker takes its part of another shuffle: some samples are drawn more than once "
    "and others never, and no loss, norm or cosine shows it."
)
_REPLICATED = (
    "Every worker shuffles the whole data set with its own seed. Equal seeds give equal batches, "
    "so the workers compute the same gradient several times, and its average is that gradient "
    "again. Each seed that differs adds a worker that differs."
)
_BOTH = (
    "The settings differ in nothing but seeds, and what a seed changes depends on how the data is "
    "read. Low dispersion with a cosine near 1 is no sign of health but of copied work; high "
    "dispersion is no sign of a fault until it exceeds what sampling alone gives. Which samples "
    "were drawn settles what the three metrics leave open."
)


def _numbers_of(entries: Sequence[Entry], reading: str) -> str:
    """Return cosines and different samples by setting in one sentence, empty without entries."""
    members = [entry for entry in entries if entry.reading == reading]
    if not members:
        return ""
    named = [(entry, entry.setting.upper()) for entry in members]
    cosines = listed([f"{number(e.number('cosine_mean'))} under {name}" for e, name in named])
    samples = [
        f"{number(int(entry.number('distinct_samples') or 0))} under {name}"
        for entry, name in named
        if entry.distinct_share is not None
    ]
    drawn = {int(entry.number("samples_drawn") or 0) for entry in members}
    sentence = f"Here the mean cosine is {cosines}."
    if samples:
        of_drawn = f" of {number(drawn.pop())} drawn" if len(drawn) == 1 else ""
        sentence += f" Different samples{of_drawn}: {listed(samples)}."
    return sentence
