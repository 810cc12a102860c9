"""``rankscope parity``: whether two layouts of a training train the same."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from rankscope.agent.rank_processes import ending_of
from rankscope.bus.parity import FOLDER
from rankscope.bus.words import count
from rankscope.cli.output import (
    HtmlOption,
    JsonOption,
    labelled,
    plain,
    points,
    print_json,
    show,
    terminal,
)
from rankscope.errors import RankscopeError, RunError, UsageError
from rankscope.integrations.parity import ParityJob
from rankscope.integrations.run_script import VARIABLE, ScriptJob, command_for, name_of
from rankscope.report import needs_extra
from rankscope.tools.parity.compare import decide, decide_resumed
from rankscope.tools.parity.reading import (
    NotRecordedError,
    Recording,
    read_side,
)
from rankscope.tools.parity.result import Answer, Kind

Rules = tuple[tuple[str, Sequence[str]], ...]
MAX_TENSORS = 3  # tensors that the terminal shows

_LOOK = {
    "the same within rounding": ("≈", "green"),
    "not the same": ("≠", "red"),
    "not comparable": ("?", "yellow"),
}


def parity(
    a: Annotated[
        str,
        typer.Option("-a", metavar="COMMAND", help="A training, or a recorded run."),
    ],
    b: Annotated[str, typer.Option("-b", metavar="COMMAND", help="The other one.")],
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to compare.", min=1)] = 5,
    parallel: Annotated[bool, typer.Option("--parallel", help="Run both side by side.")] = False,
    same_start: Annotated[
        bool, typer.Option("--same-start", help="Copy A's initial parameters into B.")
    ] = False,
    no_dropout: Annotated[
        bool, typer.Option("--no-dropout", help="Switch dropout off in both.")
    ] = False,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="NAMES",
            help="Names of one parameter: A's=B's, or a file of such lines.",
        ),
    ] = None,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Name the first layer that computes something else.")
    ] = False,
    resume_at: Annotated[
        int | None,
        typer.Option(metavar="K", help="End B after K steps, and go on with -b2.", min=1),
    ] = None,
    b2: Annotated[
        str | None,
        typer.Option("-b2", metavar="COMMAND", help="Resumes B."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest time of each training.", min=1)
    ] = 1800.0,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep the records here.", show_default="a temporary directory"
        ),
    ] = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Run a training at two layouts, and find the first thing that differs between them.

    Both scripts stay as they are. Each is ended cleanly at the beginning of the step after the
    last one that counts. Start, samples, label tokens, loss, gradient, clipping, update and
    optimizer state are compared in this order, parameter by parameter, whatever the sharding.

    Exit code: 0 the same within rounding; 1 not the same; 2 not comparable, or bad usage or input.
    """
    for option, command in (("-a", a), ("-b", b), ("-b2", b2)):
        if command is not None:
            _check_command(option, command)
    if (resume_at is None) != (b2 is None):
        raise UsageError("--resume-at and -b2 belong together: give both or none")
    if resume_at is not None and resume_at >= steps:
        raise UsageError(f"--resume-at expected a step before --steps {steps}, got {resume_at}")
    rules = _rules_of(names or (), recorded=Path(a).is_dir())
    with _records(run_dir) as folder:
        pair = _Pair(a, b, steps, folder, timeout, parallel, same_start, no_dropout, bisect, rules)
        try:
            answer = pair.compare() if resume_at is None else pair.resume(resume_at, b2 or "")
        except UsageError:
            raise
        except RankscopeError as error:
            answer = Answer(Kind.NOT_COMPARABLE, f"Not comparable: {error}.".replace("..", "."))
    sides = {"A": a, "B": b if b2 is None else f"{b}; resumed by {b2}"}
    written = [] if html is None else [_write_page(answer, html, sides)]
    if as_json:
        print_json({**answer.to_json(), "written": written})
    else:
        render_answer(answer, terminal())
        for path in written:
            terminal().print(labelled("  Written", path), soft_wrap=True)
    if answer.exit_code:
        raise typer.Exit(answer.exit_code)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two trainings that are to be compared; the fields are the command's options."""

    a: str
    b: str
    steps: int
    folder: Path
    timeout: float
    parallel: bool
    same_start: bool
    no_dropout: bool
    bisect: bool
    rules: tuple[Rules, Rules]

    def compare(self) -> Answer:
        """Run both and compare them."""
        sides = self.run(self.steps)
        return decide(*sides, self._again, repeats_a=_recorded_run(self.a) is None)

    def resume(self, at: int, resumed: str) -> Answer:
        """Run A on end, B up to a step and on from there; compare all of them."""

        def resume() -> Recording:
            job = self._job(self.steps - at, first_step=at, rules=self.rules[1])
            later = self._recorded("b2", resumed, job, name="the resumption of B")
            _check(later, self.steps - at, "the resumption of B")
            return later

        sides = self.run(at)
        repeats_a = _recorded_run(self.a) is None
        return decide_resumed(*sides, resume, self._again, repeats_a=repeats_a)

    def run(self, steps_of_b: int) -> tuple[Recording, Recording]:
        """Run A, unless it is recorded, and B."""
        recorded = _recorded_run(self.a)
        job_a = self._job(self.steps, save_start=self.same_start, rules=self.rules[0])
        job_b = self._job(steps_of_b, load_start=self._start(), rules=self.rules[1])
        commands = [Command("B", self.b, self.folder / "b", job_b)]
        if recorded is None:
            commands.insert(0, Command("A", self.a, self.folder / "a", job_a))
        run_commands(commands, self.timeout, together=self.parallel and not self.same_start)
        side_a = read_side(recorded or self.folder / "a", "A")
        side_b = read_side(self.folder / "b", "B")
        _check(side_a, self.steps, "A")
        _check(side_b, steps_of_b, "B")
        return side_a, side_b

    def _again(self, side: Recording, eps: float) -> Recording:
        """Record a side once more, moved by ``eps``."""
        of_b = side.name == "B"
        steps = max(side.steps) + 1
        job = self._job(steps, eps=eps, load_start=self._start(), rules=self.rules[of_b])
        name = f"{side.name}, run once more,"
        return self._recorded("moved", self.b if of_b else self.a, job, name=name)

    def _start(self) -> str:
        """Return the folder of A's start, empty unless all others begin with it."""
        place = _recorded_run(self.a) or self.folder / "a"
        return str(place / "start") if self.same_start else ""

    def _recorded(self, place: str, command: str, job: ParityJob, *, name: str) -> Recording:

        folder = self.folder / place
        run_commands([Command(name, command, folder, job)], self.timeout, together=False)
        return read_side(folder, name)

    def _job(self, steps: int, **more: Any) -> ParityJob:
        job = ParityJob(steps, no_dropout=self.no_dropout, bisects=self.bisect)
        return replace(job, **more)


def _check_command(option: str, text: str) -> None:
    """Check a command before any training starts; UsageError if it is none."""
    if not text.strip():
        raise UsageError(f"{option} expected a command, got nothing")
    if Path(text).is_dir():
        if option != "-a":
            raise UsageError(
                f"{option} expected a command, got the directory {text}: a recorded run can be -a "
                "alone, as B may have to run again"
            )
        return
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} expected a command, got {text!r} ({error})") from None
    try:
        command_for(words, module=False, original=[sys.executable])
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def _rules_of(given: Sequence[str], *, recorded: bool) -> tuple[Rules, Rules]:
    """Return the rules by which A, and B, name parameters as the other one does.

    The side with several names for a parameter takes the name of the other one; else B does.
    """
    of_a = []
    of_b = []
    for line in _lines_of(given):
        own, others = ([n.strip() for n in side.split(",")] for side in line.partition("=")[::2])
        if not all(own) or not all(others) or min(len(own), len(others)) > 1:
            raise UsageError(
                "--map expected a name, =, and the names of its parts (or the other way round), "
                f"got {line}"
            )
        if len({name.count("*") for name in (*own, *others)}) > 1:
            raise UsageError(f"--map expected as many * in each name, got {line}")
        if len(own) == 1:
            of_b.append((own[0], others))
        elif recorded:
            raise UsageError(
                "--map expected one name of A, as -a is a recorded run, whose parameters cannot be "
                f"put together any more, got {line}"
            )
        else:
            of_a.append((others[0], own))
    return tuple(of_a), tuple(of_b)


def _lines_of(given: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for each in given:
        try:
            text = Path(each).read_text("utf-8") if "=" not in each else each
        except OSError as error:
            raise UsageError(
                f"--map expected names, such as a.weight=b.weight, or a file of such lines, got "
                f"{each} ({error.strerror})"
            ) from None
        lines += [line for one in text.splitlines() if (line := one.partition("#")[0].strip())]
    return lines


def _check(side: Recording, steps: int, name: str) -> None:
    if len(side.steps) < steps:
        raise NotRecordedError(f"{name} ended after {len(side.steps)} of {steps} steps")


def _say(words: str) -> None:
    """Print a line of progress: a training may take long before its first step."""
    terminal(stderr=True).print(plain(f"  {words} …", "dim"), soft_wrap=True)


def _recorded_run(given: str) -> Path | None:
    """Return the directory of a recorded run; None of a command."""
    path = Path(given)
    if not path.is_dir():
        return None
    if not (path / FOLDER).is_dir():
        raise UsageError(
            f"-a expected a run that was recorded for parity, got {path}, which has no "
            f"{FOLDER}/: record one by rankscope run --parity 5 SCRIPT"
        )
    return path


@contextmanager
def _records(run_dir: Path | None) -> Iterator[Path]:
    """Yield the directory of the records; a temporary one is removed."""
    if run_dir is not None:
        if run_dir.is_dir() and any(run_dir.iterdir()):
            raise UsageError(f"--run-dir expected a new or empty directory, got {run_dir}")
        yield run_dir
        return
    folder = Path(tempfile.mkdtemp(prefix="rankscope-parity-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_page(answer: Answer, html: Path, sides: Mapping[str, str]) -> str:
    with needs_extra(html.name, "web"):
        from rankscope.tools.comparison_pages import write_parity_page
    return str(write_parity_page(answer, html, sides))


def render_answer(answer: Answer, console: Console) -> None:
    """Print the answer, in at most twelve lines on a terminal of usual width."""
    sign, colour = _LOOK[str(answer.kind)]
    where = "" if answer.difference is None else f"  {answer.difference}"
    if answer.stage is not None:
        where += f": {answer.stage}, step {answer.step}"
    show(
        console,
        Text.assemble(
            (f"{sign} {str(answer.kind).upper()}", f"bold {colour}"), (where, "dim"), "\n",
            plain(answer.headline),
        ),
    )  # fmt: skip
    if answer.advice:
        show(console, labelled("What to do", answer.advice))
    points(console, [each.words for each in answer.differences[:MAX_TENSORS]])
    for note in (*answer.notes[:3], answer.limits):
        if note:
            show(console, plain(note, "dim"))


GRACE_SECONDS = 10.0  # how long processes may take to end after a signal

FIRST_LINE_SECONDS = 15.0
"""Seconds until a line reports the progress; each further one comes after twice as many."""

_LOG = "output.txt"
_MOST_WORDS = 200
_RAISED = re.compile(r"(\[\w+\]: *)?[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
"""The line of a traceback that names the exception, under ``torchrun`` behind the rank."""


class CommandError(RunError):
    """A training's command has failed, or did not end in time."""


@dataclass(slots=True)
class Command:
    """A training that is recorded: its name in messages, its command line, what is recorded.

    The run's directory must not hold a record.
    """

    name: str
    text: str
    directory: Path
    parity: ParityJob
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; CommandError if it cannot be, UsageError without such a script or command."""
        words = shlex.split(self.text)
        command = command_for(words, module=False, original=[sys.executable])
        _say(f"Running {self.name.rstrip(',')}: {self.text}")
        self.directory.mkdir(parents=True, exist_ok=True)
        name = name_of(words, module=False)
        job = ScriptJob(str(self.directory.absolute()), name, parity=asdict(self.parity))
        with (self.directory / _LOG).open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    env=job.to_environment(dict(os.environ)),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise CommandError(f"{self.name} cannot be started: {error}") from error

    def wait(self, until: float) -> None:
        """Wait for its end, until a time of the monotonic clock; CommandError if it fails."""
        begun = time.monotonic()
        pause = FIRST_LINE_SECONDS
        while (code := self._code_in(min(pause, until - time.monotonic()))) is None:
            if time.monotonic() >= until:
                self.end()
                raise CommandError(
                    f"{self.name} had not ended in time and was ended; give a longer --timeout, or "
                    f"see where it hangs: {self._last_words()}"
                )
            seconds = time.monotonic() - begun
            pause = max(pause, seconds)
            steps = f"{self._num_steps} of {count(self.parity.steps, 'step')} recorded"
            _say(f"{self.name.rstrip(',')} runs for {seconds:.0f} s: {steps}")
        self._end_others()
        if code:
            raise CommandError(f"{self.name} {ending_of(code)}: {self._last_words()}")

    def _code_in(self, seconds: float) -> int | None:
        """Return its exit code within so many seconds; None if it still runs."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(max(seconds, 0.0))
        return None

    @property
    def _num_steps(self) -> int:
        """How many steps some rank has recorded."""
        ranks = (self.directory / FOLDER).glob("rank-*")
        return max((len([*rank.glob("step-*")]) for rank in ranks), default=0)

    def end(self) -> None:
        """End all its processes; does nothing after its end."""
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._end_others()

    def _end_others(self) -> None:
        """End processes that it has started in sessions of their own, as torchrun does."""
        for number in self._others():
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGTERM)
        until = time.monotonic() + GRACE_SECONDS
        while (left := self._others()) and time.monotonic() < until:
            time.sleep(0.05)
        for number in left:
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)

    def _others(self) -> list[int]:
        """Return the processes whose environment holds this job."""
        mark = f'"run_dir": "{self.directory.absolute()}"'.encode()
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            if int(place.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                environment = (place / "environ").read_bytes()
                if f"{VARIABLE}=".encode() in environment and mark in environment:
                    found.append(int(place.name))
        return found

    def _last_words(self) -> str:
        """Return the line that names the first error, or the last one at all."""
        with contextlib.suppress(OSError):
            text = (self.directory / _LOG).read_text("utf-8", "replace")
            lines = [line.rstrip() for line in text.splitlines() if line.strip()]
            errors = [line for line in lines if _RAISED.match(line) and "elastic" not in line]
            if lines:
                return (errors[0] if errors else lines[-1].strip())[:_MOST_WORDS]
        return "it printed nothing"


def run_commands(commands: list[Command], seconds: float, *, together: bool) -> None:
    """Run commands, one after the other or side by side; each may take so many seconds.

    CommandError when one has failed; all others have been ended.
    """
    before = _raise_at_sigterm()
    try:
        for command in commands:
            command.start()
            if not together:
                command.wait(time.monotonic() + seconds)
        until = time.monotonic() + seconds
        for command in commands if together else ():
            try:
                command.wait(until)
            except CommandError as error:
                if "out of memory" not in str(error).lower():
                    raise
                raise CommandError(f"{error}; try it without --parallel") from error
    finally:
        for command in commands:
            command.end()
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _raise_at_sigterm() -> Any:
    """Make SIGTERM an exception, so that trainings are ended; return the handler before."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    return signal.signal(signal.SIGTERM, leave)
