"""Accidents around real trainings of two ranks, each with its promise, at drawn moments.

What happens is written down in ``chaos_kinds.py`` and ``chaos_habits.py``, with what was promised
before it was tried.
``make chaos`` tries all kinds and writes the table into ``docs/chaos.md``, in twenty minutes;
``python benchmarks/chaos.py --only disk --trials 3`` tries some, and says what was seen.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import chaos_habits  # noqa: F401 registers its kinds
from chaos_kinds import KINDS, MONITOR, WHOLE, Hits, Kind, Record, moments
from chaos_scene import (
    LEFT_SECONDS,
    Outcome,
    Scene,
    forked,
    kill_descendants,
    take_children,
    take_mounts,
)
from chaos_training import PATIENCE, STEPS
from tables import fill_table

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "chaos.md"
TRIALS = 6
SEED = 1
_MODULES = (
    *(
        "pandas",
        "pyarrow.pandas_compat",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "pyarrow.parquet",
    ),
    *("rankscope.session.start", "rankscope.agent.process", "rankscope.verdict.diagnosis"),
)
"""Imported once, in place of by every rank."""

_SAYS = ("rankscope has switched itself off", "could not be closed", "training goes on")
_TRACEBACKS = ("Traceback (most recent call last)", "Exception ignored", "Fatal Python error")


@dataclass
class Trial:
    """What came of an accident.

    Attributes:
        kind: Its name.
        seed: What its moment was drawn with.
        harmed: What it did to the training that it must not do.
        lost: What is missing in the record.
        left: What was left behind.
        seconds: How much longer the training took.
        hit: Whether there was something that it could happen to; else it does not count.
        said: What the ranks have written, where a promise is broken.
    """

    kind: str
    seed: int
    harmed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0
    hit: bool = True
    said: str = ""

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        return not (self.harmed or self.lost or self.left)


@dataclass
class Stage:
    """What all trials share.

    Attributes:
        folder: Where they lie.
        library: The compiled ``chaos_calls.c``; None without a compiler.
        mounts: Whether processes may have mounts of their own.
        plain: What trainings do unwatched that nothing happens to, by what is special in them.
        counts: How many calls of each kind an agent makes.
    """

    folder: Path
    library: Path | None = None
    mounts: bool = True
    plain: dict[str, Outcome] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def lets(self, kind: Kind) -> bool:
        """Return whether this machine has what a kind of accident needs."""
        has = {"mounts": self.mounts, "library": self.library is not None}
        return all(has[each] for each in kind.needs)


def set_up(folder: Path, kinds: Sequence[Kind]) -> Stage:
    """Compile what fails, and see what trainings do that nothing happens to."""
    for module in _MODULES:
        __import__(module)
    stage = Stage(folder)
    compiler = shutil.which("cc")
    if compiler is not None:
        stage.library = folder / "calls.so"
        source = str(HERE / "chaos_calls.c")
        built = [compiler, "-O1", "-shared", "-fPIC", "-o", str(stage.library), source, "-ldl"]
        subprocess.run(built, check=True)
    watched = in_scene(stage, "watched", _watch_nothing)
    stage.mounts, stage.counts = watched["mounts"], watched["counts"]
    for training in {json.dumps(kind.training): kind.training for kind in kinds}.values():
        name = json.dumps(training)
        seen = in_scene(stage, f"plain-{len(stage.plain)}", _train_plain, training)
        stage.plain[name] = Outcome(**seen)
    return stage


def in_scene(stage: Stage, name: str, work: Any, *given: Any) -> Any:
    """Return what a function returns, in a process with mounts of its own."""
    process, answer = begin_in_scene(stage, name, work, *given)
    os.waitpid(process, 0)
    return json.loads(answer.read_text())


def begin_in_scene(stage: Stage, name: str, work: Any, *given: Any) -> tuple[int, Path]:
    """Begin to do something there; return the process, and where its answer will be."""
    folder, answer = stage.folder / name, stage.folder / f"{name}.json"
    folder.mkdir()

    def be_scene() -> int:
        take_children()
        has_mounts = take_mounts(folder)
        if has_mounts:
            (folder / "mounts").touch()
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"], tempfile.tempdir = str(folder / "tmp"), None
        os.environ.pop("RANKSCOPE_AGENT", None)
        try:
            answer.write_text(json.dumps(work(stage, folder, *given)))
        finally:
            kill_descendants()
        return 0

    return forked(be_scene), answer


def _watch_nothing(stage: Stage, folder: Path) -> dict[str, Any]:
    """Return what the system lets a scene do, and what calls the agent of a training makes."""
    scene = Scene(folder / "job", random.Random(0), watched=True, library=stage.library)
    scene.settles = True
    counts = folder / "counts"
    given = scene.failing("none", 0, nth=0) if stage.library is not None else {}
    scene.start(environment={**given, "CHAOS_COUNTS": str(counts)})
    outcome = scene.finish()
    if outcome.status != "complete":
        raise RuntimeError(f"a training that nothing happens to is not watched: {outcome}")
    lines = counts.read_text().split() if counts.exists() else []
    found = dict(zip(lines[::2], map(int, lines[1::2]), strict=True))
    return {"mounts": (folder / "mounts").exists(), "counts": found}


def _train_plain(stage: Stage, folder: Path, training: dict[str, Any]) -> dict[str, Any]:
    scene = Scene(folder / "job", random.Random(0), watched=False, training=training)
    scene.start()
    return asdict(scene.finish())


# One trial ----------------------------------------------------------------------------------------


def try_out(stage: Stage, folder: Path, kind: Kind, seed: int) -> dict[str, Any]:
    """Let an accident happen, also to an unwatched training where it hits that; judge."""
    plain = stage.plain[json.dumps(kind.training)]
    if kind.hits is Hits.TRAINING:
        unwatched, plain = _play(stage, folder / "plain", kind, seed, watched=False)
        if not unwatched.hit or None in plain.exits:  # it hangs, as torchrun sometimes does
            return asdict(Trial(kind.name, seed, hit=False))
    scene, outcome = _play(stage, folder / "watched", kind, seed, watched=True)
    trial = Trial(kind.name, seed, left=outcome.left, seconds=outcome.seconds - plain.seconds)
    trial.hit = scene.hit
    trial.harmed = list(harm(kind, outcome, plain, trial.seconds))
    trial.lost = [*scene.lost, *losses(kind, outcome, scene.due)]
    if not trial.good:
        told = {**asdict(outcome), "moment": scene.moment, "due": scene.due, "said": ""}
        trial.said = f"{told}\nunwatched: {plain}\n{outcome.said}"
    return asdict(trial)


def _play(
    stage: Stage, folder: Path, kind: Kind, seed: int, *, watched: bool
) -> tuple[Scene, Outcome]:
    scene = Scene(
        folder,
        random.Random(seed),
        watched=watched,
        training=kind.training,
        library=stage.library,
        counts=stage.counts,
    )
    kind.play(scene)
    return scene, scene.finish()


def harm(kind: Kind, outcome: Outcome, plain: Outcome, seconds: float) -> Iterator[str]:
    """Yield what an accident did to a training that it must not do.

    Args:
        kind: The accident.
        outcome: How the training went.
        plain: The same without the monitor; without an accident, too, where that hits the monitor.
        seconds: How much longer it took.
    """
    if None in outcome.exits:
        yield f"it hangs: {outcome.exits}"
    elif outcome.exits != plain.exits and not {*outcome.exits, *plain.exits} <= {*kind.exits}:
        yield f"it ended with {outcome.exits}, unwatched with {plain.exits}"
    for own, other in zip(outcome.bits, plain.bits, strict=True):
        if own and other and own != other:
            yield "other bits"
    if kind.hits is MONITOR and not all(outcome.bits):
        yield "it did not come to its end"
    if seconds > kind.seconds * PATIENCE:
        yield f"it took {seconds:.1f} s longer"
    raised, raised_plain = (any(t in o.said for t in _TRACEBACKS) for o in (outcome, plain))
    if raised and not raised_plain and not kind.raises:
        yield "a traceback on its error stream"


def losses(kind: Kind, outcome: Outcome, due: int | None) -> Iterator[str]:
    """Yield what is missing in the record.

    Args:
        kind: The accident.
        outcome: How the training went.
        due: How many steps have to be there; None: all that were handed over.
    """
    steps, done = outcome.steps, min(outcome.done)
    count = len(steps or ())
    if steps is None and kind.record is Record.SAID and not due:
        pass  # there may be no record any more
    elif steps is None:
        yield f"no record: {outcome.status}"
    elif steps and steps != [*range(steps[0], steps[0] + count)]:
        yield f"steps are missing between others: {steps}"
    if kind.record is WHOLE:
        if count != STEPS or outcome.status != "complete":
            yield f"{count} of {STEPS} steps, {outcome.status}"
        return
    handed = done - 1 if due is None and kind.record is Record.HANDED else due or 0
    if count < handed:
        yield f"{count} of {handed} steps"
    said = any(word in outcome.said for word in _SAYS)
    if kind.record is Record.SAID and count < STEPS and not said:
        yield f"{count} of {STEPS} steps, and nothing is said"
    if outcome.status == "running" and kind.record is Record.HANDED:
        yield "the record says that it still runs"


# All trials, and the page -------------------------------------------------------------------------


def run(stage: Stage, trials: Sequence[tuple[Kind, int]], at_once: int) -> Iterator[Trial]:
    """Try accidents, some at once; yield what came of each.

    One that has missed is tried again at another moment, once for each trial of its kind.
    """
    waiting = [(number, *trial) for number, trial in enumerate(trials)]
    again = Counter(kind.name for kind, _ in trials)
    count = itertools.count(len(trials))
    running: dict[int, tuple[Kind, int, Path]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            number, kind, seed = waiting.pop(0)
            process, answer = begin_in_scene(stage, str(number), try_out, kind, seed)
            running[process] = (kind, seed, answer)
        process, _ = os.wait()
        if process not in running:
            continue
        kind, seed, answer = running.pop(process)
        shutil.rmtree(answer.with_suffix(""), ignore_errors=True)
        if answer.exists():
            trial = Trial(**json.loads(answer.read_text()))
        else:
            trial = Trial(kind.name, seed, harmed=["the trial itself has failed"])
        if not trial.hit and again[kind.name]:
            again[kind.name] -= 1
            waiting.append((next(count), kind, seed + 1))
        yield trial


def until_interrupted(trials: Iterator[Trial]) -> Iterator[Trial]:
    """Yield trials until the last one, or Ctrl-C: the table is of those that have ended."""
    with suppress(KeyboardInterrupt):
        yield from trials


def table_of(kinds: Sequence[Kind], trials: Sequence[Trial]) -> str:
    """Return Markdown tables of the kinds, after what they add up to."""
    tried = {kind.name: [trial for trial in trials if trial.kind == kind.name] for kind in kinds}
    counts = [len(own) for own in tried.values() if own]
    usual = max(counts, key=counts.count, default=0)
    harmed, lost, left = _broken(trials)
    lines = [
        f"{len(trials)} accidents of {len(counts)} kinds, {usual} of each unless stated: {harmed} "
        f"trainings harmed, {lost} records without what was promised, {left} with something left "
        f"after {LEFT_SECONDS:g} s. Delays are the longest."
    ]
    for hits in Hits:
        lines += ["", f"| accident of the {hits} | record | delay, s |", "|---|---|---|"]
        shown = [kind for kind in kinds if kind.hits is hits and tried[kind.name]]
        lines += [_row(kind, tried[kind.name], usual) for kind in shown]
    untried = [name for name, own in tried.items() if not own]
    if untried:
        lines += ["", f"Not tried on this machine: {'; '.join(untried)}."]
    return "\n".join(lines)


def _row(kind: Kind, own: Sequence[Trial], usual: int) -> str:
    """Return a kind's row, with what is unusual in it."""
    times = "" if len(own) == usual else f" ({len(own)} ×)"
    bound = "" if kind.seconds == Kind.seconds else f" (bound {kind.seconds:g})"
    delay = max(0.0, *(trial.seconds for trial in own))
    words = zip(_broken(own), ("harmed", "lost", "left behind"), strict=True)
    broken = "".join(f", {count} {what}" for count, what in words if count != "0")
    return f"| {kind.name}{times} | {kind.record} | {delay:.1f}{bound}{broken} |"


def _broken(trials: Sequence[Trial]) -> list[str]:
    """Return of how many trials the training was harmed, steps were lost, something was left."""
    counts = [sum(bool(getattr(t, what)) for t in trials) for what in ("harmed", "lost", "left")]
    return [f"**{count}**" if count else "0" for count in counts]


def main() -> int:
    """Try the accidents that were asked for; return how many broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="kinds whose name holds this")
    parser.add_argument("--trials", type=int, default=TRIALS, help="how many of each kind")
    parser.add_argument("--seed", type=int, default=SEED, help="what moments are drawn with")
    parser.add_argument("--at-once", type=int, default=2, help="how many trainings at a time")
    parser.add_argument("--quick", action="store_true", help="one trial of the quickest kinds")
    parser.add_argument("--write", action="store_true", help="write docs/chaos.md")
    asked = parser.parse_args()
    kinds = [each for each in KINDS if asked.only in each.name and (each.quick or not asked.quick)]
    done: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        stage = set_up(Path(folder), kinds)
        able = [each for each in kinds if stage.lets(each)]
        drawn = moments(able, 1 if asked.quick else asked.trials, asked.seed)
        for trial in until_interrupted(run(stage, drawn, asked.at_once)):
            word = "missed" if not trial.hit else "good" if trial.good else "BROKEN"
            print(word, trial.kind, trial.seed, flush=True)
            done += [trial] * trial.hit
            if not trial.good:
                print(trial.harmed, trial.lost, trial.left, trial.said[:6000], sep="\n", flush=True)
    table = table_of(kinds, done)
    print(table)
    if asked.write:
        fill_table(PAGE, "python benchmarks/chaos.py", table)
    return sum(not trial.good for trial in done)


if __name__ == "__main__":
    sys.exit(main())
