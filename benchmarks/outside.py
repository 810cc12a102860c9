"""Workloads that others have published: what rankscope says of those that it can watch.

The authors of TrainCheck (OSDI 2025) published what they evaluated it on, in
OrderLab/TrainCheck-Evaluation-Workloads. Here are those that train on several devices, and three of
one device that a watched training can show, re-created on four gloo ranks (``outside_jobs.py``).
``python benchmarks/outside.py`` prints the table, in a few minutes; with ``--write`` it goes into
``docs/comparison.md``; ``--only NAME`` runs those whose name holds a word.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tables import fill_table

from rankscope import Run, Severity
from rankscope.bus.finding import Finding

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "comparison.md"
RANKS = 4


@dataclass(frozen=True)
class Workload:
    """A workload of theirs, and what should be said of it; written before its first run.

    Attributes:
        name: Their folder's, and for a second fault of one folder what it hits.
        what: What is wrong.
        causes: Causes that a finding may name; empty if nothing is wrong.
        least: The least severity of such a finding.
        ranks: Workers that it has to name; empty if all are wrong alike, or nobody in particular.
        watches: Whether the job calls ``rankscope.watch`` itself.
        why: Why rankscope misses it, where it does; written after the first run.
    """

    name: str
    what: str
    causes: tuple[str, ...]
    least: Severity = Severity.ERROR
    ranks: tuple[int, ...] = ()
    watches: bool = False
    why: str = ""


ALL = (
    Workload(
        "pytorch-84803",
        "1 % of all-reduces deliver zeros to a rank (also pytorch-96600, baichuan2-86)",
        ("sync.gradients_differ", "state.parameters_differ"),
    ),
    Workload(
        "pytorch-84803, Tensor.to",
        "1 % of batches arrive on a rank as zeros",
        (
            *("data.worker_outlier", "compute.worker_outlier", "data.duplicate_batches"),
            "data.filled_batches",  # added after the first run, in which nothing was found
        ),
        Severity.WARNING,
    ),
    Workload(
        "deepspeed-1801",
        "one of two tensor-parallel ranks does not clip the norm that both hold",
        ("state.parameters_differ",),
        why="along other axes than the data-parallel ones, only replicas under FSDP2 are compared",
    ),
    Workload(
        "deepspeed-5794",
        "a rank leaves out an all-to-all, and the others wait",
        ("time.hang",),
        Severity.WARNING,
        ranks=(2,),
        watches=True,
    ),
    Workload(
        "mmpretrain-702",
        "layers are frozen after DDP has wrapped them; torch raises in the second step",
        ("sync.not_reduced",),
    ),
    Workload(
        "pytorch-104336",
        "the wrapped model is moved and back, and DDP's hooks are lost",
        ("sync.not_reduced", "state.parameters_differ"),
    ),
    Workload(
        "x-jxmnop-ddp-out-of-sync",
        "every other step bypasses DDP, and a new DDP is made in between",
        ("sync.not_reduced", "state.parameters_differ"),
    ),
    Workload(
        "stackoverflow-67180955",
        "all loader processes draw the same random numbers",
        ("data.duplicate_batches", "rng.identical"),
        Severity.WARNING,
    ),
    Workload(
        "stackoverflow-60335387",
        "`zero_grad` is never called (one device)",
        ("sync.accumulation",),
    ),
    Workload(
        "pytorch-115607",
        "the optimizer's step does nothing from some step on (one device)",
        ("state.not_updated",),
        Severity.WARNING,
    ),
    Workload(
        "pytorch-forum-84911",
        "the optimizer holds only frozen layers (one device)",
        ("state.not_updated",),
        Severity.WARNING,
    ),
    Workload("ddp-multigpu", "nothing: of their false-alarm study", ()),
)


@dataclass(frozen=True)
class Outcome:
    """What a run has left.

    Attributes:
        exit_code: Of the launcher.
        errors: Its error stream.
        findings: Of all data-parallel groups.
    """

    exit_code: int
    errors: str
    findings: tuple[Finding, ...]


def run(workload: Workload, folder: Path) -> Outcome:
    """Train a workload on real ranks, watched."""
    run_dir = folder / workload.name.replace(", ", "-")
    watched = ["-m", "rankscope", "run", "--run-dir", str(run_dir)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    script = [str(HERE / "outside_jobs.py"), workload.name]
    ended = subprocess.run(
        [sys.executable, *launcher, *([] if workload.watches else watched), *script],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OUTSIDE_RUN": str(run_dir)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    siblings = folder.glob(f"{run_dir.name}-from-rank-*/run.json")  # of other groups of workers
    runs = [file for file in (run_dir / "run.json", *sorted(siblings)) if file.exists()]
    if not runs:
        raise RuntimeError(f"{workload.name} expected a run, got none:\n{ended.stderr}")
    findings = [finding for file in runs for finding in Run.open(file.parent).findings()]
    return Outcome(ended.returncode, ended.stderr, tuple(findings))


def judge(workload: Workload, findings: Sequence[Finding]) -> str:
    """Return one word: whether the findings say what they should."""
    loud = [finding for finding in findings if finding.severity >= workload.least]
    if not workload.causes:
        alarms = [finding for finding in findings if finding.severity >= Severity.WARNING]
        return "**false alarm**" if alarms else "silent, rightly"
    right = [finding for finding in loud if finding.cause in workload.causes]
    if not right:
        return "**missed**"
    named = not workload.ranks or any(finding.ranks == workload.ranks for finding in right)
    return "found" if named else "found, **worker not named**"


def make_row(workload: Workload, outcome: Outcome) -> str:
    """Return the table's row."""
    verdict = judge(workload, outcome.findings)
    if workload.why and "**" in verdict:
        verdict += f": {workload.why}"
    should = " or ".join(f"`{cause}`" for cause in workload.causes) or "nothing"
    said = _words(outcome.findings) or "no finding"
    return f"| {workload.name} | {workload.what} | {should} | {said} | {verdict} |"


def _words(findings: Sequence[Finding]) -> str:
    """Return the causes, the worst severity, the worker if it is one, and the first step."""
    if not findings:
        return ""
    worst = max(finding.severity for finding in findings)
    all_ranks = {finding.ranks for finding in findings}
    ranks = all_ranks.pop() if len(all_ranks) == 1 else ()
    worker = f", rank {ranks[0]}" if len(ranks) == 1 else ""
    first = min(finding.first_step for finding in findings)
    causes = ", ".join(f"`{finding.cause}`" for finding in findings)
    return f"{causes} ({worst}{worker}, step {first})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="run the workloads whose name holds this")
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    options = parser.parse_args(arguments)
    chosen = [workload for workload in ALL if (options.only or "") in workload.name]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for workload in chosen:
            outcome = run(workload, Path(folder))
            rows.append(make_row(workload, outcome))
            print(rows[-1], f"exit code {outcome.exit_code}", sep="\n", flush=True)
            if outcome.exit_code:
                print(outcome.errors[-2000:], file=sys.stderr)
    if options.write and not options.only:
        head = "| workload | what is wrong | should say | says: worst severity, first step | |"
        table = "\n".join([head, "| --- | --- | --- | --- | --- |", *rows])
        fill_table(PAGE, "python benchmarks/outside.py --write", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
