"""``rankscope faults``: the fault bench."""

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid
from rich.text import Text

from rankscope.cli.output import JsonOption, plain, print_json, terminal
from rankscope.errors import RunError, UsageError
from rankscope.record.files import DAMAGES, parse, read_file, replace

if TYPE_CHECKING:
    from rankscope.faults.bench import Score
    from rankscope.faults.catalogue import Fault

    _Run = tuple[Fault, int, int, int]  # what is wrong, workers, seed, steps

faults = typer.Typer(
    name="faults",
    help="List the catalogue of real faults, and run them on real ranks to see what is found.",
    add_completion=False,
    rich_markup_mode=None,
)

DEFAULT_WORKERS = 4
DEFAULT_SEED = 0


@faults.command("list")
def list_faults(
    as_json: JsonOption = False,
) -> None:
    """List every fault and healthy look-alike, and what a finding is expected to say of it."""
    from rankscope.faults.catalogue import catalogue

    known = list(catalogue().values())
    if as_json:
        print_json([_row_of(fault) for fault in known])
        return
    grid = Grid("id", "class", "what goes wrong", "expected", box=None, pad_edge=False)
    for fault in known:
        grid.add_row(fault.id, str(fault.fault_class), fault.mechanism, _expected(fault))
    terminal().print(grid)


@faults.command("run")
def run_faults(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID...", help="Faults by id, such as D1 T2 H1.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Run the whole catalogue instead.")
    ] = False,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="4 and 8 workers, 3 seeds, look-alikes of 2,000 steps: takes hours."
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of workers.", show_default=str(DEFAULT_WORKERS)),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Seed of everything.", show_default=str(DEFAULT_SEED)),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Steps of a run.", show_default="by the fault's class"),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep the run directories here.", show_default="they are removed"
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all scores to this file, one by one."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out the runs that the --json file holds.")
    ] = False,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the page to this file.")
    ] = None,
) -> None:
    """Inject faults into a small training job on gloo ranks and score what is found.

    Ctrl-C ends it with what is scored so far.

    Exit code: 0 when everything is as the catalogue expects, 1 otherwise, 2 bad usage, 130
    interrupted.
    """
    from rankscope.faults import bench, catalogue

    known = list(catalogue.catalogue().values())
    if everything == bool(ids):
        raise UsageError("expected ids of faults or --all, one of both; see rankscope faults list")
    if full and (workers is not None or seed is not None):
        raise UsageError("--full chooses workers and seeds itself; leave --workers and --seed out")
    if resume and json_file is None:
        raise UsageError("--resume goes on with the scores of a file: name it with --json")
    chosen = known if everything else catalogue.select(ids or [])
    if not everything:
        chosen = list(dict.fromkeys(chosen))
    numbers = bench.FULL_WORKERS if full else (DEFAULT_WORKERS if workers is None else workers,)
    seeds = bench.FULL_SEEDS if full else (DEFAULT_SEED if seed is None else seed,)
    for fault in chosen:
        if not (everything and fault.missing):
            bench.check(fault, min(numbers), steps, min(seeds))
    before = _read_scores(json_file) if resume and json_file is not None else []
    runs = _runs(chosen, numbers, seeds, steps, full=full)
    scores = _run(runs, before, json_file, keep)
    try:
        if markdown_file is not None:
            from rankscope.faults.summary import markdown

            page = markdown(scores, chosen, _command(), len(runs), whole=everything)
            _write(markdown_file, page)
    finally:  # the scores are shown, too, when they cannot be written
        _show(scores, terminal(), in_detail=not everything)
    if len(scores) < len(runs):
        rest = "" if json_file is None else f"; --resume --json {json_file} goes on"
        line = f"rankscope: interrupted after {len(scores)} of {len(runs)} runs{rest}"
        terminal(stderr=True).print(Text(line), soft_wrap=True)
        raise KeyboardInterrupt
    if not all(score.as_expected for score in scores):
        raise typer.Exit(1)


def _runs(
    chosen: "Sequence[Fault]",
    numbers: Sequence[int],
    seeds: Sequence[int],
    steps: int | None,
    *,
    full: bool,
) -> "list[_Run]":
    """Return what is to be run, in order."""
    from rankscope.faults import bench

    lengths = {
        fault.id: steps
        or (bench.FULL_HEALTHY_STEPS if full and fault.healthy else bench.steps_of(fault))
        for fault in chosen
    }
    return [
        (fault, number, seed, lengths[fault.id])
        for number in numbers
        for seed in seeds
        for fault in chosen
        if not fault.missing
    ]


def _run(
    runs: "list[_Run]", before: "Sequence[Score]", json_file: Path | None, keep: Path | None
) -> "list[Score]":
    """Run what has no score yet, until all is run or Ctrl-C; return all scores, in order."""
    from rankscope.faults import bench

    console = terminal(stderr=True)
    scores = {
        (score.fault.id, score.num_workers, score.seed, score.num_steps): score for score in before
    }
    with suppress(KeyboardInterrupt), _bar(console) as bar, bench.Bench(keep) as ranks:
        task = bar.add_task("", total=len(runs))
        for fault, number, seed, length in runs:
            key = (fault.id, number, seed, length)
            if key not in scores:
                bar.update(task, description=f"{fault.id}, {number} workers, seed {seed}")
                scores[key] = ranks.run(fault, num_workers=number, seed=seed, num_steps=length)
                if json_file is not None:
                    _write_scores(json_file, scores.values())
                if not console.is_terminal:
                    console.print(_line(scores[key]), soft_wrap=True)
            bar.advance(task)
    keys = [(fault.id, number, seed, length) for fault, number, seed, length in runs]
    return [scores[key] for key in keys if key in scores]


def _read_scores(file: Path) -> "list[Score]":
    """Return the scores that a file holds; none if there is no such file.

    Raises:
        UsageError: It cannot be read as scores.
    """
    from rankscope.faults.bench import Score
    from rankscope.faults.catalogue import catalogue

    try:
        return [Score.from_json(one, catalogue()) for one in parse(read_file(file))]
    except FileNotFoundError:
        return []
    except DAMAGES as error:
        raise UsageError(
            f"--resume expected scores that --json has written, got {file}, which cannot be read "
            f"as such ({error}); name another file, or leave --resume out"
        ) from error


def _write_scores(file: Path, scores: "Iterable[Score]") -> None:
    lines = [json.dumps(score.to_json(), ensure_ascii=False) for score in scores]
    _write(file, "[\n" + ",\n".join(lines) + "\n]\n")  # a run is a line, which diff can show


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _show(scores: "Sequence[Score]", console: Console, *, in_detail: bool) -> None:
    from rankscope.faults.summary import shares

    if in_detail:
        for score in scores:
            console.print(_line(score), soft_wrap=True)
            for finding in score.findings:
                text = f"  {finding.severity}  {finding.cause}: {finding.explanation}"
                console.print(plain(text), soft_wrap=True)
        return
    grid = Grid("id", "W", "class", "", "steps", "worker", "cause", "found", box=None)
    for score in scores:
        grid.add_row(*_cells(score))
    console.print(grid)
    console.print()
    for share in (share for share in shares(scores) if share.total):
        goal = "" if share.goal is None else f"  (goal {share.goal:.0%})"
        line = f"{share.good} of {share.total}  {share.what}{goal}"
        console.print(Text(line, style="" if share.reached else "red"), soft_wrap=True)


def _cells(score: "Score") -> Iterable[str | Text]:
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
        plain(score.problem or found),
    )


def _line(score: "Score") -> Text:
    after = "" if score.delay is None else f" after {score.delay} steps"
    return Text.assemble(
        (f"{score.fault.id} ", "bold"),
        _verdict(score),
        f"{after}  {score.fault.mechanism} ({score.num_workers} workers, seed {score.seed}, "
        f"{score.num_steps} steps, {score.seconds:.0f} s)",
        "\n" if score.problem else "",
        plain(f"  {score.problem}" if score.problem else "", "red"),
    )


def _verdict(score: "Score") -> Text:
    if score.as_expected:
        return Text("as expected", style="green")
    if score.problem:
        return Text("problem", style="red")
    if score.false_alarms:
        return Text("false alarm", style="red")
    if not score.fault.expects_finding:
        return Text("unexpected", style="red")
    return Text("not detected" if not score.detected else "other verdict", style="red")


def _expected(fault: "Fault") -> str:
    if fault.missing:
        return f"not reproduced: {fault.missing}"
    if fault.healthy:
        return "notes at most"
    if fault.severity is None:
        return "no finding"
    least = f"{fault.severity} or more" if fault.severity.name != "ERROR" else "error"
    return f"{' or '.join(fault.causes)}, {least}"


def _row_of(fault: "Fault") -> dict[str, object]:
    return {
        "id": fault.id,
        "mechanism": fault.mechanism,
        "class": str(fault.fault_class),
        "causes": list(fault.causes),
        "severity": None if fault.severity is None else str(fault.severity),
        "hits": str(fault.hits),
        "seen": list(fault.seen),
        "evidence": fault.evidence,
        "missing": fault.missing,
    }


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(file, text.encode())
    except (OSError, RunError) as error:
        raise UsageError(f"{file} cannot be written ({error}); name another") from error


def _command() -> str:
    return " ".join(["rankscope", *sys.argv[1:]])
