"""Public reports that watching misses, at two layouts each: what ``rankscope parity`` answers.

    PYTHONPATH=tests python benchmarks/parity_reports.py

The programs are in ``reports``. Each is compared with itself in a layout that is trusted, with its
fault and repaired. What must be answered is written here; what was expected before any run is in
``reports/parity.md``. Ranks are forked from a process that has imported the frameworks;
``--commands`` prints what a user would type.
"""

import argparse
import fnmatch
import importlib
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parity_frameworks import PRELOADED, command_of
from parity_pairs import recordings, run_here

from rankscope.tools.parity.compare import decide_resumed
from rankscope.tools.parity.reading import NotRecordedError

HERE = Path(__file__).parent / "reports"
NUM_REPORTS = 108
SAVED_AT = 3
SAME, NOT_COMPARABLE, NOT_RUN = "the same", "not comparable", "not run"


@dataclass(frozen=True)
class Report:
    """A program at two layouts, and what must be answered.

    Attributes:
        number: The report's.
        a: The trusted layout: ranks under torchrun, 0 for none, then words of the program.
        b: The layout with the fault.
        faulty: The stage that must be named, or another answer.
        repaired: The same of the repaired program.
        steps: Steps to compare.
        resume: Words of the resumption after three steps; empty without.
        no_dropout: Whether dropout is switched off.
        both: Whether the trusted layout is repaired together with the other one: else its answer
            would be of the fault that it has, too, or of what the repair changes in it.
        of_another_thing: Whether the answer does not name the fault.
        watched: Whether watching found it at first: it is compared, and not counted.
    """

    number: int
    a: str = ""
    b: str = ""
    faulty: str = SAME
    repaired: str = SAME
    steps: int = 4
    resume: str = ""
    no_dropout: bool = False
    both: bool = False
    of_another_thing: bool = False
    watched: bool = False

    @property
    def name(self) -> str:
        """Its name in the tables."""
        return f"R{self.number:02}"

    @property
    def program(self) -> Path:
        """Its file."""
        (found,) = HERE.glob(f"{self.name.lower()}_*.py")
        return found


def _resumed(number: int, faulty: str, *, words: str = "--steps 3", repaired: str = SAME) -> Report:
    """Return a program that is launched twice, on two ranks, beside six steps on end."""
    return Report(number, "2 --steps 6", f"2 {words}", faulty, repaired, 6, f"2 {words}")


def _not_run(number: int) -> Report:
    """Return a program whose ranks draw what they learn from: no two layouts have the same."""
    return Report(number, faulty=NOT_RUN, repaired=NOT_RUN)


REPORTS = (
    Report(1, "1 --samples 32 --micro-batches 1", "2", "loss"),
    Report(2, "1 --samples 16", "2", "gradient", both=True),
    _resumed(7, "start"),
    Report(8, "1 --samples 64", "2", both=True),
    Report(11, "1 --samples 16", "4", "loss"),
    Report(12, "2 --checkpointing 0", "2", "gradient"),
    Report(13, "1 --samples 16", "2", "samples", "samples"),
    Report(16, "1 --samples 16", "2", "samples", "samples", both=True),
    Report(19, "1 --samples 16", "2"),
    Report(20, "1 --samples 64", "2", "gradient"),
    Report(22, "1 --samples 16", "2", both=True),
    Report(23, "1 --samples 16", "2", no_dropout=True, both=True),
    _resumed(24, "update"),
    Report(25, "2 --deepspeed 0", "2", "samples"),
    Report(27, "1 --files 2", "2", "label tokens"),
    Report(28, "2 --processes 0", "2", "samples", steps=12),
    Report(29, "1 --samples 16", "2", "update"),
    _not_run(34),
    Report(36, "1", "2", "loss"),
    Report(37, "1 --samples 16", "2", "samples", "samples"),
    Report(38, "2 --processes 0", "2", "samples", "samples"),
    Report(42, "1 --samples 16", "2", "start"),
    _resumed(45, "optimizer state"),
    Report(47, "1 --samples 16", "4", "gradient"),
    _not_run(51),
    _not_run(52),
    Report(53, "1 --samples 16", "2", "update", both=True),
    _resumed(54, "samples"),
    Report(58, "2 --checkpointing 0", "2", "start"),
    Report(59, "2 --by-length 0", "2", "loss"),
    Report(60, "1", "2", "loss"),
    Report(61, "1 --samples 16", "4", NOT_COMPARABLE, NOT_COMPARABLE, no_dropout=True),
    Report(62, "1 --samples 8", "2", "gradient"),
    Report(63, "1 --samples 16", "2"),
    Report(64, "1 --samples 32 --micro-batches 1", "2", "gradient"),
    _not_run(66),
    Report(67, "1 --samples 16", "4", NOT_COMPARABLE, NOT_COMPARABLE),
    Report(68, "2 --compiled 0", "2"),
    Report(69, "0", "2", "gradient", both=True),
    Report(71, "0", "2", NOT_COMPARABLE, NOT_COMPARABLE),
    Report(72, "0", "2", "loss"),
    Report(73, "0", "2", "samples"),
    Report(74, "0", "2", "update"),
    Report(75, "0", "2", "samples"),
    _resumed(76, "start", words="--save-at 3", repaired="start"),
    Report(77, "0", "4", NOT_COMPARABLE, NOT_COMPARABLE, watched=True),
    Report(78, "0", "4", "gradient"),
    Report(79, "0", "4", "gradient", watched=True),
    replace(_resumed(80, "optimizer state"), watched=True),
    Report(81, "0", "2", "samples"),
    Report(82, "0", "4", "loss", watched=True),
    Report(83, "0", "2", "loss"),
    Report(84, "0", "2", "start"),
    Report(85, "0", "2", "clipping"),
    Report(86, "0", "4", "gradient"),
    replace(_resumed(87, "optimizer state"), watched=True),
    Report(88, "0", "2", "update"),
    Report(89, "0", "2", NOT_COMPARABLE),
    Report(90, "0", "2", "update"),
    Report(91, "0", "4", "gradient", watched=True),
    Report(92, "0", "2", "samples", "samples"),
    Report(93, "0", "2", "loss"),
    Report(94, "0", "2", "samples"),
    Report(95, "0", "2", NOT_COMPARABLE, NOT_COMPARABLE),
    Report(96, "0", "2", "loss"),
    Report(97, "0", "4", "gradient", watched=True),
    Report(98, "0", "2", "samples"),
    Report(99, "0", "2", "samples"),
    Report(100, "0", "2", "start"),
    Report(101, "0", "2", "gradient"),
    _resumed(102, "samples"),
    _resumed(103, "samples"),
    Report(104, "0", "2", NOT_COMPARABLE, NOT_COMPARABLE),
    Report(105, "0", "2", "gradient", watched=True),
    Report(106, "0", "2", "gradient", watched=True),
    Report(107, "0", "2"),
    _resumed(108, "start"),
)
"""Those that neither a watched run nor its reference step found at first, and what is answered; of
R77 to R108 all."""


def layout_of(report: Report, words: str, folder: Path, *, right: bool) -> Any:
    """Return the layout of one side, which saves into a folder."""
    ranks, *more = words.split()
    more += ["--folder", str(folder)] * bool(report.resume) + ["--right"] * right
    return recordings.layout(int(ranks), *more, script=str(report.program))


def words_of(report: Report) -> str:
    """Return the command line that a user types."""
    sides = {"-a": (report.a, "a"), "-b": (report.b, "b"), "-b2": (report.resume, "b")}
    words = ["rankscope", "parity"]
    for option, (layout, folder) in sides.items():
        if layout:
            command = command_of(layout_of(report, layout, Path(folder), right=False))
            words += [option, command.replace(sys.executable, "python").replace(f"{HERE}/", "")]
    words += ["--steps", str(report.steps)]
    words += ["--resume-at", str(SAVED_AT)] * bool(report.resume)
    return shlex.join([*words, *["--no-dropout"] * report.no_dropout])


def answer_of(report: Report, kept: Any, folder: Path, *, right: bool) -> dict[str, Any]:
    """Return what parity answers for ranks that are forked from this process."""
    saved = folder / f"saved by B, {'repaired' if right else 'faulty'}"
    a = layout_of(report, report.a, folder / "saved by A", right=right and report.both)
    b = layout_of(report, report.b, saved, right=right)
    try:
        if not report.resume:
            answer = recordings.answer_of(kept, a, b, report.steps, no_dropout=report.no_dropout)
        else:
            later = layout_of(report, report.resume, saved, right=right)
            left = report.steps - SAVED_AT
            answer = decide_resumed(
                kept.side(a, "A", report.steps),
                kept.side(b, "B", SAVED_AT),
                lambda: kept.side(later, "B", left, first_step=SAVED_AT),
                lambda side, eps: kept.side(a, "moved", max(side.steps) + 1, eps=eps),
            )
    except NotRecordedError as error:
        return {"answer": NOT_COMPARABLE, "stage": None, "headline": f"Not comparable: {error}."}
    except (AssertionError, ValueError) as error:
        return {"answer": "failed", "stage": None, "headline": str(error)[-300:]}
    found: dict[str, Any] = answer.to_json()
    return found


def short(found: dict[str, Any]) -> str:
    """Return the stage of an answer, or what it is."""
    answer = str(found["answer"]).removesuffix(" within rounding")
    return found["stage"] if answer == "not the same" else answer


def preload(reports: Sequence[Report]) -> None:
    """Import what the programs need, before ranks are forked."""
    importlib.import_module("rankscope.evidence")
    programs = "".join(report.program.read_text() for report in reports)
    for name in PRELOADED:
        if name.split(".")[0] in ("torch", *re.findall(r"^(?:from|import) (\w+)", programs, re.M)):
            importlib.import_module(name)


def run_reports(reports: Sequence[Report]) -> tuple[int, int]:
    """Run reports; return how many are found, and how many answers were not expected."""
    found = unexpected = 0
    for report in reports:
        name = report.name
        if not report.a:
            print(f"| {name} | {NOT_RUN} | | {NOT_RUN} | | 0 |", flush=True)
            continue
        begun = time.perf_counter()
        folder = Path(tempfile.mkdtemp(prefix="parity-"))
        kept = recordings.Recordings(folder / "records", run_here)
        for inside in ("records", "saved by A", "saved by B, faulty", "saved by B, repaired"):
            (folder / inside).mkdir()
        try:
            faulty, repaired = (
                answer_of(report, kept, folder, right=right) for right in (False, True)
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        answers = []
        for answer, expected in ((faulty, report.faulty), (repaired, report.repaired)):
            as_expected = short(answer) == expected
            unexpected += not as_expected
            answers += [short(answer) if as_expected else f"{short(answer)} ({expected})"]
            answers += [" ".join([answer["headline"], *answer.get("notes", ())])]
        differs = faulty["answer"] == "not the same" and short(repaired) == SAME
        found += differs and not (report.of_another_thing or report.watched)
        seconds = time.perf_counter() - begun
        print(f"| {name} | {' | '.join(answers)} | {seconds:.0f} |", flush=True)
    return found, unexpected


def main() -> None:
    """Run the reports and print a table in Markdown, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="*", help="patterns of numbers, such as R0*|R11")
    parser.add_argument("--commands", action="store_true", help="print the commands, run nothing")
    chosen = parser.parse_args()
    if chosen.commands:
        print("\n".join(words_of(report) for report in REPORTS if report.a))
        return
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    patterns = chosen.only.split("|")
    reports = [r for r in REPORTS if any(fnmatch.fnmatch(r.name, one) for one in patterns)]
    preload(reports)
    print("| id | faulty | answer | repaired | answer | seconds |\n|---|---|---|---|---|---|")
    found, unexpected = run_reports(reports)
    watched = NUM_REPORTS - sum(not report.watched for report in REPORTS)
    print(
        f"\nFound by parity: {found}. Of {NUM_REPORTS} reports {watched} are found by watching, "
        f"{watched + found} by watching or parity. Answers not as expected: {unexpected}."
    )
    sys.exit(1 if unexpected else 0)


if __name__ == "__main__":
    main()
