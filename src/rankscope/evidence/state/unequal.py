"""The detector of state that should be equal on several workers and is not.

It compares digests, so a single difference is proof. The minority is wrong; among two workers, or
where no two agree, all are named.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault
from rankscope.bus.finding import Severity
from rankscope.bus.replicas import (
    ParametersByPlace,
    StateDifference,
    StateKind,
    known_values,
    minority_ranks,
)
from rankscope.bus.step import GatheredStep, trains_alone
from rankscope.bus.steps import SharedWork, Step
from rankscope.bus.words import count, name_ranks, named, shortened
from rankscope.evidence.state.roles import ROLES_EVERY, Role, tie_of
from rankscope.stats.arrays import MISSING_INT, Ints
from rankscope.stats.state import Stateful

HEALED_AFTER = 128
"""Steps without a difference, after which a fault is over: two cycles of the digest schedule."""

AVERAGES = "averages-differ"

_AVERAGED = (
    *("sync.not_reduced", "sync.gradients_differ"),
    *("state.parameters_differ", "state.optimizer_differs"),
)
"""What differs from average to average of the parameters, where each worker trains alone."""

_SCALED = 1e-3
_SAME_FACTOR = 0.01  # of all gradients that a worker scales, beside rounding in bfloat16
_SAME_NORM = 1e-4
_NORM_DIFFERS = 1e-6

_CAUSES = {
    StateKind.PARAMETER: "state.parameters_differ",
    StateKind.BUFFER: "state.buffers_differ",
    StateKind.BROADCAST: "state.buffers_differ",
    StateKind.STATISTICS: "state.buffers_differ",
    StateKind.OPTIMIZER: "state.optimizer_differs",
}
_ROLE_WORDS = (
    (Role.TRAINED, "trained", "frozen"),
    (Role.OWNED, "in the optimizer's parameter groups", "in no parameter group"),
    (Role.LEFT_OUT, "left out of the reduction", "reduced"),
)
_DRIFTING = "running-statistics"
_ROLES = "roles-differ"
_LEFT_OUT = "left-out-drifts"
_OF_ROLES = (_ROLES, _LEFT_OUT)
_BY_PLACE = "frozen-by-place"
_TRAINED_BY_PLACE = "trained-by-place"
_SCRATCH = "scratch-buffers"


class UnequalState(Detector):
    """Parameters, buffers, optimizer state and reduced gradients that differ between workers.

    - A parameter or buffer whose digests differ, and the optimizer's state of such a parameter.
      Running statistics that DDP broadcasts before each step are buffers right after that; until
      then, they may differ. Buffers that no checkpoint holds and that keep changing are a note:
      each worker may count for itself.
    - A reduced gradient that differs: not reduced, if the reduction left the local bits as they
      were, or if the norms of what should be reduced are those of the local gradients.
    - A gradient that was equal after the reduction and differs when the optimizer is called:
      scaled on one worker alone, or changed otherwise.
    - ``optimizer.step`` called with gradients that no reduction has seen.
    - Models of other names, shapes or types.
    - A parameter that some workers train, update or tie otherwise than others.
    - A parameter that is left out of the reduction, and differs.

    A loop that reduces by itself may leave that to its optimizer, which may shard its state: there,
    gradients at its call and its state count only for parameters that differ after it. Workers that
    share the work on the same samples hold parts of one model there: each is compared with those at
    the same place of other groups. Parameters may follow that place by themselves, as those of
    parallel experts do: frozen ones, and trained ones whose gradients follow it, too, unless all
    of the model's do.
    """

    SETTINGS = (
        *("_num_workers", "_local_buffers", "_local_steps", "_replicated", "_by_loop", "_unsaved"),
    )

    def __init__(
        self,
        num_workers: int,
        *,
        local_buffers: bool = False,  # workers are meant to keep buffers of their own
        local_steps: int = 0,  # from average to average; 0 where each step reduces
        replicated: bool = False,  # all parameters are, those left out of the reduction too
        by_loop: bool = False,  # the training's own loop reduces, or its optimizer
        unsaved: Sequence[str] = (),  # names of buffers that no checkpoint holds
        trained: int = 0,  # number of parameters that are trained; 0 if unknown
    ) -> None:
        self._num_workers = num_workers
        self._placed = ParametersByPlace(trained)
        self._unsaved = frozenset(unsaved)
        self._unsaved_before: dict[str, list[int]] = {}
        self._by_loop = by_loop
        self._replicated = replicated
        self._local_buffers = local_buffers or local_steps > 0
        self._local_steps = local_steps
        self._between = _Between(-1)
        self._averages = _Averages()
        self._sharing = SharedWork()
        self._faults: dict[str, _Difference] = {}
        self._applied_alike = False  # in the last step with digests of applied gradients
        self._unreduced_since = -1  # first step of those without a reduction; -1 where it is known

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report differences in it, and differences that have ended."""
        if self._num_workers < 2:
            return ()
        gathered = step.gathered
        found: list[FaultEvidence] = []
        if not self._local_steps and self._averages.observe(step):
            known = (key for key in self._faults if key in _AVERAGED)
            found += [self._evidence(key, self._faults[key]) for key in known]
        for seen in self._differences(step):
            fault = self._faults.setdefault(seen.key, _Difference(seen.cause))
            fault.add(gathered.step, seen)
            found.append(self._evidence(seen.key, fault))
        for key, fault in self._faults.items():
            healed_after = HEALED_AFTER if key not in _OF_ROLES else 2 * ROLES_EVERY
            if gathered.step - fault.last >= healed_after and fault.close():
                found.append(self._evidence(key, fault))
        return found

    def _evidence(self, key: str, fault: "_Difference") -> FaultEvidence:
        meant = key in (_DRIFTING, _BY_PLACE, _TRAINED_BY_PLACE, _SCRATCH) or (
            self._local_buffers and key == "state.buffers_differ"
        )
        meant |= key == _LEFT_OUT and not self._replicated
        averaged = self._averages.open and key in _AVERAGED
        severity = Severity.NOTE if meant or averaged else Severity.ERROR
        more = self._averages.fields() if averaged else {}
        return fault.describe(key, severity, self._num_workers, more)

    def _differences(self, step: Step) -> Iterable["_Seen"]:
        """Yield the differences in a step."""
        workers = step.gathered.workers
        places_W = self._places(step)
        replicas_W = workers["replica"] if places_W is None else places_W
        gathered = _of_loop(step.gathered, places_W) if self._by_loop else step.gathered
        placed = self._placed.observe(gathered.differences) if self._by_loop else ()
        if placed:
            everyone = range(self._num_workers)
            yield _Seen("state.parameters_differ", everyone, placed, own_key=_TRAINED_BY_PLACE)
            rest = tuple(d for d in gathered.differences if d.name not in placed)
            gathered = replace(gathered, differences=rest)
        alone = self._local_steps > 0 and step.all_true("unreduced")
        reduced_elsewhere = self._reduced_elsewhere(step)
        kinds = {difference.kind for difference in gathered.differences}
        by_optimizer = self._by_loop and StateKind.PARAMETER not in kinds
        if step.some_true("unreduced") and not (alone or reduced_elsewhere or by_optimizer):
            unreduced = np.flatnonzero(workers["unreduced"]).tolist()
            words = "no reduction was seen before its call"
            yield _Seen("sync.not_reduced", unreduced, words=words, since=self._unreduced_since)
        if places_W is None:
            yield from _layouts(step)
        roles = [d for d in gathered.differences if d.kind is StateKind.ROLE]
        differ = [d for d in roles if any(_role_words(d.digests_W))]
        words = "; ".join(dict.fromkeys(w for d in differ for w in _role_words(d.digests_W)))
        if words:
            yield _Seen("state.parameters_differ", _odd_of(differ), _names(differ), words, _ROLES)
        if self._local_steps:
            yield from self._after_averages(step)
            return
        if not gathered.differences and (not gathered.observed or step.alike("reduced_norm")):
            return
        left_out = [d for d in gathered.differences if d.kind is StateKind.LEFT_OUT]
        if left_out:
            ranks = _odd_of(left_out)
            yield _Seen("state.parameters_differ", ranks, _names(left_out), own_key=_LEFT_OUT)
        yield from self._gradients(gathered, replicas_W)
        yield from self._by_cause(gathered, replicas_W)

    def _by_cause(self, gathered: GatheredStep, replicas_W: Ints) -> Iterable["_Seen"]:
        """Yield the differences of parameters, buffers and optimizer state.

        Where the parameter is equal, an optimizer keeps a part of the state, or does not use it.
        """
        differ = {d.name for d in gathered.differences if d.kind is StateKind.PARAMETER}
        for kind, cause in _CAUSES.items():
            by_key: dict[str, list[StateDifference]] = {}
            for each in gathered.differences:
                own_key = self._own_key(each) if each.kind is kind else None
                kept_apart = kind is StateKind.OPTIMIZER and each.name not in differ
                if own_key is not None and not kept_apart:
                    by_key.setdefault(own_key, []).append(each)
            for own_key, found in by_key.items():
                ranks = _odd(found, replicas_W)
                yield _Seen(cause, ranks, _names(found), own_key=own_key)

    def _own_key(self, difference: StateDifference) -> str | None:
        """Return the key of a difference's own finding, empty without; None until that is known."""
        if difference.kind is StateKind.STATISTICS:
            return _DRIFTING
        if difference.kind is StateKind.BUFFER and difference.name in self._unsaved:
            now = difference.digests_W.tolist()
            before = self._unsaved_before.setdefault(difference.name, now)
            self._unsaved_before[difference.name] = now
            if before is now:
                return None
            return "" if before == now else _SCRATCH
        by_place = self._by_loop and difference.frozen and difference.follows_places
        return _BY_PLACE if by_place else ""

    def _places(self, step: Step) -> Ints | None:
        """Return each worker's part of a model that a loop divides; None where it is whole."""
        if not self._by_loop:
            return None
        self._sharing.observe(step)
        return self._sharing.places(self._num_workers)

    def _after_averages(self, step: Step) -> Iterable["_Seen"]:
        """Yield the differences after the average that a number of local steps has to contain."""
        gathered = step.gathered
        replicas_W = gathered.workers["replica"]
        number = gathered.step
        local_steps = self._local_steps
        buffers = [d for d in gathered.differences if d.kind is StateKind.BUFFER]
        if buffers:
            cause = _CAUSES[StateKind.BUFFER]
            yield _Seen(cause, _odd(buffers, replicas_W), _names(buffers))
        if self._between.number != number // local_steps:
            self._between = _Between(number // local_steps)
        if not step.all_known("param_digest"):
            return
        found = [d for d in gathered.differences if d.kind is StateKind.PARAMETER]
        between = self._between
        between.add(_odd(found, replicas_W), _names(found))
        if between.steps == local_steps and between.ranks:
            words = f"the plan has an average every {count(local_steps, 'step')}"
            cause = _CAUSES[StateKind.PARAMETER]
            yield _Seen(cause, between.ranks, between.names, words, own_key=AVERAGES)

    def _reduced_elsewhere(self, step: Step) -> bool:
        """Return whether all optimizers lately got the same bits: the training itself reduces."""
        applied_W = step.gathered.workers["applied_digest"]
        known_W = applied_W != MISSING_INT
        if known_W.any():
            self._applied_alike = bool(known_W.all() and (applied_W == applied_W[0]).all())
        if not step.some_true("unreduced") or (known_W.any() and self._applied_alike):
            self._unreduced_since = -1
        elif self._unreduced_since < 0:
            self._unreduced_since = step.gathered.step
        return self._applied_alike

    def _gradients(self, gathered: GatheredStep, replicas_W: Ints) -> Iterable["_Seen"]:
        reduced = [d for d in gathered.differences if d.kind is StateKind.REDUCED]
        alone = [d for d in reduced if d.unchanged_W.any()]
        rest = [d for d in reduced if not d.unchanged_W.any()]
        if alone:
            ranks = np.flatnonzero(np.any([d.unchanged_W for d in alone], axis=0)).tolist()
            words = "the reduction left their bits as they were"
            if self._by_loop:
                words = "the optimizer is called with each worker's own, and its parameters differ"
            yield _Seen("sync.not_reduced", ranks, _names(alone), words)
        norms = _unequal_norms(gathered, replicas_W)
        if norms is not None and not alone:
            ranks, local = norms
            if local:
                words = "their norm after the reduction is that of the local gradient"
                yield _Seen("sync.not_reduced", ranks, words=words)
            else:
                words = "its norm after the reduction differs"
                yield _Seen("sync.gradients_differ", ranks, words=words)
        if rest:
            words = "its bits after the reduction differ"
            yield _Seen("sync.gradients_differ", _odd(rest, replicas_W), _names(rest), words)
        calls_W = gathered.workers["optimizer_steps"]
        if not gathered.differences or (calls_W != calls_W[0]).any():
            return  # some called no optimizer: another detector reports it
        names = {d.name for d in reduced}
        applied = [
            d for d in gathered.differences if d.kind is StateKind.APPLIED and d.name not in names
        ]
        if applied and norms is None:
            later = _changed_later(gathered, applied, _odd(applied, replicas_W))
            before = self._faults.get("sync.gradients_differ")
            known = before is not None and before.open and before.ranks.issuperset(later.ranks)
            if later.cause == "sync.gradients_differ" or not known:
                yield later


class _Averages(Stateful):
    """Averages of the parameters that no plan declares, between steps of each worker alone."""

    def __init__(self) -> None:
        self.open = False  # whether the training averages, as far as is known
        self._apart: set[str] = set()  # parameters that differed when last compared
        self._first = -1  # the first step that showed a difference
        self._last = -1  # the last step with an average
        self._steps = 0  # most steps from one seen average to the next
        self._count = 0

    def observe(self, step: Step) -> bool:
        """Process a step; return whether it has shown the first average, or too long none."""
        number = step.gathered.step
        was_open = self.open
        alone = trains_alone(step.gathered)
        if alone is not None:
            self.open &= alone
        if alone:
            by_kind: dict[StateKind, set[str]] = {}
            for each in step.gathered.differences:
                by_kind.setdefault(each.kind, set()).add(each.name)
            apart = by_kind.get(StateKind.PARAMETER, set())
            own = by_kind.get(StateKind.REDUCED, set()) | by_kind.get(StateKind.APPLIED, set())
            if not apart and own & self._apart:
                before = self._last if self._count else self._first - 1
                self._steps = max(self._steps, number - before)
                self._last = number
                self._count += 1
                self.open = True
            elif apart and self._first < 0:
                self._first = number
            self._apart = apart
        if self.open:
            self.open = number - self._last <= _PATIENCE * self._steps + HEALED_AFTER
        return self.open != was_open

    def fields(self) -> Mapping[str, object]:
        """Return the fields of notes that are about averages."""
        return {"met": f"{self._last:,}", "averages": count(self._count, "time")}


_PATIENCE = 4
"""Times the longest pause between averages, after which they have ended."""


class _Between(Stateful):
    """The steps of one interval between two averages: in one of them, the workers have to agree."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps = 0  # number of steps that have been compared
        self.ranks: list[int] = []  # workers that differ in the step in which fewest do
        self.names: list[str] = []  # of the differing parameters there

    def add(self, ranks: list[int], names: list[str]) -> None:
        """Add a step in which parameters were compared."""
        if not self.steps or len(ranks) < len(self.ranks):
            self.ranks = ranks
            self.names = names
        self.steps += 1


@dataclass(frozen=True, slots=True)
class _Seen:
    """A difference in one step."""

    cause: str
    ranks: Sequence[int]
    names: Sequence[str] = ()  # of the differing tensors
    words: str = ""  # for the finding
    own_key: str = ""  # of the fault, where the cause is no key
    since: int | None = None  # an earlier step that shows it, too

    @property
    def key(self) -> str:
        return self.own_key or self.cause


class _Difference(PersistentFault):
    """One kind of difference over the run."""

    def __init__(self, cause: str = "") -> None:
        super().__init__()
        self.cause = cause
        self._names: dict[str, bool] = {}
        self._words = ""

    def add(self, step: int, seen: _Seen) -> None:
        """Add the difference in one step."""
        self.see(step, seen.ranks, first=seen.since)
        self._words = self._words or seen.words
        self._names |= dict.fromkeys(seen.names, True)

    def describe(
        self, key: str, severity: Severity, num_workers: int, more: Mapping[str, object]
    ) -> FaultEvidence:
        """Return the evidence so far, with ``more`` fields for its template."""
        fields = {
            "differ": "differs" if len(self.ranks) == 1 else "differ",
            "names": f" ({shortened(list(self._names), 3)})" if self._names else "",
            "words": self._words,
            **(_SOME_APART if len(self.ranks) < num_workers else _ALL_APART),
            "over": " It is over now." if not self.open else "",
            **more,
        }
        numbers: dict[str, Any] = {"steps": self.count, **named(list(self._names))}
        if self.cause == "sync.gradients_differ":
            numbers["other_causes"] = ["numerics.reduction_error"]
        return self.evidence(self.cause, severity, self.ranks, fields, numbers, key=key)


_SOME_APART = {
    "apart": "differ from the other workers'",
    "is_apart": "differs from the other workers'",
}
_ALL_APART = {"apart": "differ from worker to worker", "is_apart": "differs from worker to worker"}


def _of_loop(gathered: GatheredStep, places_W: Ints | None) -> GatheredStep:
    """Return a step with the differences that count where a loop's optimizer may reduce."""
    found = gathered.differences
    if places_W is not None:
        found = tuple(d for d in found if d.minority_ranks(places_W))
    names = {d.name for d in found if d.kind is StateKind.PARAMETER}
    left_out = {StateKind.REDUCED, StateKind.APPLIED}
    if any(d.kind in left_out and d.name not in names for d in found):  # the optimizer reduces
        left_out.add(StateKind.OPTIMIZER)
    kept = tuple(d for d in found if d.name in names or d.kind not in left_out)
    return replace(gathered, differences=kept)


def _layouts(step: Step) -> Iterable[_Seen]:
    """Yield a difference of the models' names, shapes or types."""
    layout_W = step.gathered.workers["state_layout"]
    if step.alike("state_layout"):
        return
    odd = minority_ranks(known_values(layout_W, layout_W != MISSING_INT))
    if odd:
        words = "names, shapes or types"
        yield _Seen("state.parameters_differ", odd, words=words, own_key="state-layout")


def _changed_later(
    gathered: GatheredStep, applied: Sequence[StateDifference], ranks: Sequence[int]
) -> _Seen:
    """Return the difference of gradients that changed between the reduction and the optimizer."""
    names = _names(applied)
    scales_W = gathered.workers["applied_scale"]
    scale = _own_scale(scales_W, ranks)
    several = bool((gathered.workers["applied_spread"][list(ranks)] > _SAME_FACTOR).any())
    if scale is None or several:
        words = "its bits were changed between the reduction and optimizer.step"
        if several:
            changed = {d.name for d in gathered.differences if d.kind is StateKind.CHANGED}
            names = [name for name in names if name in changed] or names
            words += ", not all by one factor"
        return _Seen("sync.gradients_differ", ranks, names, words)
    words = f"multiplied by {scale:.3g}, the others' by {np.median(scales_W):.3g}"
    return _Seen("state.parameters_differ", ranks, names, words, own_key="applied-scale")


def _odd(found: Sequence[StateDifference], replicas_W: Ints) -> list[int]:
    return sorted({rank for difference in found for rank in difference.minority_ranks(replicas_W)})


def _odd_of(found: Sequence[StateDifference]) -> list[int]:
    """Return the workers that differ from most, of all of them."""
    return sorted({rank for d in found for rank in minority_ranks(d.digests_W.tolist())})


def _names(found: Sequence[StateDifference]) -> list[str]:
    return [difference.name for difference in found]


def _unequal_norms(gathered: GatheredStep, replicas_W: Ints) -> tuple[list[int], bool] | None:
    """Return the workers whose reduced gradient has another norm, and whether it is the local one.

    None when the norms agree, or are of parts without a digest, as of ZeRO's shards.
    """
    norms_W = gathered.workers["reduced_norm"]
    local_W = gathered.workers["grad_norm"]
    if not gathered.observed or gathered.reduced_copies < len(norms_W):
        return None
    lowest = float(norms_W.min())
    highest = float(norms_W.max())
    scale = max(abs(lowest), abs(highest))
    if not math.isfinite(scale) or highest - lowest <= _NORM_DIFFERS * scale:
        return None
    replicated = replicas_W[0] != MISSING_INT and bool((replicas_W == replicas_W[0]).all())
    if not replicated or (gathered.workers["reduced_digest"] == MISSING_INT).any():
        return None
    own_W = np.abs(norms_W - local_W) <= _SAME_NORM * scale
    if own_W.all():
        return list(range(len(norms_W))), True
    typical = float(np.median(norms_W))
    odd = np.flatnonzero(np.abs(norms_W - typical) > _NORM_DIFFERS * scale).tolist()
    if len(norms_W) == 2 or 2 * len(odd) >= len(norms_W):
        odd = list(range(len(norms_W)))
    return odd, False


def _own_scale(scales_W: NDArray[np.float64], ranks: Sequence[int]) -> float | None:
    """Return the factor of these ranks' gradients, if it is not the others'; else None."""
    own = scales_W[list(ranks)]
    if not len(own) or not np.isfinite(scales_W).all() or len(ranks) == len(scales_W):
        return None
    typical = float(np.median(np.delete(scales_W, list(ranks))))
    apart = np.abs(own - typical) > _SCALED * max(abs(typical), 1e-30)
    return float(np.median(own)) if apart.all() else None


def _role_words(words_W: Ints) -> Iterable[str]:
    """Yield the differences of one parameter's roles."""
    for role, with_it, without in _ROLE_WORDS:
        yield from _on_some((words_W & role).astype(bool), with_it, without)
    ties_W = np.array([tie_of(int(word)) for word in words_W])
    if (ties_W != ties_W[0]).any():
        yield from _on_some(ties_W != 0, "tied", "untied")


def _on_some(flags_W: NDArray[np.bool_], with_it: str, without: str) -> Iterable[str]:
    count_with = int(flags_W.sum())
    if 0 < count_with < len(flags_W):
        few = 2 * count_with < len(flags_W)
        ranks = np.flatnonzero(flags_W if few else ~flags_W).tolist()
        found = f"{with_it if few else without} on {name_ranks(ranks)}"
        both = f" and {with_it} on the other" if len(flags_W) == 2 else " alone"
        yield f"{found}{both}"
