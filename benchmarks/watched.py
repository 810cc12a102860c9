"""Public reports and healthy recipes, watched as today's version watches them.

    PYTHONPATH=tests python benchmarks/watched.py --write

Every program of ``reports`` runs with its fault and repaired, every one of ``healthy`` as it is, on
real ranks under ``rankscope run --verify-at 5``. Repaired and healthy programs must have no warning
and no error but those that are written here with their reason. ``--write`` renews the table in
``reports/today.md``. Ranks are forked from a process that has imported the frameworks.
"""

import argparse
import fnmatch
import functools
import importlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tables import fill_table

from rankscope import Run, Severity
from rankscope.errors import RunError

run_on_ranks = importlib.import_module("support.forked_ranks").run_on_ranks

HERE = Path(__file__).parent
PAGE = HERE / "reports" / "today.md"
COMMAND = "python benchmarks/watched.py"
FRAMEWORKS = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "accelerate",
    "deepspeed",
    "lightning.pytorch",
    "transformers",
    "trl",
)
ON_FOUR_RANKS = {
    *("R08", "R09", "R10", "R11", "R21", "R33", "R46", "R47", "R48", "R61", "R67"),
    *("H06", "H12", "H14", "H17", "H21", "H26", "H29", "H32"),
}
LAUNCHED_TWICE = {"R04", "R07", "R24", "R44", "R45", "R54", "R76"}
"""They save at the end of the first launch, and go on in the second one."""

TIMEOUT = 400.0


@dataclass(frozen=True)
class Watched:
    """What a watched program got: causes of warnings and errors, and of notes.

    ``failed`` is its exit code and the last line that it printed, empty if all went well. That a
    check agrees is no note here.
    """

    serious: tuple[str, ...]
    notes: tuple[str, ...]
    failed: str = ""

    @property
    def words(self) -> str:
        """The cell of the table."""
        if self.failed:
            return f"failed: {self.failed}"
        named = ", ".join(f"**`{cause}`**" for cause in self.serious)
        rest = ", ".join(cause if " " in cause else f"`{cause}`" for cause in self.notes)
        return "; ".join(part for part in (named, rest) if part) or "silent"


def programs(folder: str, patterns: Sequence[str]) -> dict[str, Path]:
    """Return the programs of a folder by id, those that a pattern names."""
    found = {}
    for path in sorted((HERE / folder).glob("[rh][0-9][0-9]_*.py")):
        name = path.name[:3].upper()
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            found[name] = path
    return found


def watch(name: str, program: Path, *, right: bool) -> Watched:
    """Run a program under ``rankscope run`` with a reference step; return what it got."""
    folder = Path(tempfile.mkdtemp(prefix="watched-"))  # each fork would remove a directory object
    saved = ["--folder", str(folder / "saved")] * (name in LAUNCHED_TWICE)
    words = ["run", "--run-dir", str(folder / "run"), "--verify-at", "5"]
    words += [str(program), *saved, *["--right"] * right]
    (folder / "saved").mkdir()
    try:
        for _ in range(2 if name in LAUNCHED_TWICE else 1):
            code, out, err = run_on_ranks(
                4 if name in ON_FOUR_RANKS else 2, words, folder, timeout=TIMEOUT
            )
            if code:
                return Watched((), (), f"exit code {code}, {(out + err).strip()[-200:]!r}")
        return _read(folder)
    except AssertionError as error:
        return Watched((), (), str(error)[-200:])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(folder: Path) -> Watched:
    serious: dict[str, None] = {}
    notes: dict[str, None] = {}
    records = sorted(folder.glob("run*/run.json"))
    if not records:
        return Watched((), ("not watched",))
    for record in records:
        try:
            findings = Run.open(record.parent).findings()
        except RunError as error:
            return Watched((), (), str(error))
        for finding in findings:
            if finding.cause.endswith(".agrees"):
                continue
            kind = notes if finding.severity is Severity.NOTE else serious
            kind[finding.cause] = None
    return Watched(tuple(serious), tuple(cause for cause in notes if cause not in serious))


def preload(paths: Sequence[Path]) -> None:
    """Import what the programs need, before ranks are forked."""
    importlib.import_module("rankscope.evidence")
    importlib.import_module("rankscope.session.start")
    texts = "".join(path.read_text() for path in paths)
    imported = {"torch", *re.findall(r"^(?:from|import) (\w+)", texts, re.M)}
    for name in FRAMEWORKS:
        if name.split(".")[0] in imported:
            importlib.import_module(name)


def table(reports: dict[str, Path], healthy: dict[str, Path]) -> tuple[list[str], int]:
    """Run all; return the table's lines, and how many right programs got a warning or an error."""
    lines = ["| id | with its fault | repaired |", "|---|---|---|"]
    false = 0
    say = functools.partial(print, flush=True)
    for name, path in [*reports.items(), *healthy.items()]:
        begun = time.perf_counter()
        faulty = watch(name, path, right=False)
        is_report = name in reports
        right = watch(name, path, right=True) if is_report else faulty
        false += bool(right.serious or right.failed)
        lines.append(f"| {name} | {faulty.words if is_report else ''} | {right.words} |")
        say(f"{lines[-1]} {time.perf_counter() - begun:.0f} s")
    return lines, false


def main() -> None:
    """Run the programs and print the table in Markdown, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="*", help="patterns of ids, such as R0*|H11")
    parser.add_argument("--write", action="store_true", help="renew the table in the docs")
    chosen = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    patterns = chosen.only.split("|")
    reports, healthy = (programs(folder, patterns) for folder in ("reports", "healthy"))
    preload([*reports.values(), *healthy.values()])
    lines, false = table(reports, healthy)
    total = f"{len(reports) + len(healthy)} right programs, {false} with a warning or an error."
    print(f"\n{total}")
    if chosen.write:
        fill_table(PAGE, COMMAND, "\n".join([*lines, "", total]))
    sys.exit(1 if false else 0)


if __name__ == "__main__":
    main()
