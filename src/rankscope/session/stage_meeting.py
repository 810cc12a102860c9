"""The meeting of ranks along an axis of pipeline stages, each of which records a run of its own.

They find out which weights they share. The root of the first stage's run compares these from then
on, as replicas along a mesh's axis are compared.
"""

import json
import logging
from collections import Counter
from typing import Any

import torch.distributed as dist

from rankscope.session.mesh_meeting import PATIENCE_SECONDS, MeshMeeting, hosts_of
from rankscope.wrappers.find import Wrapped
from rankscope.wrappers.fsdp2_mesh import MeshPlace, SharedWeight, stage_line
from rankscope.wrappers.fsdp2_model import ManagedParameter, managed_parameters
from rankscope.wrappers.kinds import FSDP2
from rankscope.wrappers.rendezvous import LateError, Rendezvous
from rankscope.wrappers.shared_weights import Held, Tie, find_ties, held_by

_log = logging.getLogger("rankscope")


def meet_stages(
    wrapped: Wrapped, group: dist.ProcessGroup, *, host: str, address: str, secret: str
) -> MeshMeeting | None:
    """Meet the ranks of the other pipeline stages, which all call it at the same point.

    None without stages, if this one shares no weight, or if some ranks do not come. The other
    arguments are those of :func:`rankscope.session.mesh_meeting.meet_mesh`.
    """
    try:
        return _meet(wrapped, group, {"host": host, "address": address, "secret": secret})
    except LateError as error:
        _log.info("weights that pipeline stages share are not compared: %s", error)
    except Exception:  # whatever the meshes of its parameters are
        _log.debug("weights that pipeline stages share are unknown", exc_info=True)
    return None


def _meet(wrapped: Wrapped, group: dist.ProcessGroup, facts: dict[str, Any]) -> MeshMeeting | None:
    """Do what :func:`meet_stages` does.

    Raises:
        LateError: Some ranks do not come.
    """
    world = dist.group.WORLD
    found = stage_line(wrapped.wrapper) if wrapped.kind is FSDP2 else None
    if found is None or world is None:
        return None
    axis, line = found
    managed = managed_parameters(wrapped.wrapper)
    own = dist.get_process_group_ranks(group)[0]
    facts = {"run": own, **facts}
    ranks = Rendezvous(world, line, patience_seconds=PATIENCE_SECONDS)
    gathered = ranks.gather(json.dumps({**facts, "held": held_by(managed)}).encode())
    if gathered is not None:
        each = [json.loads(one) for one in gathered]
        ties = find_ties([[_held(row) for row in one["held"]] for one in each])
        rows = [[{str(at): name for at, name in tie.names.items()}, tie.certain] for tie in ties]
        ranks.write("answer", json.dumps({**hosts_of(each, facts), "ties": rows}).encode())
    answer = json.loads(ranks.read("answer")[0])
    ties = [Tie({int(at): n for at, n in names.items()}, sure) for names, sure in answer["ties"]]
    place = _place(axis, line, managed, ties)
    return None if place is None else MeshMeeting(place, ranks, own, answer)


def _held(row: list[Any]) -> Held:
    name, shape, digest, before = row
    return Held(name, tuple(shape), digest, before)


def _place(
    axis: str, line: tuple[int, ...], managed: list[ManagedParameter], ties: list[Tie]
) -> MeshPlace | None:
    """Return this rank's place among the ranks that share its weights; None if it shares none.

    Where several sets of stages share weights, the one that shares most counts.
    """
    here = line.index(dist.get_rank())
    by_name = {parameter.name: parameter for parameter in managed}
    sets = Counter(frozenset(tie.names) for tie in ties)
    most = max(sets, key=lambda places: (sets[places], sorted(places)), default=frozenset())
    if here not in most:
        return None
    own = [tie for tie in ties if tie.names.keys() == most]
    shared = tuple(SharedWeight(tie.names[here], tie.label, tie.certain) for tie in own)
    parameters = [by_name[weight.name] for weight in shared]
    labelled = [
        ManagedParameter(weight.label, parameter.inside, parameter.group)
        for weight, parameter in zip(shared, parameters, strict=True)
    ]
    ranks = tuple(line[at] for at in sorted(most))
    return MeshPlace(dist.get_rank(), ranks, {axis: ranks}, tuple(labelled), shared)
