"""Public reports and healthy recipes, watched as today's version watches them.

    PYTHONPATH=tests python benchmarks/watched.py --write

Every program of ``reports`` runs with its fault and repaired, every one of ``healthy`` as it is, on
real ranks under ``rankscope run --verify-at 5``. What names each fault is written here, and which
warning of a right program is true; any other answer is not expected. ``--write`` renews the table
in ``reports/today.md``. Ranks are forked from a process that has imported the frameworks.
"""

import argparse
import fnmatch
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
_ON_FOUR_RANKS = """
R08 R09 R10 R11 R21 R33 R46 R47 R48 R61 R67 R77 R78 R79 R82 R86 R91 R97 R125
R162 R168 R169 R171
H06 H12 H14 H17 H21 H26 H29 H32
"""
ON_FOUR_RANKS = frozenset(_ON_FOUR_RANKS.split())
_LAUNCHED_TWICE = """
R04 R07 R24 R44 R45 R54 R76 R80 R87 R102 R103 R108 R121 R126 R127 R128 R129 R130 R167
"""
LAUNCHED_TWICE = frozenset(_LAUNCHED_TWICE.split())
"""They save at the end of the first launch, and go on in the second one."""

NAMED_BY = {
    "loss.scale": "R02 R11 R14 R17 R32 R39 R40 R64",
    "data.duplicate_batches": "R03 R151 R164",
    "data.resume_mismatch": "R04 R54 R102 R103",
    "compute.modes_differ": "R05",
    "compute.stale_copies": "R123",
    "rng.identical": "R06",
    "state.average_jumps": "R07",
    "state.counts_rounded": "R08",
    "state.parameters_differ": "R09 R35 R50 R62 R70 R141",
    "verify.derivative": "R10 R18 R46 R65 R77 R79 R82 R91 R97 R105 R106",
    "verify.loss": "R78 R86",
    "loss.no_gradient": "R12",
    "state.buffers_differ": "R15 R133",
    "data.coverage": "R16",
    "sync.not_reduced": "R20",
    "sync.clip_norm": "R21 R30 R85",
    "sync.accumulation": "R22 R43 R55 R101 R132 R161",
    "state.other_tensors_held": "R26",
    "counters-of-ranks-differ": "R29 R120",
    "state.replicas_differ": "R33 R61",
    "state.copy_never_changes": "R34",
    "data.overlapping_shards": "R37",
    "data.repeated_batches": "R38",
    "state.hyperparameters_differ": "R41",
    "state.resume_mismatch": "R44 R45 R80 R87 R108 R129 R167",
    "sync.expert_divisor": "R48",
    "state.updates_lost": "R49 R128",
    "state.weights_replaced": "R130",
    "sync.shard_factors": "R56",
    "sync.part_of_ranks": "R57",
    "state.statistics_twice": "R58",
    "state.average_rounded": "R63",
    "state.average_buffers_rest": "R150",
    "state.adapted_trains": "R67",
    "state.shards_alike": "R84",
    "update.differs": "R74",
    "verify.parameters": "R160",
}
"""Causes of warnings and errors that name a fault, and the reports that have it."""

NAMED = {name: cause for cause, names in NAMED_BY.items() for name in names.split()}
TRUE = {"R41": "inconclusive", "R147": "data.repeated_order", "R153": "inconclusive"}
"""Warnings of right programs that are true.

In R41, rank 0 has all chats, rank 1 all long answers; in R153, rank 1 has all rows that fill up.
R147 reads its shards in one order.
"""

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


def _number(path: Path) -> int:
    return int(path.name.split("_")[0][1:])


def programs(folder: str, patterns: Sequence[str]) -> dict[str, Path]:
    """Return the programs of a folder by id, those that a pattern names."""
    found = {}
    for path in sorted((HERE / folder).glob("[rh][0-9][0-9]*_*.py"), key=_number):
        name = path.name.split("_")[0].upper()
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
        return read_answers(folder)
    except AssertionError as error:
        return Watched((), (), str(error)[-200:])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_answers(folder: Path) -> Watched:
    """Read what all runs of a folder got."""
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


@dataclass
class Totals:
    """Counts over all programs that ran."""

    reports: int = 0
    named: int = 0  # reports whose fault a warning or an error names
    right: int = 0  # repaired and healthy programs
    false: int = 0  # of them, those with a warning or an error that is not true
    unexpected: int = 0  # answers that are not as they are written here

    def add(self, name: str, faulty: Watched | None, right: Watched) -> None:
        """Count a program; ``faulty`` is None for a healthy one."""
        untrue = [cause for cause in right.serious if cause != TRUE.get(name)]
        self.right += 1
        self.false += bool(untrue)
        self.unexpected += bool(untrue or right.failed)
        if faulty is not None:
            named = NAMED.get(name) in faulty.serious
            self.reports += 1
            self.named += named
            self.unexpected += bool(faulty.failed) or named != (name in NAMED)

    @property
    def words(self) -> str:
        """The last line of the table."""
        return (
            f"{self.named} of {self.reports} faults are named by a warning or an error. "
            f"{self.false} of {self.right} right programs have one that is not true."
        )


def table(reports: dict[str, Path], healthy: dict[str, Path]) -> tuple[list[str], Totals]:
    """Run all; return the table's lines, and what they come to."""
    lines = ["| id | with its fault | repaired |", "|---|---|---|"]
    totals = Totals()
    for name, path in [*reports.items(), *healthy.items()]:
        begun = time.perf_counter()
        faulty = watch(name, path, right=False) if name in reports else None
        right = watch(name, path, right=name in reports)
        totals.add(name, faulty, right)
        lines.append(f"| {name} | {'' if faulty is None else faulty.words} | {right.words} |")
        print(f"{lines[-1]} {time.perf_counter() - begun:.0f} s", flush=True)
    return lines, totals


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
    lines, totals = table(reports, healthy)
    print(f"\n{totals.words} Answers not as expected: {totals.unexpected}.")
    if chosen.write:
        fill_table(PAGE, COMMAND, "\n".join([*lines, "", totals.words]))
    sys.exit(1 if totals.unexpected else 0)


if __name__ == "__main__":
    main()
