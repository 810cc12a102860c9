"""Who is there: ranks, hosts and devices against what the launcher promised."""

import os
import socket
from collections.abc import Sequence
from typing import Any

import torch

from rankscope.diagnose.rules import count, name_ranks
from rankscope.doctor.result import CheckResult, Facts, Status, unlike_most
from rankscope.doctor.stage import Bench, Stage

NAME, TITLE = "topology", "Ranks and devices"

Problem = tuple[Status, str, str, Sequence[int]]
"""Status, what was found, what to do, and the ranks concerned."""


def look(bench: Bench) -> Facts:
    """Return what is known of this worker without asking anybody."""
    place, device = bench.place, bench.device
    accelerated = device.type != "cpu"
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "launched": place.launched,
        "world_size": place.num_ranks,
        "num_local": place.num_local,
        "device": str(device),
        "device_kind": device.type,
        "device_name": _device_name(device),
        "device_id": _device_id(device),
        "devices": torch.accelerator.device_count() if accelerated else 0,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "tasks": os.environ.get("SLURM_NTASKS"),
    }


def judge(facts: Sequence[Facts]) -> list[CheckResult]:
    """Compare what the workers are with what their launcher promised."""
    problems = [problem for find in _CHECKS for problem in find(facts)]
    problems.sort(key=lambda problem: -problem[0].level)
    hosts = _hosts(facts)
    found = "; ".join([_in_words(facts), *(words for _, words, _, _ in problems)])
    return [
        CheckResult(
            NAME,
            TITLE,
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
    ]


def _in_words(facts: Sequence[Facts]) -> str:
    hosts = _hosts(facts)
    kinds = sorted({str(fact["device_name"]) for fact in facts})
    where = next(iter(hosts)) if len(hosts) == 1 else count(len(hosts), "host")
    sizes = sorted({len(ranks) for ranks in hosts.values()})
    each = f", {' to '.join(map(str, {sizes[0], sizes[-1]}))} on each" if len(hosts) > 1 else ""
    return f"{count(len(facts), 'rank')} on {where}{each}, {' and '.join(kinds)}"


def _alone(facts: Sequence[Facts]) -> list[Problem]:
    fact = facts[0]
    if fact["world_size"] > 1:
        return []
    tasks = int(fact["tasks"] or 1) if str(fact["tasks"] or 1).isdigit() else 1
    if tasks > 1:
        return [
            (
                Status.WARNING,
                f"one rank, though the scheduler started {tasks} tasks: each would train alone",
                "Start the job with torchrun, or set RANK and WORLD_SIZE from the scheduler's "
                "variables.",
                (),
            )
        ]
    how = "one rank was started" if fact["launched"] else "started without a launcher"
    return [
        (
            Status.NOTE,
            f"{how}, so there is nothing to compare between ranks",
            "Start it as the training is: torchrun --nproc-per-node N -m rankscope doctor.",
            (),
        )
    ]


def _promises(facts: Sequence[Facts]) -> list[Problem]:
    sizes = [fact["world_size"] for fact in facts]
    odd = unlike_most(sizes)
    if odd:
        return [
            (
                Status.ERROR,
                f"ranks disagree on WORLD_SIZE: {sorted(set(sizes))}",
                "Start all ranks by one launcher.",
                odd,
            )
        ]
    problems: list[Problem] = []
    for host, ranks in _hosts(facts).items():
        promised = {facts[rank]["num_local"] for rank in ranks}
        if facts[0]["launched"] and promised != {len(ranks)}:
            said = " and ".join(map(str, sorted(promised)))
            problems.append(
                (
                    Status.NOTE,
                    f"{count(len(ranks), 'rank')} on {host}, where LOCAL_WORLD_SIZE says {said}",
                    "Several containers with one host name look like this; else correct what the "
                    "launcher sets.",
                    ranks,
                )
            )
    return problems


def _uneven(facts: Sequence[Facts]) -> list[Problem]:
    hosts = _hosts(facts)
    sizes = {host: len(ranks) for host, ranks in hosts.items()}
    if len(set(sizes.values())) == 1:
        return []
    fewest = min(sizes, key=lambda host: sizes[host])
    return [
        (
            Status.WARNING,
            f"hosts have different numbers of ranks, {fewest} only {sizes[fewest]}",
            "Start the same number on each host, unless this is meant.",
            hosts[fewest],
        )
    ]


def _shared(facts: Sequence[Facts]) -> list[Problem]:
    users: dict[tuple[str, str], list[int]] = {}
    for rank, fact in enumerate(facts):
        if fact["device_id"]:
            users.setdefault((fact["host"], fact["device_id"]), []).append(rank)
    return [
        (
            Status.ERROR,
            f"{name_ranks(ranks)} share one device ({facts[ranks[0]]['device']} of {host})",
            "Give each rank a device of its own: start as many ranks as there are devices, and "
            "choose by LOCAL_RANK.",
            ranks,
        )
        for (host, _), ranks in users.items()
        if len(ranks) > 1
    ]


def _kinds(facts: Sequence[Facts]) -> list[Problem]:
    odd = unlike_most([fact["device_kind"] for fact in facts])
    if not odd:
        return []
    kinds = sorted({str(fact["device_kind"]) for fact in facts})
    return [
        (
            Status.ERROR,
            f"ranks have different kinds of device: {' and '.join(kinds)}",
            f"Check drivers and visible devices on the host of {name_ranks(odd)}.",
            odd,
        )
    ]


def _idle(facts: Sequence[Facts]) -> list[Problem]:
    idle = {
        host: facts[ranks[0]]["devices"] - len(ranks)
        for host, ranks in _hosts(facts).items()
        if facts[ranks[0]]["devices"] > len(ranks)
    }
    if not idle:
        return []
    number = sum(idle.values())
    return [
        (
            Status.NOTE,
            f"{count(number, 'device')} without a rank",
            "Start more ranks, unless this is meant.",
            (),
        )
    ]


_CHECKS = (_alone, _promises, _uneven, _shared, _kinds, _idle)


def _hosts(facts: Sequence[Facts]) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        hosts.setdefault(str(fact["host"]), []).append(rank)
    return hosts


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device))


def _device_id(device: torch.device) -> str:
    """Return what tells one accelerator of a host from another, even when each sees only its own.

    Empty for a CPU, which ranks may share.
    """
    if device.type == "cpu":
        return ""
    module: Any = torch.get_device_module(device)
    properties = module.get_device_properties(device)
    return str(getattr(properties, "uuid", "") or device)


STAGE = Stage(NAME, TITLE, look, judge, needs_group=False)
