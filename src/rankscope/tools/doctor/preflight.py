"""The preflight: the order of the stages, and how every worker goes through them.

Rank 0 judges, and names workers that hang or fail.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from rankscope import RankscopeError
from rankscope.bus.replicas import ranks_by
from rankscope.bus.words import name_ranks
from rankscope.errors import UsageError
from rankscope.files import to_plain
from rankscope.tools.doctor import collectives, determinism, loader, model, topology
from rankscope.tools.doctor.stage import (
    BLOCKS,
    Bench,
    CheckResult,
    Meeting,
    Options,
    PreflightStage,
    Status,
    c10d,
    choose_device,
    find_place,
    function_stage,
    in_one_line,
    not_given,
    open_stores,
    where_it_is,
)
from rankscope.tools.functions import split_name


def run_preflight(options: Options, report: Callable[[Sequence[CheckResult]], int]) -> int:
    """Check everything, as a rank that a launcher started, or alone; return the exit code.

    Every rank calls it; rank 0 alone calls ``report``, which prints the results and returns the
    exit code, 0 on the other ranks. Standard output of the user's functions goes to standard error
    on rank 0, and nowhere on other ranks. When a rank hangs, this process ends without returning. A
    UsageError is raised on rank 0 alone where the ranks could meet.
    """
    place = find_place(os.environ)
    try:
        _check(options)
    except UsageError:
        if place.rank == 0:
            raise
        return 0  # rank 0 reports it for all
    quiet = QuietOutput(place.rank)

    def report_restored(results: Sequence[CheckResult]) -> int:
        quiet.restore()
        return report(results)

    try:
        first, second = open_stores(place, options.seconds)
        bench = Bench(place, options, c10d.PrefixStore("group", first), choose_device(place))
        meetings = (
            Meeting(first, place.rank, place.num_ranks),
            Meeting(second, place.rank, place.num_ranks),
        )
        return Examination(stages(options), bench, meetings, report_restored).run()
    finally:
        quiet.restore()


def stages(options: Options) -> list[PreflightStage]:
    """Return the stages in order: the user's own functions last, since they may hang."""
    return [
        topology.STAGE,
        topology.ENVIRONMENT_STAGE,
        *(function_stage(option) for option in BLOCKS if getattr(options, option)),
        topology.GROUP_STAGE,
        collectives.STAGE,
        collectives.REPEATED_STAGE,
        collectives.SPEED_STAGE,
        model.STAGE if options.model else not_given("model"),
        loader.STAGE if options.loader else not_given("loader"),
        determinism.STAGE
        if options.model and options.loader
        else not_given("determinism", "--model and --loader"),
    ]


def _check(options: Options) -> None:
    for option in ("model", "optimizer", "loader"):
        name = getattr(options, option)
        if name is not None:
            split_name(f"--{option}", name)
    if options.optimizer and not options.model:
        raise UsageError("--optimizer needs --model: the optimizer's function gets the model")
    if options.batches < 1:
        raise UsageError(f"--batches must be at least 1, got {options.batches}")
    if not options.seconds > 0:
        raise UsageError(f"--seconds must be positive, got {options.seconds:g}")


class QuietOutput:
    """Redirects standard output, also of libraries in C, until :meth:`restore`.

    Rank 0's goes to its standard error, so that standard output holds the command's own lines
    alone; the other ranks print nothing.
    """

    def __init__(self, rank: int) -> None:
        self._lock = threading.Lock()
        self._saved: dict[int, int] = {}
        self._stdout = sys.stdout
        _flush()
        if rank == 0:
            sys.stdout = sys.stderr
        instead = os.dup(2) if rank == 0 else os.open(os.devnull, os.O_WRONLY)
        for number in (1,) if rank == 0 else (1, 2):
            self._saved[number] = os.dup(number)
            os.dup2(instead, number)
        os.close(instead)

    def restore(self) -> None:
        """Print as before; further calls do nothing."""
        with self._lock:
            saved = self._saved
            self._saved = {}
        if saved:
            _flush()
            sys.stdout = self._stdout
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


FINISHED = "finished"  # announced by rank 0 after its report
TERMINATED = "terminated"  # posted by each worker that gets SIGTERM

_PAUSE = 0.05


class Watcher:
    """Calls back when this worker hangs in a stage, or gets SIGTERM.

    The signal is noticed even while the main thread is inside a library that does not return: it
    is written into a pipe at once. Both callbacks run once, in the watcher's thread, which alone
    uses this connection to the other workers.
    """

    def __init__(
        self,
        meeting: Meeting,
        seconds: float,
        *,
        on_stuck: Callable[[str], None],
        on_terminated: Callable[[], None],
    ) -> None:
        self._meeting = meeting
        self._seconds = seconds
        self._on_stuck = on_stuck
        self._on_terminated = on_terminated
        self._main = threading.get_ident()
        self._stage: tuple[str, float] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rankscope-doctor", daemon=True)
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before: Any = None
        self._fd_before = -1

    def __enter__(self) -> "Watcher":
        if threading.current_thread() is threading.main_thread():
            self._fd_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            self._before = signal.signal(signal.SIGTERM, _defer_to_watcher)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            signal.set_wakeup_fd(self._fd_before)
        os.close(self._reading)
        os.close(self._writing)

    @contextmanager
    def watching(self, stage: str) -> Iterator[None]:
        """Watch the main thread while it works on a stage."""
        self._stage = (stage, time.monotonic())
        try:
            yield
        finally:
            self._stage = None

    def _watch(self) -> None:
        known = ""
        while not self._over.is_set():
            ready, _, _ = select.select([self._reading], [], [], _PAUSE)
            if ready and signal.SIGTERM in os.read(self._reading, 64):
                self._meeting.post(TERMINATED, True)
                self._on_terminated()
                return
            stage = self._stage
            if stage is None or time.monotonic() - stage[1] < self._seconds:
                continue
            if stage[0] != known:
                known = stage[0]
                where = where_it_is(sys._current_frames().get(self._main))
                self._meeting.post(f"stuck/{known}", where)
                self._on_stuck(known)
            try:
                finished = bool(self._meeting.announced(FINISHED))
            except RuntimeError:  # rank 0 has ended, and the meeting place with it
                finished = True
            if finished:
                os._exit(0)  # the main thread cannot be interrupted; rank 0 has reported the stage


def _defer_to_watcher(number: int, frame: FrameType | None) -> None:
    """Let the main thread go on: the watcher ends the process after its report."""


Post = Mapping[str, Any]  # a worker's result of a stage: ``facts``, ``error`` or ``usage``


def skipped(stage: PreflightStage, why: str) -> CheckResult:
    """Return the result of a stage that was left out."""
    return CheckResult(Status.SKIPPED, why, name=stage.topic)


def failed_somewhere(stage: PreflightStage, posts: Sequence[Post]) -> tuple[CheckResult, str]:
    """Return the result of a stage that raised on some workers, and why others are skipped."""
    by_error = ranks_by([str(post.get("error") or post.get("usage") or "") for post in posts])
    by_error.pop("", None)
    ranks = sorted(rank for group in by_error.values() for rank in group)
    problems = "; ".join(f"{name_ranks(group)}: {error}" for error, group in by_error.items())
    advice = stage.advice or "See the exception; run this rank's function alone for its traceback."
    if len(ranks) < len(posts):
        advice += f" The other {'rank' if len(posts) - len(ranks) == 1 else 'ranks'} had no error."
    numbers = {"errors": by_error}
    result = CheckResult(Status.ERROR, problems, advice, numbers, tuple(ranks), stage.topic)
    return result, f"{stage.title} failed on {name_ranks(ranks)}"


def unfinished(
    stage: PreflightStage, posts: Mapping[int, Post], meeting: Meeting, seconds: float
) -> CheckResult:
    """Return the result of a stage that some workers did not finish within ``seconds``."""
    missing = [rank for rank in range(meeting.num_ranks) if rank not in posts]
    places: dict[str, list[int]] = {}
    for rank, where in meeting.posted(f"stuck/{stage.topic}").items():
        if rank in missing:
            places.setdefault(str(where), []).append(rank)
    errors = {rank: str(post["error"]) for rank, post in posts.items() if "error" in post}
    arrivals = {rank: meeting.store.add(f"here/{rank}", 0) for rank in range(meeting.num_ranks)}
    never = [rank for rank in missing if not arrivals[rank]]
    twice = [rank for rank, number in arrivals.items() if number > 1]
    placed = {rank for group in places.values() for rank in group}
    silent = [rank for rank in missing if rank not in placed and rank not in never]
    problems = [f"{name_ranks([rank])}: {error}" for rank, error in errors.items()]
    if never:
        came = meeting.num_ranks - len(never)
        problems.append(
            f"{name_ranks(never)} did not start within {seconds:g} s; {came} of "
            f"{meeting.num_ranks} came"
        )
    if twice:
        problems.append(f"{name_ranks(twice)} came more than once")
    if silent:
        does = "does" if len(silent) == 1 else "do"
        problems.append(f"{name_ranks(silent)} {does} not answer any more")
    for where, ranks in sorted(places.items(), key=lambda item: len(item[1])):
        verb = "is" if len(ranks) == 1 else "are"
        problems.append(
            f"{name_ranks(ranks)} did not finish within {seconds:g} s and {verb} at {where}"
        )
    return CheckResult(
        Status.ERROR,
        "; ".join(problems),
        _advice(never=never, errors=errors, places=places),
        {"missing": missing, "errors": errors, "places": places},
        tuple(sorted({*errors, *missing, *twice})),
        stage.topic,
    )


def gone_while_working(stage: PreflightStage, gone: Sequence[int]) -> CheckResult:
    """Return the result of a stage in which the launcher ended all workers, ``gone`` first."""
    if not gone:
        found = "the launcher or a scheduler asked all ranks to end"
        return CheckResult(Status.ERROR, found, "Start the preflight again.", name=stage.topic)
    found = f"{name_ranks(gone)} ended without a word, so the launcher ended the others"
    advice = (
        "A process that ends like this was killed (out of memory?) or crashed in a library: "
        "look at its exit code in the launcher's lines below, and at its host's system log."
    )
    return CheckResult(Status.ERROR, found, advice, ranks=tuple(gone), name=stage.topic)


def _advice(
    *, never: Sequence[int], errors: Mapping[int, str], places: Mapping[str, Sequence[int]]
) -> str:
    if never:
        return (
            f"Look at the log and the host of {name_ranks(never)}: did the launcher start it, does "
            "it reach the others? If it is only slow to start, raise --seconds."
        )
    if errors:
        return f"Repair what failed on {name_ranks(list(errors))}; the others waited for it."
    if len(places) > 1:
        return (
            "Look at the rank that is at another place than the rest: ranks wait for each other in "
            "collectives. If the work takes that long, raise --seconds."
        )
    return "Look at that line. If the work does take that long, raise --seconds."


GRACE = 1.5  # seconds that rank 0 waits longer than a stage may take, for results on their way

Report = Callable[[Sequence[CheckResult]], int]  # prints, returns the exit code; once, on rank 0


class Examination:
    """One worker's part in the preflight.

    The first stage needs no process group and counts the workers. Of the two connections to the
    others the main thread uses the first and the watcher the second.
    """

    def __init__(
        self,
        stages: Sequence[PreflightStage],
        bench: Bench,
        meetings: tuple[Meeting, Meeting],
        report: Report,
    ) -> None:
        self._stages = stages
        self._bench = bench
        self._meeting, self._other_meeting = meetings
        self._report = report
        self._seconds = bench.options.seconds
        self._results: list[CheckResult] = []
        self._why_skipped: dict[str, str] = {}
        self._at: PreflightStage = stages[0]
        self._began = time.monotonic()
        self._concluding = threading.Lock()

    def run(self) -> int:
        """Run all stages; return the exit code. UsageError if no worker has a named function."""
        self._meeting.count_in(f"here/{self._meeting.rank}")
        try:
            with Watcher(
                self._other_meeting,
                self._seconds,
                on_stuck=self._stuck,
                on_terminated=self._terminated,
            ) as watcher:
                goes_on = all(self._go_through(stage, watcher) for stage in self._stages)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        if self._meeting.rank == 0:
            code = self._report(self._results)
            self._meeting.announce(FINISHED)
            return code
        if goes_on:
            with contextlib.suppress(RuntimeError):  # rank 0 has ended, and the meeting place
                self._meeting.wait((FINISHED,), time.monotonic() + self._seconds)
        return 0

    def _go_through(self, stage: PreflightStage, watcher: Watcher) -> bool:
        """Run one stage; return whether there are more."""
        self._at = stage
        self._began = time.monotonic()
        first = self._meeting.rank == 0
        if stage.topic in self._why_skipped:
            if first:
                self._results.append(skipped(stage, self._why_skipped[stage.topic]))
            return True
        if first:  # each may take up to options.seconds, and much longer to load torch
            print(f"rankscope doctor: {stage.title} …", file=sys.stderr, flush=True)
        with watcher.watching(stage.topic):
            post = self._look(stage)
        self._meeting.post(stage.topic, post)
        if first:
            self._judge(stage)
            return True
        return self._await_rank_0(stage)

    def _look(self, stage: PreflightStage) -> dict[str, Any]:
        try:
            return {"facts": to_plain(stage.look(self._bench))}
        except (Exception, SystemExit) as error:
            kind = "usage" if isinstance(error, UsageError) else "error"
            return {kind: in_one_line(error)}

    def _judge(self, stage: PreflightStage) -> None:
        until = self._began + self._seconds + GRACE
        posts = self._meeting.collect(stage.topic, until)
        if len(posts) < self._meeting.num_ranks:
            self._conclude(unfinished(stage, posts, self._meeting, self._seconds))
        ordered = [posts[rank] for rank in sorted(posts)]
        if all("usage" in post for post in ordered):
            self._meeting.announce(FINISHED)
            raise UsageError(ordered[0]["usage"])
        if all("facts" in post for post in ordered):
            self._results += stage.judge([post["facts"] for post in ordered])
            skips: dict[str, str] = {}
        else:
            result, why = failed_somewhere(stage, ordered)
            self._results.append(result)
            skips = {
                other.topic: why
                for other in self._stages
                if other.topic in stage.blocks or (stage.together and other.needs_group)
            }
        self._why_skipped |= skips
        self._meeting.announce(f"go/{stage.topic}", skips)

    def _await_rank_0(self, stage: PreflightStage) -> bool:
        """Wait until rank 0 has judged a stage; return whether there are more."""
        until = time.monotonic() + 2 * self._seconds + 10
        topic = f"go/{stage.topic}"
        try:
            if not self._meeting.wait((topic, FINISHED), until):
                self._rank_0_is_gone(stage)
            skips = self._meeting.announced(topic)
        except RuntimeError:
            return False  # rank 0 has ended, and the meeting place with it
        if skips is None:
            return False
        self._why_skipped |= skips
        return True

    def _rank_0_is_gone(self, stage: PreflightStage) -> None:
        """Report, from one of the other ranks, which ranks are missing."""
        if self._meeting.count_in("reporter") > 1:
            raise SystemExit(1)
        came = self._meeting.posted(self._stages[0].topic)
        missing = [rank for rank in range(self._meeting.num_ranks) if rank not in came]
        raise RankscopeError(
            f"{name_ranks(missing or [0])} did not {'answer' if came.get(0) else 'start'} while "
            f"the others were at {stage.title.lower()!r}: look at its log and at its host"
        )

    def _stuck(self, topic: str) -> None:
        """Report the ranks that hang, from the watcher's thread, when rank 0 itself hangs."""
        if self._meeting.rank != 0:
            return
        time.sleep(GRACE)
        posts = self._other_meeting.posted(topic)
        if 0 not in posts:
            self._conclude(unfinished(self._at, posts, self._other_meeting, self._seconds))

    def _terminated(self) -> None:
        """Report the ranks that ended before SIGTERM: a launcher sends it to all when one died."""
        if self._meeting.rank != 0:
            os._exit(1)
        alive = self._other_meeting.collect(TERMINATED, time.monotonic() + GRACE)
        gone = sorted(set(range(self._meeting.num_ranks)) - set(alive))
        self._conclude(gone_while_working(self._at, gone))

    def _conclude(self, result: CheckResult) -> NoReturn:
        """End early: skip the other stages, and wait for no thread."""
        if not self._concluding.acquire(blocking=False):
            threading.Event().wait()  # the other thread is concluding, and ends the process
        later = self._stages[list(self._stages).index(self._at) + 1 :]
        rest = [skipped(stage, "not reached") for stage in later if not stage.blocks]
        code = 1
        try:
            code = self._report([*self._results, result, *rest])
            self._other_meeting.announce(FINISHED)
        finally:
            os._exit(code)
