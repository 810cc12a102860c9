"""The bench as a command: injects faults into a small training job and scores what is found."""

import argparse
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from . import bench
from .bench import Bench, Score
from .catalogue import Fault, UsageError, catalogue, select
from .summary import markdown, shares

NAME = "python -m benchmarks.faults"
DEFAULT_WORKERS = 4
DEFAULT_SEED = 0
UNEXPECTED, INTERRUPTED = 1, 130

_Run = tuple[Fault, int, int, int]  # what is wrong, workers, seed, steps


def main(words: Sequence[str]) -> int:
    """Run the bench; Ctrl-C ends it with what is scored so far.

    Returns:
        The exit code: 0 when everything is as the catalogue expects, 1 otherwise, 130 when it was
        interrupted. Bad usage exits with 2.
    """
    parser = _parser()
    options = parser.parse_args(words)
    try:
        chosen = _chosen(options)
        runs = _runs(chosen, options)
        before = _read_scores(options.json) if options.resume else []
        scores = _run(runs, before, options.json, options.keep)
    except UsageError as error:
        parser.error(str(error))
    if options.markdown is not None:
        command = " ".join([NAME, *words])
        _write(options.markdown, markdown(scores, chosen, command, len(runs), whole=options.all))
    _show(scores, in_detail=not options.all)
    if len(scores) < len(runs):
        rest = "" if options.json is None else f"; --resume --json {options.json} goes on"
        _console(stderr=True).print(f"interrupted after {len(scores)} of {len(runs)} runs{rest}")
        return INTERRUPTED
    return 0 if all(score.as_expected for score in scores) else UNEXPECTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument("ids", nargs="*", metavar="ID", help="faults by id, such as D1 T2 H1")
    parser.add_argument("--all", action="store_true", help="the whole catalogue instead")
    parser.add_argument(
        "--full", action="store_true", help="4 and 8 workers, 3 seeds, long look-alikes: hours"
    )
    parser.add_argument("--workers", type=int, help=f"how many, {DEFAULT_WORKERS} if not given")
    parser.add_argument("--seed", type=int, help=f"of everything, {DEFAULT_SEED} if not given")
    parser.add_argument("--steps", type=int, help="of a run, by the fault's class if not given")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run directories here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all scores, one by one")
    parser.add_argument("--resume", action="store_true", help="leave out what --json's file holds")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page")
    return parser


def _chosen(options: argparse.Namespace) -> list[Fault]:
    if options.all == bool(options.ids):
        raise UsageError("expected ids of faults or --all, one of both")
    if options.full and (options.workers is not None or options.seed is not None):
        raise UsageError("--full chooses workers and seeds itself; leave --workers and --seed out")
    if options.resume and options.json is None:
        raise UsageError("--resume goes on with the scores of a file: name it with --json")
    return list(catalogue().values()) if options.all else list(dict.fromkeys(select(options.ids)))


def _runs(chosen: Sequence[Fault], options: argparse.Namespace) -> list[_Run]:
    """Return what is to be run, in order.

    Raises:
        UsageError: A fault cannot be run in this way.
    """
    numbers = bench.FULL_WORKERS if options.full else (_given(options.workers, DEFAULT_WORKERS),)
    seeds = bench.FULL_SEEDS if options.full else (_given(options.seed, DEFAULT_SEED),)
    possible = [fault for fault in chosen if not (options.all and fault.missing)]
    for fault in possible:
        bench.check(fault, min(numbers), options.steps, min(seeds))
    return [
        (fault, number, seed, options.steps or bench.steps_of(fault, full=options.full))
        for number in numbers
        for seed in seeds
        for fault in possible
    ]


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _run(
    runs: Sequence[_Run], before: Sequence[Score], json_file: Path | None, keep: Path | None
) -> list[Score]:
    """Run what has no score yet, until all is run or Ctrl-C; return all scores, in order."""
    console = _console(stderr=True)
    scores = {
        (score.fault.id, score.num_workers, score.seed, score.num_steps): score for score in before
    }
    with suppress(KeyboardInterrupt), _bar(console) as bar, Bench(keep) as ranks:
        task = bar.add_task("", total=len(runs))
        for fault, number, seed, length in runs:
            key = (fault.id, number, seed, length)
            if key not in scores:
                bar.update(task, description=f"{fault.id}, {number} workers, seed {seed}")
                scores[key] = ranks.run(fault, num_workers=number, seed=seed, num_steps=length)
                if json_file is not None:
                    _write_scores(json_file, scores.values())
                if not console.is_terminal:
                    console.print(_line(scores[key]))
            bar.advance(task)
    keys = [(fault.id, number, seed, length) for fault, number, seed, length in runs]
    return [scores[key] for key in keys if key in scores]


def _read_scores(file: Path) -> list[Score]:
    """Return the scores that a file holds; none if there is no such file.

    Raises:
        UsageError: It cannot be read as scores.
    """
    try:
        return [Score.from_json(one, catalogue()) for one in json.loads(file.read_text("utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--resume expected scores that --json has written, got {file}, which cannot be read "
            f"as such ({error}); name another file, or leave --resume out"
        ) from error


def _write_scores(file: Path, scores: Iterable[Score]) -> None:
    lines = [json.dumps(score.to_json(), ensure_ascii=False) for score in scores]
    _write(file, "[\n" + ",\n".join(lines) + "\n]\n")  # a run is a line, which diff can show


def _write(file: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f"{file.name}.new")
    written.write_text(text, "utf-8")
    written.replace(file)


def _console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _show(scores: Sequence[Score], *, in_detail: bool) -> None:
    console = _console()
    if in_detail:
        for score in scores:
            console.print(_line(score))
            for finding in score.findings:
                console.print(f"  {finding.severity}  {finding.cause}: {finding.explanation}")
        return
    table = Table("id", "W", "class", "", "steps", "worker", "cause", "found", box=None)
    for score in scores:
        table.add_row(*_cells(score))
    console.print(table, soft_wrap=False)
    console.print()
    for share in (share for share in shares(scores) if share.total):
        goal = "" if share.goal is None else f"  (goal {share.goal:.0%})"
        line = f"{share.good} of {share.total}  {share.what}{goal}"
        console.print(Text(line, style="" if share.reached else "red"))


def _cells(score: Score) -> Iterable[str | Text]:
    expects = score.fault.expects_finding
    found = ", ".join(f"{one.cause} ({one.severity})" for one in score.findings[:2])
    return (
        score.fault.id,
        str(score.num_workers),
        str(score.fault.fault_class),
        _verdict(score),
        "" if score.delay is None else str(score.delay),
        "" if not expects else "yes" if score.rank_named else "no",
        "" if not expects else "–" if score.cause_rank is None else str(score.cause_rank),
        Text(score.problem or found),
    )


def _line(score: Score) -> Text:
    after = "" if score.delay is None else f" after {score.delay} steps"
    return Text.assemble(
        (f"{score.fault.id} ", "bold"),
        _verdict(score),
        f"{after}  {score.fault.mechanism} ({score.num_workers} workers, seed {score.seed}, "
        f"{score.num_steps} steps, {score.seconds:.0f} s)",
        (f"\n  {score.problem}" if score.problem else "", "red"),
    )


def _verdict(score: Score) -> Text:
    if score.as_expected:
        return Text("as expected", style="green")
    if score.problem:
        return Text("problem", style="red")
    if score.false_alarms:
        return Text("false alarm", style="red")
    if not score.fault.expects_finding:
        return Text("unexpected", style="red")
    return Text("not detected" if not score.detected else "other verdict", style="red")
