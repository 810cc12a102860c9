"""Begins a run on all ranks or on none: they agree on options, and rank 0 opens the directory.

An error on one rank is raised on all of them. Otherwise the others would wait for that rank, up to
half an hour.
"""

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rankscope import errors
from rankscope.agent.frames import FrameKind, pack
from rankscope.agent.hang_report import RecorderDescriptors, RecorderThread
from rankscope.agent.link import Link, Started, connect, listen, start_agent
from rankscope.agent.rank_processes import ProgressMark
from rankscope.bus.environment import different_settings, without_secrets
from rankscope.bus.messages import Layout
from rankscope.bus.pace import EAGER, PACE, VARIABLE
from rankscope.bus.words import first_of, listed, name_ranks
from rankscope.errors import RankscopeError, RunError, UsageError
from rankscope.evidence import schema_hash
from rankscope.files import RunTakenError, parse, read_file, to_plain
from rankscope.private import find
from rankscope.record.begin import (
    INFO_FILE,
    begin_run,
    end_lost_run,
    is_alive,
    is_run,
    writer_is_gone,
)
from rankscope.record.states import pack_state
from rankscope.record.stores import Store, begin_copy
from rankscope.sinks import PlannedSink, plan_alerts, plan_sinks
from rankscope.sinks.tracked import open_run_of
from rankscope.wrappers.optimizers import are_shares
from rankscope.wrappers.rendezvous import LateError, Rendezvous

_log = logging.getLogger("rankscope")

_AGENT_ENDS_SECONDS = 0.2  # from the end of its sockets to that of its process
_RECORD_ENDS_SECONDS = 1.0  # that a training waits for the end of a lost run to be recorded
_STARTING_SECONDS = 30.0  # that the agent of a new run may take to start
_PREVIOUS_SECONDS = 30.0  # that the agent of the run before may take to write its data


class HeldParameters(StrEnum):
    """The parameters in the ranks' optimizers."""

    ALL = "all"  # or it is not known
    SHARES = "shares"  # each parameter is in the optimizer of one rank
    PART = "part"  # the same ones on all ranks, without others

    @classmethod
    def of(cls, held_W: list[str]) -> "HeldParameters":
        """Return what the ranks' ``held_bits`` have in common."""
        if not all(held_W):
            return cls.ALL
        if len(set(held_W)) == 1:
            return cls.PART
        return cls.SHARES if are_shares([int(held, 16) for held in held_W]) else cls.ALL


@dataclasses.dataclass(frozen=True, slots=True)
class RootRun:
    """The part of a run that rank 0 alone has."""

    path: Path | None = None  # the run's directory; None on all ranks but 0
    store: Store | None = None  # the same in an object store; None without
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the content of ``run.json``
    sinks: tuple[str, ...] = ()
    local_sinks: tuple[PlannedSink, ...] = ()  # that live in the training's process
    problem: RankscopeError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RunHandle:
    """A run that has begun, as one rank sees it."""

    rank: int  # this worker's rank in the data-parallel group
    num_workers: int
    hello: Mapping[str, Any]  # the content of this rank's first frame
    meeting: Rendezvous  # the rendezvous of all ranks
    first_step: int = 0
    root: RootRun = RootRun()
    address: str = ""  # the agent's address
    # whether this rank has to send the root's invitation to its agent
    awaits_invitation: bool = False
    agent: Started | None = None  # the agent, on the rank that has started it
    problem: str = ""  # why nothing is watched, where some rank did not come; else empty
    held: HeldParameters = HeldParameters.ALL

    def connect(
        self,
        reduced_copies: int,
        mark: ProgressMark | None,
        collectives: RecorderDescriptors | None,
    ) -> Link:
        """Return the link to the agent."""
        hello = {**self.hello, "thread": threading.get_native_id()}
        if mark is not None:
            hello["progress"] = mark.fileno()
        if collectives is not None:
            hello["collectives"] = collectives
        for role in hello.keys() & {"root", "forward"}:
            layout = {**hello[role]["layout"], "reduced_copies": reduced_copies}
            hello[role] = {**hello[role], "layout": layout}
        frame = pack(FrameKind.HELLO, json.dumps(hello).encode(), rank=self.rank)
        wake = None if self.agent is None else self.agent.wake
        return Link(partial(connect, self.address, self.problem), frame, wake)

    def note_end_of_agent(self) -> None:
        """Record, on rank 0, that the run ends here if the agent's process has ended."""
        if self.agent is None or self.root.path is None:
            return
        how = self.agent.ending(_AGENT_ENDS_SECONDS)
        if how:
            args = self.root.path, self.agent.pid, how
            thread = threading.Thread(target=_end_lost_run, args=args, daemon=True)
            thread.start()
            thread.join(_RECORD_ENDS_SECONDS)  # the file system may hang


@dataclasses.dataclass(frozen=True, slots=True)
class RunRequest:
    """The settings of a run to begin."""

    options: dict[str, Any]  # options that must be equal on all ranks, as plain values
    # returns this rank's ``facts``, ``config``, ``training``, ``sinks``, ``alerts``, and
    # ``run_dir``, the directory that rank 0 writes
    describe: Callable[[], dict[str, Any]]
    layout: Layout
    flush_seconds: float  # longest time that measured values stay in the agent's memory
    hang_seconds: float | None  # how long a step may take; None for any time
    in_thread: bool  # whether agents live in threads of the training's processes
    held: str = ""  # parameters in the optimizer, as hexadecimal bits; empty for all of them
    announce: bool = True  # whether findings and the verdict are printed
    share: str = "me"  # who may read the run, see ``rankscope.record.begin.SHARES``


def _end_lost_run(run_dir: Path, pid: int | None, how: str) -> None:
    try:
        end_lost_run(run_dir, pid, how)
    except Exception as error:
        _log.debug("the end of the agent cannot be recorded in %s: %s", run_dir, error)


def open_run(group: dist.ProcessGroup, request: RunRequest) -> RunHandle:
    """Agree on options with all ranks, open the run's directory on rank 0, and find the agent.

    Where some rank does not come, nothing is watched, and the training goes on.

    All ranks of the group call it at the same point of the program.
    """
    meeting = Rendezvous(group)
    try:
        return _open_run(meeting, request)
    except LateError as error:
        return RunHandle(
            rank=meeting.rank,
            num_workers=meeting.num_workers,
            hello={"rank": meeting.rank},
            meeting=meeting,
            problem=str(error),
        )


def _open_run(meeting: Rendezvous, request: RunRequest) -> RunHandle:
    info: dict[str, Any] = {}
    problem = None
    try:
        info = request.describe()
    except Exception as error:
        problem = _problem_of(error, f"rank {meeting.rank} cannot begin to watch")
    agreement = {"schema": schema_hash(), VARIABLE: PACE is EAGER, **to_plain(request.options)}
    hello = {"agreement": agreement, "facts": info.pop("facts", {}), "host": host_name()}
    hello["held"] = request.held
    if problem is not None:
        hello |= {"problem": str(problem), "kind": type(problem).__name__}
    hellos = meeting.gather(json.dumps(to_plain(hello)).encode())
    root_run = RootRun()
    if hellos is not None:
        answer, root_run = _answer([json.loads(each) for each in hellos], info, request)
        ranks_of = answer.pop("ranks_of", {})
        for host, count in ranks_of.items():
            meeting.write(f"ranks/{host}", str(count).encode())
        answer["hosts"] = len(ranks_of)
        meeting.write("answer", json.dumps(answer).encode())
    else:
        answer = json.loads(meeting.read("answer")[0])
    if problem is not None:
        raise problem
    if "problem" in answer:
        kind = getattr(errors, answer["kind"], RunError)
        raise root_run.problem or kind.__new__(
            kind, answer["problem"]
        )  # __new__: the message is complete
    return _connect(meeting, answer, root_run, request)


def _answer(
    hellos: list[dict[str, Any]], info: dict[str, Any], request: RunRequest
) -> tuple[dict[str, Any], RootRun]:
    """Begin the run on rank 0; return its answer to all ranks, and the run."""
    for hello in hellos:
        if "problem" in hello:
            return {"problem": hello["problem"], "kind": hello["kind"]}, RootRun()
    place = info.pop("run_dir")
    held = HeldParameters.of([hello["held"] for hello in hellos])
    if held is not HeldParameters.PART:
        info.get("training", {}).pop("unheld", None)
    try:
        _check_agreement(hellos)
        root_run, first_step = _begin(place, hellos, info, request)
    except Exception as error:
        problem = _problem_of(error, f"rank 0 cannot begin the run in {place}")
        return {"problem": str(problem), "kind": type(problem).__name__}, RootRun(problem=problem)
    return {
        "first_step": first_step,
        "secret": secrets.token_hex(16),
        "host": hellos[0]["host"],
        "held": held,
        "ranks_of": Counter(hello["host"] for hello in hellos),
    }, root_run


def _check_agreement(hellos: list[dict[str, Any]]) -> None:
    first = hellos[0]["agreement"]
    for rank, hello in enumerate(hellos):
        if hello["agreement"] != first:
            keys = [key for key in first if hello["agreement"].get(key) != first[key]]
            if "groups" in keys:
                groups_R = [one["agreement"]["groups"] for one in hellos]
                raise UsageError(
                    "watch() expected the same trained parameters on every rank, got "
                    f"{_trained_by_some(groups_R)}; {_where_to_look(groups_R)}"
                )
            given = {key: hello["agreement"].get(key) for key in keys}
            raise UsageError(
                f"watch() expected the same options on every rank, got {given} on rank {rank} and "
                f"{ {key: first[key] for key in keys} } on rank 0; pass equal options"
            )


def _trained_by_some(groups_R: Sequence[Sequence[str]]) -> str:
    """Return which groups of parameters only some ranks train, in words."""
    names_of: dict[tuple[int, ...], list[str]] = {}
    for name in dict.fromkeys(name for groups in groups_R for name in groups):
        ranks = tuple(rank for rank, groups in enumerate(groups_R) if name in groups)
        if len(ranks) < len(groups_R):
            names_of.setdefault(ranks, []).append(name)
    parts = [
        f"{first_of(names)} trained on {name_ranks(ranks)} alone"
        for ranks, names in names_of.items()
    ]
    return listed(parts) or "the same ones in another order"


def _where_to_look(groups_R: Sequence[Sequence[str]]) -> str:
    if set.intersection(*map(set, groups_R)):
        return "look for what freezes, ties or adds parameters on some ranks only"
    return (
        "ranks with different layers, as stages of a pipeline have, are not compared: pass "
        "process_group=, the group of the ranks that have the same ones"
    )


def _begin(
    place: Path | Store, hellos: list[dict[str, Any]], info: dict[str, Any], request: RunRequest
) -> tuple[RootRun, int]:
    given = info.pop("sinks")
    planned = plan_sinks(given) if dist.get_rank() == 0 else ()
    if given and not planned:  # one tracker, one port, one webhook for the job
        _log.info("sinks show the data-parallel group of global rank 0; this is another")
    tracked = open_run_of([sink.name for sink in planned])
    settings = different_settings([hello["facts"].pop("settings", {}) for hello in hellos])
    planned += plan_alerts(info.pop("alerts"))  # of every group: each has findings of its own
    info = {
        "num_workers": len(hellos),
        "world_size": dist.get_world_size(),
        "ranks": [
            {"rank": rank, **hello["facts"], "settings": own}
            for rank, (hello, own) in enumerate(zip(hellos, settings, strict=True))
        ],
        "options": request.options,
        **info,
        **({"tracked": without_secrets(tracked)} if tracked else {}),
        "versions": {"torch": str(torch.__version__), **info.get("versions", {})},
        "config": without_secrets(to_plain(info.get("config", {}))),
    }
    store = begin_copy(place) if isinstance(place, Store) else None
    run_dir = store.copy if store is not None else Path(str(place))
    while True:
        previous, path = _free_directory(run_dir)
        resumes = previous is not None and request.options["resume"]
        if previous is not None and resumes:
            _wait_for_agent(previous)
        busy = previous is not None and _is_trained(previous)
        start = _state_after(previous, info) if resumes and not busy else None
        described = dict(info)
        if previous is not None and start is not None:
            described |= {"continues": previous.name, "first_step": start["step"] + 1}
            status = parse(read_file(previous / INFO_FILE)).get("status")
            described |= {"after_complete": status == "complete"}
        try:
            packed = b"" if start is None else pack_state(start)
            written = begin_run(path, described, packed, request.share)
        except RunTakenError:  # by a job that begins at the same time: the next sibling is ours
            continue
        copied_to = None if store is None else store.sibling(path.name)
        if previous is not None:
            held = place if store is None else store.address
            new = path if copied_to is None else copied_to.address
            goes_on = "" if start is None else _CONTINUES
            run = _BUSY if busy else "a run"
            _log.warning(
                "%s already holds %s; this one is recorded in %s%s", held, run, new, goes_on
            )
        return RootRun(
            path,
            copied_to,
            to_plain(written),
            tuple(sink.spec for sink in planned if sink.spec),
            tuple(sink for sink in planned if not sink.spec),
        ), described.get("first_step", 0)


def _state_after(previous: Path | None, info: Mapping[str, Any]) -> Any:
    if previous is None:
        return None
    from rankscope.verdict.diagnosis import state_after  # detectors: only where a run goes on

    hosts = [str(rank["host"]) for rank in info["ranks"]]
    return state_after(previous, info["num_workers"], hosts, info["options"]["groups"])


def _is_trained(run: Path) -> bool:
    """Return whether a run is still written: its agent and a rank are alive on this host."""
    try:
        info = parse(read_file(run / "run.json"))
    except (OSError, ValueError):
        return False
    agent = info.get("agent") or {}
    if info.get("status") != "running" or agent.get("host") != host_name() or writer_is_gone(run):
        return False  # in a new container, other processes may have the same numbers
    ranks = [rank.get("pid") for rank in info["ranks"] if rank.get("host") == socket.gethostname()]
    return is_alive(agent.get("pid")) and any(map(is_alive, ranks))


def _wait_for_agent(previous: Path) -> None:
    """Wait until the agent of a killed run has written its data.

    A new run may not name its agent yet: it is starting, and steps wait in its socket.
    """
    until = time.monotonic() + _PREVIOUS_SECONDS
    while time.monotonic() < until:
        try:
            info = parse(read_file(previous / "run.json"))
            age = time.time() - (previous / "run.json").stat().st_mtime
        except (OSError, ValueError):
            return
        agent = info.get("agent")
        if info.get("status") != "running" or (agent is None and age > _STARTING_SECONDS):
            return
        if agent and not (agent.get("host") == host_name() and is_alive(agent.get("pid"))):
            return
        time.sleep(0.05)


def _connect(
    meeting: Rendezvous, answer: Mapping[str, Any], root_run: RootRun, request: RunRequest
) -> RunHandle:
    rank = meeting.rank
    secret = answer["secret"]
    own_host = host_name()
    place = f"agent/{own_host}"
    agent = None
    leads = rank == 0 or (own_host != answer["host"] and meeting.is_first(f"leads/{own_host}"))
    if leads:
        agent, address = _start_agent(secret, in_thread=request.in_thread)
        if root_run.path is not None and not address:
            with contextlib.suppress(Exception):
                end_lost_run(root_run.path, None, "none could be started")
        meeting.write(place, address.encode())
    else:
        address = meeting.read(place)[0].decode()
    hello: dict[str, Any] = {"rank": rank, "secret": secret}
    if leads:
        num_local = int(meeting.read(f"ranks/{own_host}")[0])
        layout = request.layout.to_json()
        hello["forward"] = {"host": rank, "num_local": num_local, "layout": layout}
    if root_run.path is not None:
        hello["root"] = _setup(root_run, answer["first_step"], request)
        hello["root"] |= {"hosts": answer["hosts"], "num_local": hello.pop("forward")["num_local"]}
        hello["root"]["master"] = os.environ.get("MASTER_ADDR")
    return RunHandle(
        rank=rank,
        num_workers=meeting.num_workers,
        first_step=answer["first_step"],
        root=root_run,
        address=address,
        hello=hello,
        meeting=meeting,
        awaits_invitation="forward" in hello,
        held=HeldParameters(answer["held"]),
        agent=agent,
    )


def _start_agent(secret: str, *, in_thread: bool) -> tuple[Started | None, str]:
    """Start this host's agent; return it and its address, which is empty after a failure."""
    try:
        listening, address = listen()
        return start_agent(listening, secret, thread=in_thread), address
    except Exception as error:  # the other ranks wait for an answer
        _log.warning("no agent of the monitor can be started (%s: %s)", type(error).__name__, error)
        return None, ""


def _setup(root_run: RootRun, first_step: int, request: RunRequest) -> dict[str, Any]:
    """Return the setup of the root, as plain values."""
    options = request.options
    return {
        "host": host_name(),
        "run_dir": str(Path(root_run.path or "").absolute()),
        "store": "" if root_run.store is None else str(root_run.store),
        "info": root_run.info,
        "layout": request.layout.to_json(),
        "first_step": first_step,
        "flush_seconds": request.flush_seconds,
        "hang_seconds": request.hang_seconds,
        "budget": options["overhead_budget"],
        "every": options["every"],
        "sinks": list(root_run.sinks),
        "relays": bool(root_run.local_sinks),
        "announce": request.announce,
    }


def host_name() -> str:
    """Return a name that is equal in two processes that can open each other's sockets."""
    parts = [socket.gethostname(), str(os.getuid()) if hasattr(os, "getuid") else ""]
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
            parts.append(str(Path("/proc/self/ns/net").readlink()))
    return "|".join(parts)


def _problem_of(error: Exception, sentence: str) -> RankscopeError:
    """Return the error to raise on all ranks: ours as it is, any other as a RunError."""
    if isinstance(error, RankscopeError):
        return error
    problem = RunError(f"{sentence} ({type(error).__name__}: {error})")
    problem.__cause__ = error
    return problem


_BUSY = "a run that another job is still training"
_CONTINUES = ", after it; another run directory keeps the two apart"


def _free_directory(run_dir: Path) -> tuple[Path | None, Path]:
    """Return the run before, if any, and a free directory; siblings count without a gap."""
    previous = None
    candidate = run_dir
    number = 1
    while is_run(candidate):
        number += 1
        previous = candidate
        candidate = run_dir.with_name(f"{run_dir.name}-{number}")
    return previous, candidate


_MODULE = "torch._C._distributed_c10d"
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def start_recorder_thread() -> RecorderThread | None:
    """Return what gives this rank's collectives to the agent; None where none are recorded."""
    module = find(_MODULE)
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of any backend, and of NCCL
    dumps = [dump for name in names if (dump := getattr(module, name, None)) is not None]
    try:
        # some releases turn one on by default: it has the process groups then
        known = (json.loads(dump(includeCollectives=False)) for dump in dumps)
        size = next((os.environ[name] for name in _SIZES if name in os.environ), "")
        is_on = size.isdecimal() and int(size) > 0
        if dumps and (is_on or any(each.get("pg_config") for each in known)):
            return RecorderThread(
                dist.get_rank(), lambda: [dump() for dump in dumps], _group_members
            )
    except Exception as error:  # no thread, or another release's form
        _log.debug("hangs will be reported without the collectives of the ranks: %s", error)
    return None


def _group_members() -> dict[str, list[int]]:
    """Return the global ranks of this process's groups, by name."""
    names = find("torch.distributed.distributed_c10d._world.pg_names") or {}
    return {str(name): dist.get_process_group_ranks(group) for group, name in names.items()}
