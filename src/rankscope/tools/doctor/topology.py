"""The ranks that are there, against the launcher's promise; their process group and environment."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rankscope.bus.environment import compare_facts, is_compared
from rankscope.bus.replicas import minority_ranks, ranks_by
from rankscope.bus.words import count, first_of, name_ranks
from rankscope.tools.doctor.stage import (
    Bench,
    CheckResult,
    Facts,
    PreflightStage,
    Status,
    choose_backend,
)
from rankscope.wrappers.facts import environment_facts, source_revision

Problem = tuple[Status, str, str, Sequence[int]]  # status, finding, advice, ranks concerned


def look(bench: Bench) -> Facts:
    """Return the facts of this worker that need no communication."""
    place = bench.place
    device = bench.device
    accelerated = device.type != "cpu"
    return {
        "host": socket.gethostname(),
        "launched": place.launched,
        "world_size": place.num_ranks,
        "device": str(device),
        "device_kind": device.type,
        "device_name": _device_name(device),
        "device_id": _device_id(device),
        "devices": torch.accelerator.device_count() if accelerated else 0,
        "tasks": os.environ.get("SLURM_NTASKS"),
    }


def _judge_places(facts: Sequence[Facts]) -> CheckResult:
    """Compare the workers' facts with their launcher's promise."""
    problems = [problem for find in _CHECKS for problem in find(facts)]
    problems.sort(key=lambda problem: -problem[0].level)
    hosts = _hosts(facts)
    found = "; ".join([_in_words(facts), *(words for _, words, _, _ in problems)])
    return CheckResult(
        problems[0][0] if problems else Status.OK,
        found,
        " ".join(advice for _, _, advice, _ in problems),
        {
            "ranks": len(facts),
            "hosts": {host: len(ranks) for host, ranks in hosts.items()},
            "devices": [fact["device"] for fact in facts],
            "device_names": [fact["device_name"] for fact in facts],
        },
        ranks=tuple(sorted({rank for *_, ranks in problems for rank in ranks})),
    )


def _in_words(facts: Sequence[Facts]) -> str:
    hosts = _hosts(facts)
    kinds = sorted({str(fact["device_name"]) for fact in facts})
    where = next(iter(hosts)) if len(hosts) == 1 else count(len(hosts), "host")
    sizes = sorted({len(ranks) for ranks in hosts.values()})
    each = f", {' to '.join(map(str, {sizes[0], sizes[-1]}))} on each" if len(hosts) > 1 else ""
    return f"{count(len(facts), 'rank')} on {where}{each}, {' and '.join(kinds)}"


def _alone(facts: Sequence[Facts]) -> Iterator[Problem]:
    fact = facts[0]
    if fact["world_size"] > 1:
        return
    tasks = int(fact["tasks"] or 1) if str(fact["tasks"] or 1).isdigit() else 1
    if tasks > 1:
        yield (
            Status.WARNING,
            f"one rank, though the scheduler started {tasks} tasks: each would train alone",
            "Start the job with torchrun, or set RANK and WORLD_SIZE from the scheduler's "
            "variables.",
            (),
        )
        return
    how = "one rank was started" if fact["launched"] else "started without a launcher"
    yield (
        Status.NOTE,
        f"{how}, so there is nothing to compare between ranks",
        "Start it as the training is: torchrun --nproc-per-node N -m rankscope doctor.",
        (),
    )


def _promises(facts: Sequence[Facts]) -> Iterator[Problem]:
    sizes = [fact["world_size"] for fact in facts]
    odd = minority_ranks(sizes)
    if odd:
        found = f"ranks disagree on WORLD_SIZE: {sorted(set(sizes))}"
        yield Status.ERROR, found, "Start all ranks by one launcher.", odd


def _uneven(facts: Sequence[Facts]) -> Iterator[Problem]:
    hosts = _hosts(facts)
    fewest = min(hosts, key=lambda host: len(hosts[host]))
    if len(set(map(len, hosts.values()))) > 1:
        found = f"hosts have different numbers of ranks, {fewest} only {len(hosts[fewest])}"
        advice = "Start the same number on each host, unless this is meant."
        yield Status.WARNING, found, advice, hosts[fewest]


def _shared(facts: Sequence[Facts]) -> Iterator[Problem]:
    users: dict[tuple[str, str], list[int]] = {}
    for rank, fact in enumerate(facts):
        if fact["device_id"]:
            users.setdefault((fact["host"], fact["device_id"]), []).append(rank)
    for (host, _), ranks in users.items():
        if len(ranks) > 1:
            yield (
                Status.ERROR,
                f"{name_ranks(ranks)} share one device ({facts[ranks[0]]['device']} of {host})",
                "Give each rank a device of its own: start as many ranks as there are devices, "
                "and choose by LOCAL_RANK.",
                ranks,
            )


def _kinds(facts: Sequence[Facts]) -> Iterator[Problem]:
    odd = minority_ranks([fact["device_kind"] for fact in facts])
    if odd:
        kinds = sorted({str(fact["device_kind"]) for fact in facts})
        found = f"ranks have different kinds of device: {' and '.join(kinds)}"
        advice = f"Check drivers and visible devices on the host of {name_ranks(odd)}."
        yield Status.ERROR, found, advice, odd


def _idle(facts: Sequence[Facts]) -> Iterator[Problem]:
    idle = sum(max(facts[ranks[0]]["devices"] - len(ranks), 0) for ranks in _hosts(facts).values())
    if idle:
        found = f"{count(idle, 'device')} without a rank"
        yield Status.NOTE, found, "Start more ranks, unless this is meant.", ()


_CHECKS = (_alone, _promises, _uneven, _shared, _kinds, _idle)


def _hosts(facts: Sequence[Facts]) -> dict[str, list[int]]:
    return ranks_by([str(fact["host"]) for fact in facts])


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device))


def _device_id(device: torch.device) -> str:
    """Return an id unique among a host's accelerators, even when each rank sees only its own."""
    if device.type == "cpu":
        return ""
    module: Any = torch.get_device_module(device)
    properties = module.get_device_properties(device)
    return str(getattr(properties, "uuid", "") or device)


def join(bench: Bench) -> Facts:
    """Join the process group that the other checks use; count workers by a first all-reduce."""
    began = time.perf_counter()
    backend = choose_backend(bench.place, bench.device)
    own = bench.device.type != "cpu" and backend != "gloo"
    dist.init_process_group(
        backend,
        store=bench.store,
        rank=bench.place.rank,
        world_size=bench.place.num_ranks,
        timeout=timedelta(seconds=3 * bench.options.seconds + 60),  # ours is shorter, and names who
        device_id=bench.device if own else None,
    )
    ones = torch.ones(1, device=bench.device)
    dist.all_reduce(ones)
    counted = int(ones.item())
    return {"backend": backend, "counted": counted, "seconds": time.perf_counter() - began}


def _judge_group(facts: Sequence[Facts]) -> CheckResult:
    """Compare the number of workers in the process group with the number that is there."""
    seconds = max(fact["seconds"] for fact in facts)
    backends = [str(fact["backend"]) for fact in facts]
    numbers = {"backend": backends[0], "seconds": seconds}
    wrong = [rank for rank, fact in enumerate(facts) if fact["counted"] != len(facts)]
    odd = minority_ranks(backends)
    if odd or wrong:
        found = (
            f"ranks chose different backends: {' and '.join(sorted(set(backends)))}"
            if odd
            else f"a first all-reduce counted {facts[wrong[0]]['counted']} of {len(facts)} ranks"
        )
        advice = "Check that all ranks have the same kind of device, and one launcher."
        ranks = odd or tuple(wrong)
        return CheckResult(Status.ERROR, found, advice, numbers, ranks)
    found = f"{backends[0]}, joined within {seconds:.1f} s"
    return CheckResult(Status.OK, found, numbers=numbers)


STAGE = PreflightStage("topology", look, {"topology": _judge_places}, needs_group=False)
GROUP_STAGE = PreflightStage(
    "process_group",
    join,
    {"process_group": _judge_group},
    together=True,
    advice="Check that ranks reach each other over the network (interfaces, firewall), and that "
    "the backend is built into torch.",
)


def look_at_environment(bench: Bench) -> Facts:
    """Return the environment of this rank; the source revision is that of the current folder."""
    facts: dict[str, Any] = dict(environment_facts(bench.device))
    for name in ("revision", "revision_changed"):
        facts.pop(name, None)  # of the preflight's own files
    return {**facts, **source_revision(Path.cwd())}


def _judge_environment(facts: Sequence[Facts]) -> CheckResult:
    """Name the differences between ranks, the gravest first, as a run's detector does."""
    odd, words, severity = compare_facts(facts)
    compared = sum(map(is_compared, {name for fact in facts for name in fact}))
    numbers = {"compared": compared, "different": list(words)}
    if odd:
        status = Status[severity.name]
        found = first_of(words, 5, between="; ")
        return CheckResult(status, found, _ADVICE[status], numbers, odd)
    versions = (f"{name} {facts[0][name]}" for name in _VERSIONS if name in facts[0])
    found = f"{count(compared, 'fact')} alike: {', '.join(versions)}"
    return CheckResult(Status.OK, found, numbers=numbers)


_VERSIONS = ("python", "torch", "numpy")
_ADVICE = {
    Status.NOTE: "Usually harmless; make these settings equal if runs must repeat.",
    Status.WARNING: "Ranks that compute with other software, sources, flags or devices have other "
    "gradients: bring all hosts to the same commit, install the same on them, and set flags on all "
    "ranks alike.",
}


ENVIRONMENT_STAGE = PreflightStage(
    "environment",
    look_at_environment,
    {"environment": _judge_environment},
    needs_group=False,
)
