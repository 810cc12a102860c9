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

DTYPES = ("float32", "bfloat16", "float16")
TENSORS = (10, 100, 1000)
DDP_WAYS = (
    "DDP, one rank",
    "DDP, 2 ranks on one device over gloo",
    "DDP, a rank on each device over NCCL",
)
FSDP2_WAYS = ("FSDP2, a rank on each device over NCCL", "FSDP2, 2 ranks on one device over gloo")
LAUNCHES = (
    "launches and copies, {:,} tensors",
    "by the probe's own clock, {:,} tensors",
    "CPU time, {:,} tensors",
)
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
        rows: What it measures, and in which unit; an empty one for words and counts.
    """

    title: str
    needs: tuple[str, ...]
    rows: Mapping[str, str]


WATCHING = ("numpy", "pyarrow")
"""Packages of a watched training on one host."""


def _step_rows(ways: Sequence[str]) -> dict[str, str]:
    rows = {"parameters": "", "tokens a step and rank": ""}
    for way in ways:
        rows |= {RATIO.format(way): "", PLAIN.format(way): "ms"}
        rows |= {OWN.format(way): "ms", OBSERVED.format(way): "%"}
    return rows


def _bandwidth_rows() -> dict[str, str]:
    rows = {"elements": "", "tensors": ""}
    for dtype in ("bfloat16", "float32"):
        for what in ("sketch", "norms", "digests", "torch's norm", "a copy, read and written"):
            rows[f"{dtype}: {what}"] = "GB/s"
        for what in ("sketch", "digests"):
            rows[f"{dtype}: {what} / torch's norm"] = ""
            rows[f"{dtype}: {what} / a copy, read and written"] = ""
    return rows


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
            **{f"sketches of {dtype}: largest difference over their RMS": "" for dtype in DTYPES},
            **{f"squared norms of {dtype}: largest relative difference": "" for dtype in DTYPES},
            **{f"largest and non-finite of {dtype}: equal": "" for dtype in DTYPES},
            "sketches in sections: largest difference over their RMS": "",
            "the same bits when measured twice": "",
            "digests: equal to those by the host": "",
            "sums of squares beside digests: largest relative difference": "",
            "handover in one launch: equal to plain torch's": "",
        },
    ),
    "bandwidth": Part("Bandwidth of the kernels", ("numpy", "triton"), _bandwidth_rows()),
    "launches": Part(
        "What the probe starts in a step",
        WATCHING,
        {
            row.format(count): unit
            for row, unit in zip(LAUNCHES, ("", "ms", "ms"), strict=True)
            for count in TENSORS
        },
    ),
    "steps": Part("Step time under DDP", WATCHING, _step_rows(DDP_WAYS)),
    "fsdp2": Part("Step time under FSDP2", WATCHING, _step_rows(FSDP2_WAYS)),
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
    parts = [
        HEADING,
        "`make gpu` measures all; `make gpu GPU_FLAGS='--parts kernels'` one part. Medians, with "
        "95 % intervals in brackets. Bandwidths are the device's alone, and count the bytes of the "
        "gradient; a copy counts bytes read and written.",
    ]
    for name, part in PARTS.items():
        parts += [f"### {part.title}", _table(part, results.get(PREFIX + name, []))]
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


def _table(part: Part, rows: list[Row]) -> str:
    """Return the rows of a part as a table; one line while none is measured."""
    if not rows:
        return f"All {len(part.rows)} rows: {NOT_MEASURED}."
    found = {row["what"]: row for row in rows}
    where = list(dict.fromkeys(map(_where, rows)))
    said = [f"On {where[0]}."] if len(where) == 1 else []
    said += dict.fromkeys(row["remark"] for row in rows if "remark" in row)
    lines = [" ".join(said), ""] if said else []
    several = len(where) > 1
    lines += ["| what | value |" + " where |" * several, "|---|---|" + "---|" * several]
    for what in part.rows:
        row = found.get(what)
        text = NOT_MEASURED if row is None else text_of(row).replace("|", "/")
        place = "–" if row is None else _where(row)
        lines.append(f"| {what} | {text} |" + f" {place} |" * several)
    return "\n".join(lines)


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
