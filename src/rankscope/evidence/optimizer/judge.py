"""The detector of an optimizer that a session does not begin with as it should.

Each session begins with what the optimizer holds before its first call. The parameters in it show
which saved state a restarted job has loaded: the one whose parameters have the same bits. The rest
of the optimizer's state has to be that one's, too.

Legend of shapes: W workers.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from rankscope.bus.detector import (
    BEGUN_ANEW,
    Detector,
    FaultEvidence,
    RestartDetector,
    RunFacts,
    evidence_at,
)
from rankscope.bus.finding import Severity
from rankscope.bus.messages import held_values
from rankscope.bus.replicas import StateKind, copied_values
from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import Step
from rankscope.bus.words import count, listed, name_ranks, shortened
from rankscope.evidence.optimizer import KEY
from rankscope.evidence.optimizer.updates import (
    LostUpdates,
    OptimizerWithoutGradients,
    ReplacedWeights,
    StaleCopies,
    unless_all,
)
from rankscope.stats.arrays import MISSING_INT, Bools, Floats, Ints, how_far
from rankscope.stats.state import Stateful

AHEAD = "state.counter_ahead"
BEHIND = "counter-behind"
RESUMED = "state.resume_mismatch"
NOT_LOADED = "parameters-not-loaded"
SETTINGS = "optimizer-settings-changed"
ONCE = "optimizer-settings-once"
PRECISION = "moments-less-precise"
SCHEDULE = "schedule-begins-anew"
COUNTERS = "counters-of-ranks-differ"
APART = "optimizers-begin-apart"
UNCOUNTED = "updates-of-ranks-differ"
ROUNDED = "parameters-rounded"

_MOST_SAVED = 16
_FIRST_RATES = 4
_LAST_RATES = 17
_JUMP = 32  # times the largest change from one of those to the next
_MOST_RATES = 4096  # of the run, that a restarted schedule is compared with
_PARAMETERS = "parameters"
_OWN_BITS = f"{_PARAMETERS}: bits"
_WITHOUT = "without: "
_MOST_NAMED = 3
_COUNTED_ONCE = {COUNTERS, UNCOUNTED}  # findings of counters that lag on some ranks
_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
_NOTHING = np.empty(0, np.int64)
_ROUNDING = 0.02  # of a norm: that of all elements to 8 bits is less
_SAME_NORM = 1e-12  # of the same bits, added in another order

Mismatch = tuple[str, list[int], Severity]
"""A difference from a saved state: words, the ranks concerned (none where all are), severity."""


_BY_STEP = {"lr": "the learning rate", "weight_decay": "the weight decay"}
_NEAR = 0.1


class _Holdings(Stateful):
    """What all workers' optimizers held in a step ``[W]``, named as by ``PendingHoldings.read``."""

    def __init__(self, step: int = -1, values: dict[str, Ints] | None = None) -> None:
        self.step = step
        self.values: dict[str, Ints] = values or {}

    def get(self, name: str) -> Ints:
        """Return the values of a name ``[W]``; all 0 without."""
        known = self.values.get(name)
        width = len(next(iter(self.values.values()), _NOTHING))
        return np.zeros(width, np.int64) if known is None else np.where(
            known == MISSING_INT, 0, known
        )  # fmt: skip

    @property
    def moments(self) -> list[str]:
        """Names of the moments that some worker holds."""
        keys = (name.removesuffix(": held") for name in self.values if name.endswith(": held"))
        return [key for key in keys if key != _PARAMETERS]

    @property
    def num_parameters(self) -> int:
        """Number of parameters, or of their shards, on the worker that holds most."""
        return int(self.get(f"{_PARAMETERS}: held").max(initial=0))

    @property
    def is_empty(self) -> bool:
        """Whether no worker holds a moment."""
        return not self.moments

    @property
    def is_zero(self) -> bool:
        """Whether there are moments, all of them zero on all workers."""
        held = [(self.get(f"{k}: held"), self.get(f"{k}: zero")) for k in self.moments]
        return bool(held) and all((h == zero).all() for h, zero in held)

    @property
    def counter(self) -> tuple[int, int]:
        """The lowest and the highest step counter; 0 without."""
        lowest = int(self.get("step: lowest").min(initial=0 if self.is_empty else 1 << 62))
        highest = int(self.get("step: highest").max(initial=0))
        return min(lowest, highest), highest

    @property
    def is_behind(self) -> bool:
        """Whether all step counters are zero, and moments on all workers are not."""
        held = [(self.get(f"{k}: held"), self.get(f"{k}: zero")) for k in self.moments]
        some = bool(held) and all((zero < h).all() for h, zero in held)
        return some and "step: highest" in self.values and self.counter == (0, 0)

    def finer(self, kind: str) -> Ints:
        """Return how many of some in float32 16 bits cannot hold, where known ``[K]``."""
        known: Ints = self.values.get(f"{kind}: finer", _NOTHING)
        finer_K: Ints = known[known != MISSING_INT]
        return finer_K

    def types(self, kind: str) -> list[str]:
        """Return the types of the parameters, or of a moment."""
        counted = ("held", "zero", "bits", "bits in any order", "finer")
        names = (n.split(": ", 1) for n in self.values if n.startswith(f"{kind}: "))
        return sorted(name for _, name in names if name not in counted)

    def differs(self, other: "_Holdings", name: str) -> list[int]:
        """Return the ranks whose value of a name differs from another moment's."""
        mine = self.get(name)
        theirs = other.get(name)
        return np.flatnonzero(mine != theirs).tolist()

    def norms(self, key: str) -> dict[str, Floats]:
        """Return the norms of a moment ``[W]`` by parameter, where known; NaN elsewhere."""
        found = {}
        for name, bits_W in self.values.items():
            if name.startswith(f"{key} of ") and name.endswith(": norm"):
                norms_W = np.where(bits_W == MISSING_INT, np.nan, bits_W.view(np.float64))
                found[name.removeprefix(f"{key} of ").removesuffix(": norm")] = norms_W
        return found

    @property
    def settings(self) -> dict[str, list[str]]:
        """Settings by name, with their values in words."""
        found: dict[str, list[str]] = {}
        for each in self.values:
            if each.startswith("setting "):
                _, name, value = each.split(" ", 2)
                found.setdefault(name, []).append(value)
        return found


class OptimizerStart(RestartDetector):
    """An optimizer whose state is not what a session should begin with.

    - Step counters above zero beside moments that are all zero: the optimizer was called before the
      training, with zero gradients. Its bias correction is then that of a later step.
    - Step counters of zero beside moments that are not: the bias correction begins anew.
    - A restarted job whose parameters are those of a saved state, bit for bit, and whose moments or
      counters are not: empty, zero, of another moment, of other parameters, of another rank.
    - A restarted job whose moments and counters are those of a saved state, bit for bit, and whose
      parameters are not: those of the run's first step, or others on some ranks alone.
    - A restarted job with an empty optimizer, and with the parameters of the run's first step or of
      no step that is known: another training, which begins anew. So it is with other settings or
      other data, if the job before had ended by itself.
    - Step counters that differ between ranks, or state that some ranks do not have at all, before
      the first update: they have not loaded one checkpoint.
    - Step counters that lag on some ranks alone, of parameters whose moments are zero or missing
      there: the optimizer leaves them out. Not of experts, which may get no tokens on a rank.
    - Step counters that are all lower on some ranks: updates were not counted, or not made there.
    - Settings that differ from those before the restart, a learning rate that goes through earlier
      steps of the run again, parameters that were rounded to 16 bits at a restart, and moments of a
      narrower type than their parameters: notes.
    """

    SETTINGS = ("_after_complete", "_own_rows")

    def __init__(self, after_complete: bool = False, rows: int | None = None) -> None:
        super().__init__()
        self._after_complete = after_complete  # whether the job before had ended by itself
        self._own_rows = rows  # of this job's data sets; None if unknown
        self._rows = rows or 0  # of those of the last job
        self._first = _Holdings()
        self._last = _Holdings()  # at the last moment that was read
        self._saved: deque[_Holdings] = deque(maxlen=_MOST_SAVED)
        self._counts: dict[str, int] = {}  # of findings, by cause or key
        self._first_rates: list[float] = []  # of the run's steps before the restart
        self._rates: list[float] | None = None  # of those of a session that continues it
        self._last_rates: deque[float] = deque(maxlen=_LAST_RATES)  # before the restart

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report what is wrong where a session begins."""
        rows = step.gathered.differences
        number = step.gathered.step
        started = held_values(rows, StateKind.STARTED, KEY) if rows else {}
        saved = held_values(rows, StateKind.SAVED, KEY) if rows else {}
        if started:
            yield from self._begin(_Holdings(number, started))
        yield from self._follow_rate(number, step.ends("lr")[1])
        if saved:
            self._last = _Holdings(number, saved)
            self._saved.append(self._last)
            yield from self._precision(self._last)
            yield from self._lagging(self._last)
            yield from self._uncounted(self._last)

    def _begin(self, now: _Holdings) -> Iterable[FaultEvidence]:
        yield from self._begins_apart(now)
        continues = self._restarts() and self._first.step >= 0
        self._rates = [] if continues else None
        if not continues:
            self._first = now
            if now.is_zero and now.counter[0] > 0:
                yield self._ahead(now)
            if now.is_behind:
                yield self._finding(
                    RESUMED, Severity.WARNING, now, {"moments": listed(now.moments)}, key=BEHIND
                )
        else:
            yield from self._compare(now)
            if changed := self._changed_settings(now):
                yield self._finding(
                    RESUMED, Severity.NOTE, now, {"words": listed(changed)}, key=SETTINGS
                )
        self._last = now
        self._rows = self._own_rows or self._rows
        yield from self._precision(now)

    def begins_anew(self, gathered: GatheredStep) -> FaultEvidence | None:
        """Return evidence that a restarted job has loaded nothing of what the run is known to hold.

        Its parameters are those of the run's first step, and its moments are no saved ones. Or its
        optimizer has lost all moments, and its parameters are no saved ones on any rank.
        """
        rows = gathered.differences
        started = held_values(rows, StateKind.STARTED, KEY) if rows else {}
        if not started or self._first.step < 0:
            return None
        now = _Holdings(gathered.step, started)
        if not now.differs(self._first, _OWN_BITS):
            saved = self._state_of(now)
            if saved is not None and saved.differs(now, _OWN_BITS):
                return None
            what = "the parameters of the run's first step, bit for bit"
        elif self._is_unknown(now):
            what = (
                "an empty optimizer, and with parameters that no earlier step is known to have had"
            )
        elif other := self._other_job(now, float(np.fmax.reduce(gathered.workers["lr"]))):
            what = f"{listed(other)}, after the one before had ended by itself"
        else:
            return None
        return self._finding(RESUMED, Severity.NOTE, now, {"what": what}, key=BEGUN_ANEW)

    def _other_job(self, now: _Holdings, rate: float) -> list[str]:
        """Return in words how a job that loaded no moments differs from the one before.

        Nothing where that one may have been cut off: a restart has to go on as it was.
        """
        if not self._after_complete or not (now.is_empty or now.is_zero):
            return []
        other = []
        if self._lost_moments(now):
            changed = self._changed_settings(now)
            other += [f"other settings of it ({listed(changed)})"] if changed else []
            last = self._last_rates[-1] if self._last_rates else math.nan
            changes = np.abs(np.diff(self._last_rates))
            far = abs(rate - last) > max(_JUMP * changes.max(initial=0), last / 20)
            if far and not any(math.isclose(rate, earlier) for earlier in self._first_rates):
                other.append(f"a learning rate of {rate:.4g} ({last:.4g} before)")
        if self._own_rows and self._rows and self._own_rows != self._rows:
            other.append(f"a data set of {self._own_rows:,} rows ({self._rows:,} before)")
        return ["an empty optimizer", *other] if other else []

    def _lost_moments(self, now: _Holdings) -> bool:
        before = (self._last, self._first, *self._saved)
        return (now.is_empty or now.is_zero) and not all(one.is_empty for one in before)

    def _is_unknown(self, now: _Holdings) -> bool:
        """Return whether moments were lost, and no rank has the parameters of a saved state."""
        if not self._lost_moments(now):
            return False
        width = len(now.get(_OWN_BITS))
        return all(len(now.differs(saved, _OWN_BITS)) == width for saved in self._saved)

    def _begins_apart(self, now: _Holdings) -> Iterable[FaultEvidence]:
        """Report ranks that begin with the optimizer's state of another step, or with none."""
        counters_W = now.get("step: highest")
        if now.is_empty or now.get("without").any() or not counters_W.any():
            return
        held_W = np.sum([now.get(f"{key}: held") for key in now.moments], axis=0)
        states_W = np.where(held_W > 0, counters_W, -1)
        states, counts = np.unique(states_W, return_counts=True)
        if len(states) < 2:
            return
        usual = states[counts.argmax()] if counts.max() * 2 > len(states_W) else None
        ranks = [rank for rank, state in enumerate(states_W) if state != usual]
        words = []
        for state in states:
            there = name_ranks(np.flatnonzero(states_W == state).tolist())
            what = "none" if state < 0 else f"that of {count(int(state), 'update')}"
            words.append(f"{what} on {there}")
        fields = {"words": listed(words)}
        yield self._finding(
            "state.optimizer_differs", Severity.ERROR, now, fields, ranks, key=APART
        )

    def _compare(self, now: _Holdings) -> Iterable[FaultEvidence]:
        """Compare with the saved states of the same parameters; one of them has to agree."""
        alike = [one for one in self._saved if not now.differs(one, _OWN_BITS)]
        others = [one for one in self._saved if now.differs(one, _OWN_BITS)]
        found = [one for one in (mismatch(now, saved, others) for saved in alike) if one]
        if alike and len(found) == len(alike):
            words, ranks, severity = found[-1]
            where = f"{alike[-1].step:,}"
            yield self._finding(RESUMED, severity, now, {"words": words, "saved": where}, ranks)
        elif not alike and (state := self._state_of(now)) is not None:
            yield from self._not_loaded(now, state)

    def _state_of(self, now: _Holdings) -> _Holdings | None:
        """Return the last saved state that has these moments and counters, bit for bit."""
        if now.is_empty or now.is_zero:
            return None
        alike = (
            saved
            for saved in reversed(self._saved)
            if saved.moments == now.moments and saved.counter == now.counter
            and not any(now.differs(saved, f"{key}: bits") for key in now.moments)
        )  # fmt: skip
        return next(alike, None)

    def _not_loaded(self, now: _Holdings, saved: _Holdings) -> Iterable[FaultEvidence]:
        """Report parameters that are not those of the saved state whose moments there are."""
        changed = now.differs(saved, _OWN_BITS)
        fresh = [rank for rank in changed if rank not in now.differs(self._first, _OWN_BITS)]
        width = len(now.get(_OWN_BITS))
        others = _Moment(_PARAMETERS, now, saved).beyond_rounding
        if fresh:
            severity = Severity.ERROR
            ranks = fresh
            what = "are still those of the run's first step"
        elif others:
            severity = Severity.WARNING
            ranks = changed
            what = f"are not ({others})"
        else:
            yield from self._rounded(now, saved)
            return
        if not fresh and len(ranks) == width:  # averaged, or converted
            severity = Severity.NOTE
        where = f"of {name_ranks(ranks)} " if len(ranks) < width else ""
        fields = {"words": where + what, "saved": f"{saved.step:,}"}
        yield self._finding(
            RESUMED, severity, now, fields, unless_all(ranks, width), key=NOT_LOADED
        )

    def _rounded(self, now: _Holdings, saved: _Holdings) -> Iterable[FaultEvidence]:
        """Report parameters in float32 that 16 bits could hold, and could not when saved."""
        fine, were = now.finer(_PARAMETERS), saved.finer(_PARAMETERS)
        if len(fine) and len(fine) == len(were) and not fine.any() and were.all():
            fields = {"saved": f"{saved.step:,}", "number": count(int(were.max()), "parameter")}
            yield self._finding(RESUMED, Severity.NOTE, now, fields, key=ROUNDED)

    def _changed_settings(self, now: _Holdings) -> list[str]:
        before = self._last.settings
        return [
            f"{name} is {' and '.join(values)} and was {' and '.join(before[name])}"
            for name, values in now.settings.items()
            if name in before and set(values) != set(before[name])
        ]

    def _follow_rate(self, step: int, rate: float) -> Iterable[FaultEvidence]:
        """Report a learning rate that begins again as in the first steps of the run."""
        if self._rates is None:
            if len(self._first_rates) < _MOST_RATES:
                self._first_rates.append(rate)
            self._last_rates.append(rate)
            return
        self._rates.append(rate)
        if len(self._rates) < _FIRST_RATES:
            return
        rates, self._rates = self._rates, None
        at = _place_of(rates, self._first_rates)
        if at is not None and not math.isclose(rates[0], self._last_rates[-1]):
            words = {"rate": f"{rates[0]:.4g}", "before": f"{self._last_rates[-1]:.4g}",
                     "again": "the first steps of the run" if at == 0
                     else f"steps {at:,} to {at + _FIRST_RATES - 1:,} of the run"}  # fmt: skip
            start = _Holdings(step - _FIRST_RATES + 1, self._last.values)
            yield self._finding("state.schedule", Severity.NOTE, start, words, key=SCHEDULE)

    def _precision(self, held: _Holdings) -> Iterable[FaultEvidence]:
        """Report moments of a narrower type than all parameters, once."""
        types = held.types(_PARAMETERS)
        finest = min((_BITS.get(one, 0) for one in types), default=0)
        words = []
        for key in held.moments:
            narrow = [one for one in held.types(key) if 0 < _BITS.get(one, 99) < finest]
            words += [f"{key} in {listed(narrow)}"] if narrow else []
        if words and PRECISION not in self._counts:
            fields = {"words": listed(words), "types": listed(types)}
            yield self._finding(PRECISION, Severity.NOTE, held, fields)

    def _lagging(self, held: _Holdings) -> Iterable[FaultEvidence]:
        """Report parameters that the optimizers of some ranks leave out, once."""
        lowest_W = held.get("step: lowest")
        highest_W = held.get("step: highest")
        if "step: lowest" not in held.values or COUNTERS in self._counts:
            return
        lags_W = lowest_W < lowest_W.max()
        names = [
            name.removeprefix(_WITHOUT)
            for name in held.values
            if name.startswith(_WITHOUT) and (held.get(name)[lags_W] > 0).any()
            and not held.get(name)[~lags_W].any() and "expert" not in name
        ]  # fmt: skip
        if not lags_W.any() or not names:
            return
        counters = _range((int(lowest_W[lags_W].min()), int(highest_W[lags_W].max())))
        fields = {
            "names": shortened(names, _MOST_NAMED),
            "counters": counters,
            "others": _range((int(lowest_W[~lags_W].min()), int(highest_W[~lags_W].max()))),
        }
        yield self._finding(
            COUNTERS, Severity.WARNING, held, fields, np.flatnonzero(lags_W).tolist()
        )

    def _uncounted(self, held: _Holdings) -> Iterable[FaultEvidence]:
        """Report ranks whose optimizer has counted fewer updates for all that it holds, once."""
        highest_W = held.values.get("step: highest", _NOTHING)
        known_W = highest_W != MISSING_INT
        if not known_W.any() or not _COUNTED_ONCE.isdisjoint(self._counts):
            return
        most = int(highest_W[known_W].max())
        behind_W = known_W & (highest_W < most - 1)  # one may be read before an update
        behind_W &= ~_holds_others(held, highest_W == most)
        if not behind_W.any():
            return
        fields = {
            "counters": _range((int(highest_W[behind_W].min()), int(highest_W[behind_W].max()))),
            "others": f"{most:,}",
        }
        yield self._finding(
            COUNTERS, Severity.WARNING, held, fields, np.flatnonzero(behind_W).tolist(),
            key=UNCOUNTED,
        )  # fmt: skip

    def _ahead(self, now: _Holdings) -> FaultEvidence:
        counter = now.counter[1]
        size = ""
        factor = math.nan
        betas = now.settings.get("betas", [])
        if len(betas) == 1:
            factor = first_update_factor(counter, *map(float, betas[0].strip("()[]").split(",")))
            small = factor < 1
            times = 1 / factor if small else factor
            size = f": it is {times:.3g} times too {'small' if small else 'large'}"
        fields = {"counter": f"{counter:,}", "moments": listed(now.moments), "size": size,
                  "later": f"{counter + 1:,}"}  # fmt: skip
        numbers = {"counter": counter, "first_update_factor": factor}
        return self._finding(AHEAD, Severity.WARNING, now, fields, numbers=numbers)

    def _finding(
        self,
        cause: str,
        severity: Severity,
        now: _Holdings,
        fields: Mapping[str, object],
        ranks: Iterable[int] = (),
        *,
        key: str = "",
        numbers: Mapping[str, object] | None = None,
    ) -> FaultEvidence:
        count = self._counts[key or cause] = self._counts.get(key or cause, 0) + 1
        where = {"start": f"{now.step:,}", "parameters": f"{now.num_parameters:,}", **fields}
        return FaultEvidence(
            cause=cause,
            severity=severity,
            ranks=tuple(ranks),
            first_step=now.step,
            last_step=now.step,
            count=count,
            fields=where,
            numbers={**fields, **(numbers or {})},
            key=key,
        )


def mismatch(now: _Holdings, saved: _Holdings, others: Iterable[_Holdings] = ()) -> Mismatch | None:
    """Return how an optimizer's state differs from a saved one with the same parameters.

    It is a warning where all state is missing, which may be on purpose, or where moments are others
    and nobody knows whose. It is a note where rounding explains them, as a checkpoint may hold
    rounded moments, and nothing where they have another type, or other parameters have got some.
    """
    if saved.is_empty:
        return None
    was = f"{listed(saved.moments)} of {count(saved.num_parameters, 'parameter')}"
    if now.is_empty:
        return f"it holds nothing, and {was} were saved", [], Severity.WARNING
    if now.is_zero and not saved.is_zero:
        words = f"{listed(now.moments)} are zero, and those saved were not"
        return words, [], Severity.WARNING
    return _lost(now, saved) or _moved(now, saved, others) or _counted(now, saved)


def _lost(now: _Holdings, saved: _Holdings) -> Mismatch | None:
    """Return which parameters have no moments that had some, and how many at least have others."""
    more_W = now.get("without") - saved.get("without")
    if not (more_W > 0).any():
        return None
    before = {name for name in saved.values if name.startswith(_WITHOUT)}
    names = [n for n in now.values if n.startswith(_WITHOUT) and n not in before]
    shown = [name.removeprefix(_WITHOUT) for name in names[:3]]
    number = count(int(more_W.max()), "parameter")
    words = f"the moments of {number} ({listed(shown)}{', …' if len(names) > 3 else ''}) are lost"
    lost = {name.removeprefix(_WITHOUT) for name in names}
    pairs = (pair for key in saved.moments for pair in _Moment(key, now, saved).pairs.items())
    changed = {name for name, norms in pairs if abs(_change(*norms) - 1) > _ROUNDING} - lost
    if changed:
        words += f", and those of at least {count(len(changed), 'other')} are not what was saved"
    ranks = unless_all(np.flatnonzero(more_W > 0).tolist(), len(more_W))
    return words, ranks, Severity.ERROR


def _moved(now: _Holdings, saved: _Holdings, others: Iterable[_Holdings]) -> Mismatch | None:
    """Return whose the bits of moments are, where they are not what was saved."""
    changed = {key: now.differs(saved, f"{key}: bits") for key in saved.moments}
    changed = {key: ranks for key, ranks in changed.items() if ranks}
    if not changed:
        return None
    width = len(now.get(_OWN_BITS))
    ranks = unless_all(sorted({r for ranks in changed.values() for r in ranks}), width)
    words = _whose(now, saved, changed, others) or _misplaced(now, saved, changed)
    if words:
        return words, ranks, Severity.ERROR
    words = f"{listed(list(changed))} are not what was saved"
    counted = _counted(now, saved)
    if counted:
        return f"{words}, and {counted[0]}", ranks, Severity.ERROR
    moments = [_Moment(key, now, saved) for key in changed]
    beyond = [one.beyond_rounding for one in moments if one.beyond_rounding]
    if beyond:
        return f"{words} ({'; '.join(beyond)})", ranks, Severity.WARNING
    if all(one.explained for one in moments):
        return None
    return words, ranks, Severity.NOTE


class _Moment:
    """A moment whose bits are not those that were saved, parameter by parameter where measured."""

    def __init__(self, key: str, now: _Holdings, saved: _Holdings) -> None:
        before = saved.norms(key)
        self.pairs = {
            name: (norms_W, before[name])
            for name, norms_W in now.norms(key).items()
            if name in before
        }
        added = (now.get(f"{key}: held") > saved.get(f"{key}: held")).any()
        self._added = bool(added) or now.types(key) != saved.types(key)

    @property
    def beyond_rounding(self) -> str:
        """The parameter whose norm has changed most beyond rounding, in words, or nothing."""
        changes = {name: _change(*pair) for name, pair in self.pairs.items()}
        beyond = {name: by for name, by in changes.items() if abs(by - 1) > _ROUNDING}
        if not beyond:
            return ""
        name = max(beyond, key=lambda one: how_far(beyond[one]))
        others = count(len(beyond) - 1, "other parameter")
        more = f", and in {others} it is another one, too" if len(beyond) > 1 else ""
        return f"in {name} its norm is {beyond[name]:.3g} times what it was{more}"

    @property
    def explained(self) -> bool:
        """Whether its type, or parameters that have got one, explain it: all norms are the same."""
        changes = [_change(*pair) for pair in self.pairs.values()]
        return self._added and bool(changes) and max(abs(c - 1) for c in changes) <= _SAME_NORM


def _change(now_W: Floats, saved_W: Floats) -> float:
    """Return the ratio of norms that is farthest from 1, over the ranks that know both."""
    known_W = np.isfinite(now_W) & np.isfinite(saved_W) & ((now_W > 0) | (saved_W > 0))
    with np.errstate(divide="ignore"):
        ratios = (now_W[known_W] / saved_W[known_W]).tolist()
    return max(ratios, key=how_far, default=1.0)


def _misplaced(now: _Holdings, saved: _Holdings, changed: Iterable[str]) -> str:
    """Return the parameters that have what was saved for another one, in words; empty if none."""
    found = []
    for key in changed:
        before = saved.norms(key)
        for name, norms_W in now.norms(key).items():
            sources = [
                other
                for other, own_W in before.items()
                if (norms_W > 0).all() and np.allclose(norms_W, own_W, rtol=_SAME_NORM, atol=0.0)
            ]
            if len(sources) == 1 and name in before and sources != [name]:
                found.append(f"{key} of {name} is what was saved for {sources[0]}")
    return shortened(found, 1, "other moment")


def _whose(
    now: _Holdings,
    saved: _Holdings,
    changed: Mapping[str, list[int]],
    others: Iterable[_Holdings],
) -> str:
    """Return where the bits of changed moments come from, in words; empty if that is unknown."""
    for key in changed:
        for other in saved.moments:
            if other != key and _same(now, key, saved, other):
                return f"{key} holds what was saved as {other}"
    for older in others:
        if all(_same(now, key, older, key) for key in saved.moments):
            return f"its moments are those saved in step {older.step:,}"
    for key, own in changed.items():
        words = copied_values(now.get(f"{key}: bits"), saved.get(f"{key}: bits"), own)
        if words:
            return f"{key} is another rank's: {words}"
    if all(not now.differs(saved, f"{key}: bits in any order") for key in changed):
        return f"{listed(list(changed))} have gone to other parameters than when saved"
    return ""


def _same(now: _Holdings, key: str, saved: _Holdings, other: str) -> bool:
    return bool((now.get(f"{key}: bits") == saved.get(f"{other}: bits")).all())


def _counted(now: _Holdings, saved: _Holdings) -> Mismatch | None:
    if now.counter == saved.counter:
        return None
    words = f"its step counter is {_range(now.counter)} and was {_range(saved.counter)}"
    return words, [], Severity.ERROR


def _holds_others(held: _Holdings, most_W: Bools) -> Bools:
    """Return which ranks hold none of the parameters of some others, by those with names.

    Such ranks, as under ZeRO, may own what began to train later.
    """
    named = [values_W for name, values_W in held.values.items() if name.endswith(": norm")]
    known_NW = np.array(named, np.int64).reshape(-1, len(most_W)) != MISSING_INT
    others: Bools = known_NW.any(axis=0) & ~known_NW[known_NW[:, most_W].any(axis=1)].any(axis=0)
    return others


def _range(ends: tuple[int, int]) -> str:
    lowest, highest = ends
    return f"{lowest:,}" if lowest == highest else f"{lowest:,} to {highest:,}"


def _place_of(rates: list[float], before: list[float]) -> int | None:
    """Return the first step whose learning rate, with the next ones, is that of a new session.

    Those of the first steps may be constant; elsewhere, each has to differ from the one before.

    Example:
        >>> _place_of([2.0, 3.0, 4.0, 3.0], [1.0, 2.0, 3.0, 4.0, 3.0, 2.0])
        1
    """
    size = len(rates)
    if rates == before[:size]:
        return 0
    if any(math.isclose(one, after) for one, after in itertools.pairwise(rates)):
        return None
    starts = (at for at in range(1, len(before) - size) if before[at : at + size] == rates)
    return next(starts, None)


def first_update_factor(counter: int, beta1: float, beta2: float) -> float:
    """Return Adam's first update with a counter that is ahead, over that with a counter of 0.

    The moments are ``(1 - b1) g`` and ``(1 - b2) g²``, and are divided by ``1 - b^(counter + 1)``.

    Example:
        >>> round(1 / first_update_factor(1, 0.9, 0.999), 2)
        1.34
    """
    mean = (1 - beta1) / (1 - beta1 ** (counter + 1))
    square = (1 - beta2) / (1 - beta2 ** (counter + 1))
    return mean / math.sqrt(square)


class FirstUpdate(RestartDetector):
    """A restarted job whose first update alone has another learning rate or weight decay.

    The second update's is near that before the restart, beside the first one's distance from both.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}
        self._first: dict[str, tuple[float, float]] = {}  # before the restart, and in this update
        self._at = -1

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report settings that its first update alone had."""
        if not (step.gathered.workers["optimizer_steps"] > 0).all():
            return
        now = {name: step.ends(name)[1] for name in _BY_STEP}
        before, self._last = self._last, now
        first, self._first = self._first, {}
        if self._restarts():
            self._first = {name: (before[name], now[name]) for name in before}
            self._at = step.gathered.step
        odd = [
            f"{_BY_STEP[name]} was {at:.4g}, with {old:.4g} before it and {now[name]:.4g} after it"
            for name, (old, at) in first.items()
            if abs(now[name] - old) < _NEAR * min(abs(at - old), abs(at - now[name]))
        ]
        if odd:
            fields = {"start": f"{self._at:,}", "words": listed(odd)}
            number = self._at
            yield evidence_at(number, RESUMED, Severity.WARNING, (), fields, fields, key=ONCE)


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (
        OptimizerStart(run.after_complete, run.data_rows),
        LostUpdates(),
        OptimizerWithoutGradients(),
        ReplacedWeights(),
        StaleCopies(),
        FirstUpdate(),
    )
