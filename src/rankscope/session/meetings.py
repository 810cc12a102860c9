"""The meetings of ranks whose data-parallel groups each record a run of their own.

One root compares the replicated state of a mesh: that of the run of its first rank. Ranks of this
run use their own link. A rank of another run is a guest: it opens a second link, to this run's
agent on its host; without such an agent, that rank is not compared.

Ranks along an axis of pipeline stages find out which weights they share; these are compared as
replicas along a mesh's axis are.
"""

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from rankscope.agent.frames import GUESTS, FrameKind, pack
from rankscope.agent.link import Link, connect
from rankscope.agent.step_message import tag
from rankscope.bus.probe import Content
from rankscope.wrappers.fsdp2_mesh import (
    MeshPlace,
    StageParameter,
    Tie,
    find_ties,
    held_by,
    stage_line,
)
from rankscope.wrappers.fsdp2_model import ManagedParameter, managed_parameters
from rankscope.wrappers.rendezvous import LateError, Rendezvous
from rankscope.wrappers.wrapped import Wrapped

_log = logging.getLogger("rankscope")

LATER_SECONDS = 10.0  # seconds that a rank waits for the other pipeline stages at its first update

PATIENCE_SECONDS = 30.0  # for the mesh's other runs, which begin at about the same time


class JoinedMesh:
    """One rank's connection to the mesh's root: by the link of a ``guest``, or the run's own."""

    def __init__(
        self,
        place: MeshPlace,
        ranks: Rendezvous,
        guest: Link | None = None,
        *,
        reaches: bool = True,
    ) -> None:
        self.place = place
        self.ranks = ranks
        self.reaches = reaches
        self._guest = guest

    @property
    def is_guest(self) -> bool:
        """Whether this rank sends to another run's root."""
        return self._guest is not None

    def send(self, name: str, step: int, content: Content) -> None:
        """Send a guest's evidence of a step, if there is room."""
        guest = self._guest
        if guest is not None and guest.has_room:
            payload = tag(name, content)
            guest.send(FrameKind.EVIDENCE, payload, rank=GUESTS + self.place.rank, step=step)
            guest.poll()

    def close(self) -> None:
        """Close a guest's link."""
        if self._guest is not None:
            self._guest.close()


def meet_mesh(wrapped: Wrapped, facts: Mapping[str, Any], *, compares: bool) -> JoinedMesh | None:
    """Meet all ranks of a mesh, which all call it at the same point.

    None without a mesh, or if some ranks do not come. ``facts`` are the first rank of this run
    (``run``), its agent's ``host`` and ``address`` there, and its ``secret``.
    """
    place = wrapped.mesh
    world = dist.group.WORLD
    if place is None or world is None:
        return None
    ranks = Rendezvous(world, place.ranks, patience_seconds=PATIENCE_SECONDS)
    try:
        answer = _exchange(ranks, facts)
    except LateError as error:
        _log.info("replicas over other axes of the mesh are not compared: %s", error)
        return None
    return _join(place, ranks, facts, answer, compares=compares)


def _exchange(
    ranks: Rendezvous,
    facts: Mapping[str, Any],
    derive: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]] = lambda all_facts: {},
) -> dict[str, Any]:
    """Return the first rank's answer: its run, its agents by host, its secret, what it derives."""
    gathered = ranks.gather(json.dumps(facts).encode())
    if gathered is not None:
        each = [json.loads(one) for one in gathered]
        hosts = {one["host"]: one["address"] for one in each if one["run"] == facts["run"]}
        answer = {"run": facts["run"], "hosts": hosts, "secret": facts["secret"], **derive(each)}
        ranks.write("answer", json.dumps(answer).encode())
    found: dict[str, Any] = json.loads(ranks.read("answer")[0])
    return found


def _join(
    place: MeshPlace,
    ranks: Rendezvous,
    facts: Mapping[str, Any],
    answer: Mapping[str, Any],
    *,
    compares: bool,
) -> JoinedMesh:
    """Return a rank's connection to the root that compares the mesh's replicated state."""
    if answer["run"] == facts["run"] or not compares:
        return JoinedMesh(place, ranks, reaches=compares)
    found = answer["hosts"].get(facts["host"])
    if found is None:
        _log.info("replicas of this host's ranks over other axes of the mesh are not compared")
        return JoinedMesh(place, ranks, reaches=False)
    number = GUESTS + place.rank
    hello = {"rank": number, "secret": answer["secret"]}
    frame = pack(FrameKind.HELLO, json.dumps(hello).encode(), rank=number)
    return JoinedMesh(place, ranks, Link(partial(connect, found), frame))


class WatchedStage:
    """A stage that this process watches."""

    def __init__(self, model: nn.Module, shared: set[str]) -> None:
        self.model = model
        self.shared = shared  # its parameters that other stages hold as well; may grow

    def remove(self) -> None:
        """Note that it is watched no longer."""
        _STAGES.pop(self, None)


_STAGES: "WeakKeyDictionary[WatchedStage, None]" = WeakKeyDictionary()  # in their order
_BEGIN_APART: ContextVar[bool] = ContextVar("stages begin apart", default=False)


@contextlib.contextmanager
def stages_begin_apart() -> Iterator[None]:
    """Let stages that begin meanwhile meet at their first update.

    For a run that begins in a stage's first forward pass: the next stage waits for its output. A
    stage reaches its first update without the others' ones; one that skips it, as a gradient scaler
    may, is waited for :data:`LATER_SECONDS`, once.
    """
    token = _BEGIN_APART.set(True)
    try:
        yield
    finally:
        _BEGIN_APART.reset(token)


def begin_apart() -> bool:
    """Return whether stages that begin now meet later."""
    return _BEGIN_APART.get()


def meet_stages(
    wrapped: Wrapped,
    stage: WatchedStage,
    facts: Mapping[str, Any],
    *,
    compares: bool,
    patience_seconds: float = PATIENCE_SECONDS,
) -> JoinedMesh | None:
    """Meet the ranks of the other pipeline stages, which all call it at the same point.

    A rank may hold several stages, each watched by itself: those that it watches already take part.

    ``stage.remove`` is to be called once it is watched no longer; ``facts`` are as in
    :func:`meet_mesh`. None without stages, if this rank shares no weight, or if some do not come.
    """
    try:
        found = stage_line(wrapped.wrapper)
        if found is None:
            return None
        _STAGES[stage] = None
        return _meet_along(*found, facts, patience_seconds, compares=compares)
    except LateError as error:
        _log.info("weights that pipeline stages share are not compared: %s", error)
    except Exception:  # whatever the meshes of its parameters are
        _log.debug("weights that pipeline stages share are unknown", exc_info=True)
    return None


def _meet_along(
    axis: str,
    line: tuple[int, ...],
    facts: Mapping[str, Any],
    patience_seconds: float,
    *,
    compares: bool,
) -> JoinedMesh | None:
    """Do what :func:`meet_stages` does, along an axis."""
    assert dist.group.WORLD is not None
    watched = [each for each in _STAGES if stage_line(each.model) == (axis, line)]
    stages = [managed_parameters(each.model) for each in watched]
    facts = {**facts, "held": [held_by(each) for each in stages]}
    ranks = Rendezvous(dist.group.WORLD, line, patience_seconds=patience_seconds)
    answer = _exchange(ranks, facts, lambda each: _ties_of([one["held"] for one in each]))
    places = answer["places"]
    ties = [Tie(dict(names), certain) for names, certain in answer["ties"]]
    here = line.index(dist.get_rank())
    first = places.index(here)
    for number, each in enumerate(watched, start=first):
        each.shared.update(tie.names[number] for tie in ties if number in tie.names)
    most = _most(ties, places)
    own_ties = [tie for tie in ties if _ranks_of(tie, places) == most and here in most]
    if not own_ties:
        return None
    copies = tuple(_labelled(tie, stages, first) for tie in own_ties)
    along = tuple(line[at] for at in sorted(most))
    certain = tuple(tie.label for tie in own_ties if tie.certain)
    place = MeshPlace(dist.get_rank(), along, {axis: along}, copies, certain)
    return _join(place, ranks, facts, answer, compares=compares)


def _ties_of(held: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the ties of all ranks' newest stages, and each stage's place, as plain values."""
    places = [place for place, stages in enumerate(held) for _ in stages]
    newest = set(accumulate(map(len, held), initial=-1))
    rows = [
        [
            StageParameter(name, tuple(shape), digest, before)
            for name, shape, digest, before in stage
        ]
        for stages in held
        for stage in stages
    ]
    found = [tie for tie in find_ties(rows, places) if newest & tie.names.keys()]
    ties = [[list(tie.names.items()), tie.certain] for tie in found]
    return {"places": places, "ties": ties}


def _ranks_of(tie: Tie, places: Sequence[int]) -> frozenset[int]:
    return frozenset(places[number] for number in tie.names)


def _most(ties: Sequence[Tie], places: Sequence[int]) -> frozenset[int]:
    """Return the ranks that share most weights, by place; no others are compared."""
    counts = Counter(_ranks_of(tie, places) for tie in ties)
    return max(counts, key=lambda ranks: (counts[ranks], sorted(ranks)), default=frozenset())


def _labelled(
    tie: Tie, stages: Sequence[Sequence[ManagedParameter]], first: int
) -> ManagedParameter:
    """Return this rank's copy of a weight, by the label that all ranks share."""
    number, name = next(
        (n, tie.names[n]) for n in range(first, first + len(stages)) if n in tie.names
    )
    found = next(each for each in stages[number - first] if each.name == name)
    return ManagedParameter(tie.label, found.inside, found.group)
