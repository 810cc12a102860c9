"""The detectors of state: digests that should agree, parameters that never change or move twice."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.detector import (
    Check,
    CheckedRun,
    Detector,
    FaultEvidence,
    PersistentFault,
    RunFacts,
    evidence_at,
)
from rankscope.bus.finding import Finding, Severity
from rankscope.bus.messages import Columns, Combiner, Layout, Messages, held_values
from rankscope.bus.probe import DirectedRun, Director, Request
from rankscope.bus.replicas import (
    TRACE_WIDTH,
    StateDifference,
    StateDigests,
    StateKind,
    TensorTrace,
    differences,
    known_values,
    minority_ranks,
)
from rankscope.bus.step import GatheredStep, trains_alone
from rankscope.bus.steps import SharedWork, Step
from rankscope.bus.words import count, named, shortened
from rankscope.evidence.state import FROZEN
from rankscope.evidence.state.roles import (
    Role,
    UnchangedParameters,
    alike_shards,
    named_by,
    numbered,
    owned_names,
    replaced_differences,
    role_differences,
    unchanged_differences,
)
from rankscope.evidence.state.unequal import UnequalState
from rankscope.stats.arrays import MISSING_INT, Ints, Ragged

STATE_STEPS = 64
"""Steps of one cycle through parameters, buffers and optimizer state."""


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    plan = run.plan
    return (
        UnequalState(
            run.num_workers,
            local_buffers=plan.local_buffers,
            local_steps=plan.local_steps or 0,
            replicated=plan.replicated,
            by_loop=run.by_loop,
            unsaved=run.unsaved_buffers,
            trained=run.trained,
        ),
        NotUpdated(),
        MovesInPasses(),
        RoundedCounts(),
        CountedTwice(),
        AdaptedTrains(),
        ShardsAlike(),
        FrozenDiffer(),
    )


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    impossible = "" if run.options.get("evidence", True) else "evidence=False"
    return (Check("parameters, buffers and optimizer state", STATE_STEPS, impossible),)


ALONE = "state.not_updated"
HELD = "not-updated-though-held"
NOTHING = "nothing-updated"
TWICE = "state.updated_twice"
REPLACED = "state.other_tensors_held"

_NAMED = 4
_MOVES = 2  # in a step
_STEPS = 3

FROZEN_MOVES = "state.moves_in_forward"
OTHERS_MOVE = "others-move-in-forward"


class NotUpdated(Detector):
    """Parameters that have a gradient and keep their bits, while the optimizer changes others.

    A warning where the optimizer that ``watch`` knows does not hold them; a note where it does: a
    learning rate of 0, or an update that rounding loses, explains it. A warning where no parameter
    changes at all, and for parameters that the optimizer holds more than once. An error where it
    holds other tensors of their shapes instead, which never have a gradient.
    """

    def __init__(self) -> None:
        self._names: dict[str, dict[str, bool]] = {}  # whether the fault is open, by key and name
        self._spans: dict[str, PersistentFault] = {}

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report parameters that stop changing, change again, or are held twice."""
        changed: dict[str, None] = {}
        for found in step.gathered.differences:
            if found.kind is StateKind.RESTING:
                is_open = bool(found.unchanged_W[0])
                keys: tuple[str, ...] = (ALONE, HELD, NOTHING)
                if is_open:  # when it changes again, the optimizer may hold it by now
                    keys = (_key_of(int(found.digests_W[0])),)
            elif found.kind is StateKind.ROLE and np.all(found.digests_W & Role.TWICE):
                is_open = True
                keys = (TWICE,)
            else:
                continue
            for key in keys:
                if self._update(key, found.name, step.gathered.step, is_open=is_open):
                    changed[key] = None
        return [self._evidence(key) for key in changed]

    def _update(self, key: str, name: str, step: int, *, is_open: bool) -> bool:
        """Note one parameter's fault; return whether the finding changes."""
        names = self._names.setdefault(key, {})
        if name not in names and not is_open:
            return False
        names[name] = is_open
        if is_open:
            span = self._spans.setdefault(key, PersistentFault())
            if span.last != step:
                span.see(step)
        self._spans[key].open = any(names.values())
        return True

    def _evidence(self, key: str) -> FaultEvidence:
        still = [name for name, is_open in self._names[key].items() if is_open]
        names = still or list(self._names[key])
        span = self._spans[key]
        over = "" if span.open else " They change again."
        fields = {"names": shortened(names, _NAMED), "over": over}
        cause = key if key in (TWICE, REPLACED) else ALONE
        severity = _SEVERITIES.get(key, Severity.WARNING)
        return span.evidence(cause, severity, (), fields, named(names), key=key)


_SEVERITIES = {HELD: Severity.NOTE, REPLACED: Severity.ERROR}


def _key_of(word: int) -> str:
    if word & Role.REPLACED:
        return REPLACED
    if word & Role.ALL_REST:
        return NOTHING
    return HELD if word & Role.OWNED else ALONE


class MovesInPasses(Detector):
    """State that changes twice or more in a step, between its forward passes.

    A warning for frozen parameters, which an average of the weights may move, once a step. A note
    for others: a training may keep them normalised; buffers may be statistics of its own.
    """

    def __init__(self) -> None:
        self._names: dict[str, dict[str, bool]] = {}
        self._most: dict[str, int] = {}
        self._spans: dict[str, PersistentFault] = {}

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report what moved in it."""
        found: dict[str, dict[str, int]] = {}
        for one in step.gathered.differences:
            most = int(one.digests_W.max())
            if one.kind is StateKind.PASSES and most >= _MOVES:
                key = FROZEN_MOVES if one.unchanged_W.any() else OTHERS_MOVE
                found.setdefault(key, {})[one.name] = most
        number = step.gathered.step
        for key, moved in found.items():
            self._names.setdefault(key, {}).update(dict.fromkeys(moved, True))
            self._most[key] = max(self._most.get(key, 0), *moved.values())
            self._spans.setdefault(key, PersistentFault(_STEPS)).observe(number, [0])
        return [self._evidence(key) for key in found if self._spans[key].open]

    def _evidence(self, key: str) -> FaultEvidence:
        names = list(self._names[key])
        fields = {"names": shortened(names, _NAMED), "times": count(self._most[key], "time")}
        numbers = {**named(names), "changes": self._most[key]}
        severity = Severity.WARNING if key == FROZEN_MOVES else Severity.NOTE
        span = self._spans[key]
        return span.evidence(FROZEN_MOVES, severity, (), fields, numbers, key=key)


ROUNDED_COUNTS = "state.counts_rounded"


_EXACT = {"bfloat16": 256, "float16": 2048}
"""Up to where each type holds all whole numbers."""


class RoundedCounts(Detector):
    """Buffers of 16 bits that count tokens beyond the whole numbers that their type holds.

    Counts that begin at 0 in each forward pass are there to be used after it: summed over the
    workers, unless there is one.
    """

    def __init__(self) -> None:
        self._largest: dict[str, int] = {}
        self._span = PersistentFault()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report the counts that were read in it."""
        beyond = {}
        for one in step.gathered.differences:
            if one.kind is StateKind.COUNTS:
                emptied = bool(one.unchanged_W.all())
                total = int(one.digests_W.sum() if emptied else one.digests_W.max())
                if total >= _EXACT[one.name.rpartition(" ")[2]]:
                    beyond[one.name] = total
        if not beyond:
            return
        for name, total in beyond.items():
            self._largest[name] = max(total, self._largest.get(name, 0))
        self._span.see(step.gathered.step)
        names = list(self._largest)
        largest = max(self._largest.values())
        fields = {"names": shortened(names, _NAMED), "largest": f"{largest:,}"}
        numbers = {**named(names), "largest": largest}
        yield self._span.evidence(ROUNDED_COUNTS, Severity.WARNING, (), fields, numbers)


COUNTED_TWICE = "state.statistics_twice"


class CountedTwice(Detector):
    """Running statistics that move in the backward pass, in two readings at least."""

    def __init__(self) -> None:
        self._names: dict[str, bool] = {}
        self._span = PersistentFault(2)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report what moves in its backward pass."""
        found = [d.name for d in step.gathered.differences if d.kind is StateKind.RECOMPUTED]
        if not found:
            return
        self._names |= dict.fromkeys(found, True)
        if self._span.observe(step.gathered.step, [0]):
            names = list(self._names)
            fields = {"names": shortened(names, _NAMED)}
            yield self._span.evidence(COUNTED_TWICE, Severity.WARNING, (), fields, named(names))


class AdaptedTrains(Detector):
    """Matrices that are trained beside the adapters that are added to them."""

    KIND = StateKind.ADAPTED
    CAUSE = "state.adapted_trains"

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report such matrices."""
        found = [d.name for d in step.gathered.differences if d.kind is self.KIND]
        if found:
            at = step.gathered.step
            fields = {"names": shortened(found, _NAMED), "are": "is" if len(found) == 1 else "are"}
            yield evidence_at(at, self.CAUSE, Severity.WARNING, (), fields, named(found))


class ShardsAlike(AdaptedTrains):
    """Matrices that consist of copies of one shard when the training begins."""

    KIND = StateKind.SHARDS
    CAUSE = "state.shards_alike"


FROZEN_DIFFER = "state.frozen_differ"


class FrozenDiffer(Detector):
    """Frozen modules outside of the watched model whose parameters differ between workers.

    A module that some worker does not have is not compared, nor are workers that share the work on
    each sample: they may hold parts of it.
    """

    def __init__(self) -> None:
        self._fault = PersistentFault()
        self._names: list[str] = []
        self._sharing = SharedWork()

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report what differs in it."""
        sharing = self._sharing.observe(step)
        rows = step.gathered.differences
        held = held_values(rows, StateKind.STARTED, FROZEN) if rows and not sharing else {}
        odd: set[int] = set()
        for name, digests_W in held.items():
            if (digests_W != MISSING_INT).all():
                ranks = minority_ranks(known_values(digests_W, digests_W != MISSING_INT))
                self._names += [name] if ranks and name not in self._names else []
                odd.update(ranks)
        if odd:
            fault = self._fault
            fault.see(step.gathered.step, odd)
            fields = {"names": shortened(self._names, 3)}
            numbers = {"steps": fault.count, "names": self._names[:64]}
            yield fault.evidence(FROZEN_DIFFER, Severity.WARNING, fault.ranks, fields, numbers)


MOST_AGAIN = 4
"""Differences of one kind in a step, besides new ones: one is enough to prove that it lasts."""

_Kinds = tuple[StateKind, ...]
_Named = tuple[_Kinds, tuple[str, ...]]


class ComparedState(Combiner):
    """Compares the digests of all workers; the first worker sends their names once."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._names: dict[int, _Named] = {}
        self._unchanged = UnchangedParameters()
        self._recorded: set[tuple[StateKind, str, bool]] = set()
        self._owned: frozenset[str] | None = None  # names of parameters that some optimizer holds
        self._roles_W: Sequence[Mapping[str, Any]] = ()  # as they were read last

    def learn(self, rank: int, message: Any) -> None:
        """Learn names from a message that has just arrived."""
        if rank != 0 or not len(message.names):
            return
        named = json.loads(message.names.tobytes())
        for items, kinds, names in named.get("items", ()):
            self._names[int(items)] = tuple(map(StateKind, kinds)), tuple(names)

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Return the differences, and the first worker's traced tensors."""
        named = self._named_differences(messages.named)
        found = (
            *self.new_or_few(self._differences(messages, columns["replica"])),
            *self._unchanged_parameters(messages, columns),
            *self.new_or_few(named),
        )
        return {"differences": found, "trace": _trace(messages)}

    def new_or_few(self, found: Iterable[StateDifference]) -> Iterator[StateDifference]:
        """Yield the differences that no step had before, and a few of the others."""
        again: Counter[StateKind] = Counter()
        for one in found:
            key = one.kind, one.name, bool(one.unchanged_W.any())
            again[one.kind] += key in self._recorded
            if key not in self._recorded or again[one.kind] <= MOST_AGAIN:
                yield one
            self._recorded.add(key)

    def _differences(self, messages: Messages, replicas_W: Ints) -> Any:
        items_W = messages.items_W
        if int(items_W[0]) not in self._names or (items_W != items_W[0]).any():
            return ()
        kinds, names = self._names[int(items_W[0])]
        digests_WD = messages["digests_D"].matrix
        unchanged_WD = messages["unchanged_D"].matrix.astype(bool)
        own = StateDigests(kinds, names, digests_WD[0], unchanged_WD[0])
        return differences(own, digests_WD, unchanged_WD, replicas_W)

    def _unchanged_parameters(
        self, messages: Messages, columns: Columns
    ) -> tuple[StateDifference, ...]:
        """Return the parameters of the first worker that do not change."""
        kinds, names = self._names.get(int(messages.items_W[0]), ((), ()))
        digests = _of_first(messages["digests_D"]).tolist()
        if len(kinds) != len(digests):
            return ()
        updates = bool(columns["optimizer_steps"][0] > 0 and columns["lr"][0] > 0)
        found = self._unchanged.see(
            messages.step, kinds, names, digests, updates=updates, owned=self._owned
        )
        return unchanged_differences(found, len(messages))

    def _named_differences(
        self, names_W: Sequence[Mapping[str, Any]]
    ) -> tuple[StateDifference, ...]:
        """Return gradients that changed otherwise than most, and roles where all have sent them."""
        if not any(names_W):
            return ()

        def sent(key: str) -> list[Any]:
            return [names.get(key, ()) for names in names_W]

        changed = named_by(StateKind.CHANGED, sent("changed"))
        moved = (
            *numbered(StateKind.PASSES, sent("passes")),
            *numbered(StateKind.COUNTS, sent("counts")),
            *named_by(StateKind.RECOMPUTED, sent("recomputed")),
            *named_by(StateKind.ADAPTED, sent("adapted")),
            *alike_shards(sent("shards")),
        )
        roles_W = [names["roles"] for names in names_W if names.get("roles")]
        if len(roles_W) < len(names_W):
            return (*changed, *moved)
        self._owned = owned_names(roles_W)
        replaced = replaced_differences(self._roles_W, roles_W)
        self._roles_W = roles_W
        return (*changed, *moved, *role_differences(roles_W), *replaced)


make_combiner = ComparedState


def _trace(messages: Messages) -> TensorTrace | None:
    """Return the first worker's traced tensors, if there are any."""
    if not messages["traced_digests_N"].lengths_R[0]:
        return None
    parts = {
        what: (tuple(map(StateKind, kinds)), tuple(names))
        for what, (kinds, names) in messages.named[0]["traced"].items()
    }
    initial = parts.get("initial")
    count = 0 if initial is None else len(initial[0])
    before = None if initial is None else _tensors(messages, *initial, 0)
    return replace(_tensors(messages, *parts["own"], count), initial=before)


def _tensors(messages: Messages, kinds: _Kinds, names: tuple[str, ...], begin: int) -> TensorTrace:
    rows = slice(begin, begin + len(kinds))
    digests_N, norms_N, sketches = (
        _of_first(messages[name])
        for name in ("traced_digests_N", "traced_norms_N", "traced_sketches")
    )
    sketches_NK = sketches.reshape(-1, TRACE_WIDTH)
    return TensorTrace(kinds, names, digests_N[rows], norms_N[rows], sketches_NK[rows])


def _of_first(arrays: Ragged) -> NDArray[Any]:
    return arrays.flat[: arrays.lengths_R[0]]


_LEAD = 4
"""Steps ahead of the newest, in which all ranks can have the request."""


class AloneDirector(Director):
    """Follows whether each worker trains alone."""

    def __init__(self) -> None:
        super().__init__()
        self._alone = False

    def observe(
        self, step: GatheredStep, changed: Sequence[Finding], known: Sequence[Finding], newest: int
    ) -> Sequence[Request]:
        """Process a step; request other digests once workers train alone."""
        alone = trains_alone(step)
        if alone is None or alone == self._alone:
            return ()
        self._alone = alone
        return [Request(max(step.step, newest) + _LEAD, b"alone" if alone else b"together")]


def make_director(run: DirectedRun) -> AloneDirector | None:
    """Return the director of a run's digests."""
    plan = run.options.get("plan")
    planned = isinstance(plan, dict) and plan.get("local_steps")
    return None if run.num_workers < 2 or planned else AloneDirector()
