"""What ``make gpu`` measures, part by part, and its section of ``docs/performance.md``.

A row is named here before it is measured, so that the page says what is still missing. This module
needs nothing but Python's own library.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Results = dict[str, list[Row]]

HEADING = "## On an accelerator"
NOT_MEASURED = "not measured"
PREFIX = "gpu "
"""Parts of the results that are ours begin so."""
_COLUMN = re.compile(r"^\{\}: | of \{\}|, \{\}")

DTYPES = ("float32", "bfloat16", "float16")
TENSORS = {f"{count:,} tensors": count for count in (10, 100, 1000)}
DDP_WAYS = (
    "DDP, one rank",
    "DDP, 2 ranks on one device over gloo",
    "DDP, a rank on each device over NCCL",
)
FSDP2_WAYS = ("FSDP2, a rank on each device over NCCL", "FSDP2, 2 ranks on one device over gloo")
LAUNCHES = ("launches and copies, {}", "by the probe's own clock, {}", "CPU time, {}")
ANSWERS = {
    # what is trained: how, by how many ranks, and what is to be found
    "a healthy training, one rank": ("healthy", 1, "verify.agrees"),
    "a healthy training, 2 ranks over gloo": ("healthy", 2, "verify.agrees"),
    "a healthy training, FSDP2": ("sharded", 1, "verify.agrees"),
    "a loss divided by the workers, 2 ranks over gloo": ("divided", 2, "loss.scale, verify.scale"),
    "gradients lost between micro-batches, one rank": (
        "lost",
        1,
        "verify.micro_batches",
    ),
    "a sampler forgotten, 2 ranks over gloo": (
        "sampler",
        2,
        "data.duplicate_batches, rng.identical, verify.agrees",
    ),
    "one weight changed on rank 1, 2 ranks over gloo": (
        "weights",
        2,
        "state.parameters_differ, verify.agrees",
    ),
}
RATIO = "{}: step, watched / unwatched"
PLAIN = "{}: unwatched step"
OWN = "{}: by the probe's own clock, a step"
OBSERVED = "{}: steps observed"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the measurements; it takes less than 9 minutes and runs alone.

    Attributes:
        title: Its heading.
        needs: Packages without which it is left out.
        templates: What it measures, and in which unit; an empty one for words and counts. ``{}`` is
            each of its columns.
        columns: Columns of its table.
    """

    title: str
    needs: tuple[str, ...]
    templates: Mapping[str, str]
    columns: tuple[str, ...] = ()

    @property
    def rows(self) -> dict[str, str]:
        """The name and the unit of each of its rows."""
        return {
            template.format(column): unit
            for template, unit in self.templates.items()
            for column in (self.columns if "{}" in template else ("",))
        }


WATCHING = ("numpy", "pyarrow")
"""Packages of a watched training on one host."""


_STEP = {
    "parameters": "",
    "tokens a step and rank": "",
    RATIO: "",
    PLAIN: "ms",
    OWN: "ms",
    OBSERVED: "%",
}
_COMPARED = ("torch's norm", "a copy")
_BANDWIDTH = {
    "elements": "",
    "tensors": "",
    **{f"{{}}: {what}": "GB/s" for what in ("sketch", "norms", "digests", *_COMPARED)},
    **{f"{{}}: {what} / {than}": "" for what in ("sketch", "digests") for than in _COMPARED},
}

PARTS: dict[str, Part] = {
    "environment": Part(
        "Environment",
        (),
        dict.fromkeys(
            (
                *("devices", "compute capability", "memory of a device", "CUDA", "NCCL", "Triton"),
                *("Python", "missing packages", "kernel of the sketch", "kernel of the digests"),
            ),
            "",
        ),
    ),
    "kernels": Part(
        "Kernels against plain torch",
        ("numpy", "triton"),
        {
            "sketches of {}: largest difference over their RMS": "",
            "squared norms of {}: largest relative difference": "",
            "largest and non-finite of {}: equal": "",
            "sketches in sections: largest difference over their RMS": "",
            "the same bits when measured twice": "",
            "digests: equal to those by the host": "",
            "sums of squares beside digests: largest relative difference": "",
            "handover in one launch: equal to plain torch's": "",
        },
        DTYPES,
    ),
    "bandwidth": Part(
        "Bandwidth of the kernels", ("numpy", "triton"), _BANDWIDTH, ("bfloat16", "float32")
    ),
    "launches": Part(
        "What the probe starts in a step",
        WATCHING,
        dict(zip(LAUNCHES, ("", "ms", "ms"), strict=True)),
        tuple(TENSORS),
    ),
    "steps": Part("Step time under DDP", WATCHING, _STEP, DDP_WAYS),
    "fsdp2": Part("Step time under FSDP2", WATCHING, _STEP, FSDP2_WAYS),
    "bits": Part(
        "What must stay as it is",
        WATCHING,
        {
            "canary: tensors with the same bits afterwards": "",
            "canary: random generators as they were": "",
            "canary: memory that stays allocated": "bytes",
            "canary: the same bits from the same batch": "",
            "canary without memory: what it says": "",
            "canary without memory: tensors with the same bits afterwards": "",
            "canary without memory: memory that stays allocated": "bytes",
            "one rank: parameters with the same bits, watched and unwatched": "",
            "2 ranks over gloo: parameters with the same bits, watched and unwatched": "",
        },
    ),
    "answers": Part("What it finds", WATCHING, dict.fromkeys(ANSWERS, "")),
    "study": Part(
        "The study's pangu-1b",
        (*WATCHING, "rich", "transformers", "tokenizers"),
        {
            "parameters": "",
            "steps in the record of 2 workers": "",
            "a step, watched": "ms",
            "by the probe's own clock": "ms",
            "cosine of the two workers' gradients": "",
            "all of the study": "s",
        },
    ),
}


def merge(results: Results, part: str, rows: list[Row]) -> None:
    """Put the rows of a part in; what they lack stays as it was measured before.

    A row may have a ``remark`` on how it was measured, which goes when it is measured again.
    """
    found = {row["what"]: row for row in [*results.get(PREFIX + part, []), *rows]}
    results[PREFIX + part] = [found[what] for what in PARTS[part].rows if what in found]


def render(results: Mapping[str, list[Row]]) -> str:
    """Return the section, without an empty line at its end."""
    rows_of = {part.title: results.get(PREFIX + name, []) for name, part in PARTS.items()}
    place = _place([row for rows in rows_of.values() for row in rows])
    remarks: dict[str, list[str]] = {}
    for title, rows in rows_of.items():
        for remark in dict.fromkeys(row["remark"] for row in rows if "remark" in row):
            remarks.setdefault(remark, []).append(title)
    parts = [
        HEADING,
        "`make gpu` measures all; `make gpu GPU_FLAGS='--parts kernels'` one part. Medians, with "
        "95 % intervals in brackets. Bandwidths are the device's alone, and count the bytes of the "
        "gradient; a copy counts bytes read and written." + (f" {place}" if place else ""),
        *(f"*{'*, *'.join(titles)}*: {remark}" for remark, titles in remarks.items()),
    ]
    for part in PARTS.values():
        own = "" if place else _place(rows_of[part.title])
        parts += [f"### {part.title}", *([own] if own else []), *_tables(part, rows_of[part.title])]
    return "\n\n".join(parts)


def put_into(page: str, results: Mapping[str, list[Row]]) -> str:
    """Return a page with its section made anew; at its end if it has none."""
    section = render(results)
    pattern = rf"^{re.escape(HEADING)}$.*?(?=^## |\Z)"
    if re.search(pattern, page, re.M | re.S):
        return re.sub(pattern, lambda _: section + "\n\n", page, flags=re.M | re.S).rstrip() + "\n"
    return f"{page.rstrip()}\n\n{section}\n"


def text_of(row: Row) -> str:
    """Return a row's value with its unit and its interval."""
    text = _number(row["value"])
    if row["unit"] and not isinstance(row["value"], str):
        text += f" {row['unit']}"
    if "low" in row:
        text += f" ({_number(row['low'])} – {_number(row['high'])})"
    return text


def _tables(part: Part, rows: list[Row]) -> list[str]:
    """Return the tables of a part; one line while none is measured."""
    if not rows:
        return [f"All {len(part.rows)} rows: {NOT_MEASURED}."]
    texts, somewhere = dict.fromkeys(part.rows, NOT_MEASURED), _place(rows)
    for row in rows:
        place = "" if somewhere else f" ({_where(row)})"
        texts[row["what"]] = text_of(row).replace("|", "/") + place
    wide = [template for template in part.templates if "{}" in template]
    columns = {name: [texts[each.format(name)] for each in wide] for name in part.columns}
    alike = {name: cells[0] for name, cells in columns.items() if len({*cells}) == 1}
    plain = [(what, texts[what]) for what in part.templates if what not in wide]
    shown = [name for name in columns if name not in alike]
    lines = [
        (_COLUMN.sub("", each), *(columns[name][number] for name in shown))
        for number, each in enumerate(wide)
    ]
    tables = [_table(("what", "value"), plain)] if plain else []
    tables += [_table(("what", *shown), lines)] if shown else []
    return [*tables, *(f"{name}: {text}." for name, text in alike.items())]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _place(rows: Sequence[Row]) -> str:
    """Return where all rows were measured; empty if there are several places, or no row."""
    places = {_where(row) for row in rows}
    return f"On {places.pop()}." if len(places) == 1 else ""


def _where(row: Row) -> str:
    return f"{row['device']}, torch {row['torch']}, {row['date']}"


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if 0 < abs(value) < 1e-3:
            return f"{value:.1e}"
        return f"{value:,.{0 if value.is_integer() else _decimals(abs(value))}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _decimals(size: float) -> int:
    return next((places for places, least in enumerate((1000, 100, 10)) if size >= least), 3)
