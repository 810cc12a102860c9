"""Workers that differ from the others: which, since when, in which signals, and by how much.

Each step compares the workers in loss, gradient norm and direction, and in norm and direction of
every group of parameters (:mod:`rankscope.stats.exchangeability`).

Amounts of data (label tokens, samples, length of sequences, padding) are compared like losses and
gradients, with three exceptions. Small differences count as none: a sampler that sorts by length
deals the longest of each few samples to the same worker, always. A difference that most steps do
not show is forgotten: an epoch's last batch is short, on the same worker each time. Neither depends
on the rank, so the workers remain exchangeable. And a difference without a majority is a note:
lengths that differ by domain are the rule. Losses and gradients are compared whatever the amounts.

Legend of shapes: S signals, W workers.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.canary import CanaryCause, judge, results_of
from rankscope.bus.detector import Check, CheckedRun, Detector, FaultEvidence, RunFacts
from rankscope.bus.evidence import Compares
from rankscope.bus.finding import Severity
from rankscope.bus.messages import held_values
from rankscope.bus.replicas import StateKind
from rankscope.bus.step import MAX_PAIRED_WORKERS, GatheredStep
from rankscope.bus.steps import Step, StepBatch
from rankscope.bus.words import count, listed, name_ranks, shortened
from rankscope.evidence.outliers import EXCHANGES
from rankscope.evidence.outliers.alike import AlikePairs
from rankscope.evidence.outliers.blame import MEANT, Fault, OutlierSearch, are_small
from rankscope.evidence.outliers.gross import GrossOutliers, GrossValues
from rankscope.evidence.outliers.parts import (
    Levelled,
    SignalSet,
    compared_groups,
    group_signals,
    groups_of,
    of_usual_size,
    total_signals,
    totals_of,
)
from rankscope.stats.arrays import MISSING_INT, Bools, Floats, Ints
from rankscope.stats.bets import AMOUNTS, AT_ONCE, OUTLIERS, alarm_level
from rankscope.stats.draws import SortedMap
from rankscope.stats.state import State, Stateful

FACTOR = 1.75
"""Ratio to the median, or one over it, from which an amount counts as different."""

DIFFERENCE = 0.25
"""The same for shares, as a difference."""

_TOKEN_STEPS = 8
_TOKENS_APART = 0.1  # of the logarithms, between two workers
_STANDARD_ERRORS = 5.0
_MOST_NAMED = 5

Zeros = dict[tuple[int, ...], list[str]]
"""Groups by the workers whose gradient is zero in them."""


class ZeroGroups(Stateful):
    """Counts, for each worker and group, the steps in which its gradient was exactly zero.

    No sampling explains that: another loss, or another part of the model, leads to these workers'
    gradients. It is no fault where one rank computes for several, or where a rank has a part of the
    model to itself.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self.steps = 0  # with the present groups
        self._zero_WG: Ints = np.zeros((0, 0), np.int64)
        self._other_WG: Ints = np.zeros((0, 0), np.int64)

    def observe(self, names: list[str], norms_WG: Floats) -> None:
        """Process the norms of a step; other groups start anew."""
        if names != self._names:
            self._names = names
            self.steps = 0
            self._zero_WG = np.zeros(norms_WG.shape, np.int64)
            self._other_WG = np.zeros(norms_WG.shape, np.int64)
        self.steps += 1
        self._zero_WG += norms_WG == 0
        self._other_WG += norms_WG > 0

    def find(self) -> Zeros:
        """Return the groups in which some workers were always zero, and some never."""
        always_WG = self._zero_WG == self.steps
        never_WG = self._other_WG == self.steps
        found: Zeros = {}
        for group in np.flatnonzero(always_WG.any(axis=0) & never_WG.any(axis=0)):
            ranks = tuple(np.flatnonzero(always_WG[:, group]).tolist())
            found.setdefault(ranks, []).append(self._names[group])
        return found


def _words_on_zeros(zeros: Zeros, steps: int) -> dict[str, str]:
    """Return sentences: whose gradient is zero in which groups, and what may keep it from them."""
    parts = [
        f"of {name_ranks(ranks)} in {shortened(groups, _MOST_NAMED)}"
        for ranks, groups in zeros.items()
    ]
    ranks = {rank for each in zeros for rank in each}
    return {
        "zeros": f" The gradient {listed(parts)} was exactly zero in all of "
        f"{count(steps, 'step')}; other workers have one there.",
        "check": f"Look for what keeps {name_ranks(ranks)} from a gradient there: a branch on the "
        "rank, a module that only some ranks use, detach(), or a collective whose backward pass "
        "returns nothing to them. It may be meant, where one rank computes for several",
    }


class TokenCounts(Stateful):
    """How many label tokens each worker counts in a step, over the run."""

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._steps = 0
        self._tokens_W = np.zeros(num_workers)
        self._logs_W = np.zeros(num_workers)  # sums of the logarithm over that of the median
        self._squares_W = np.zeros(num_workers)

    def see(self, tokens_W: Floats) -> None:
        """Add a step, unless the number is not known on all workers."""
        if not (np.isfinite(tokens_W).all() and (tokens_W > 0).all()):
            return
        logs_W = np.log(tokens_W)
        logs_W = logs_W - np.median(logs_W)
        self._steps += 1
        self._tokens_W = self._tokens_W + tokens_W
        self._logs_W = self._logs_W + logs_W
        self._squares_W = self._squares_W + logs_W**2

    def words(self, ranks: Sequence[int]) -> str:
        """Return how many these workers count, in a clause, if clearly others than the rest."""
        if self._steps < _TOKEN_STEPS:
            return ""
        mean_W = self._logs_W / self._steps
        spread_W = np.sqrt(np.maximum(self._squares_W / self._steps - mean_W**2, 0.0) / self._steps)
        own = max(ranks, key=lambda rank: abs(mean_W[rank]), default=0)
        if abs(mean_W[own]) < max(_TOKENS_APART / 2, _STANDARD_ERRORS * spread_W[own]):
            return ""
        tokens_W = self._tokens_W / self._steps
        others = np.delete(tokens_W, own)
        rest = f"rank {1 - own}" if len(others) == 1 else "the median of the others"
        return (
            f"; rank {own} counts {tokens_W[own]:,.0f} label tokens a step, and {rest} "
            f"{np.median(others):,.0f}"
        )


class _OfWholeSamples(OutlierSearch):
    """A search that only notes a difference where workers have parts of the same sequences."""

    SETTINGS = (*OutlierSearch.SETTINGS, "_parts_of_sequences")

    _parts_of_sequences = ""

    def _see_parts(self, gathered: GatheredStep) -> None:
        self._parts_of_sequences = self._parts_of_sequences or _signs_of_parts(gathered)

    def _evidence(self, fault: Fault) -> FaultEvidence:
        evidence = super()._evidence(fault)
        if not self._parts_of_sequences or fault.absorbed:
            return evidence
        fields = {**evidence.fields, "many": self._parts_of_sequences, "check": MEANT}
        return replace(evidence, cause="inconclusive", severity=Severity.NOTE, fields=fields)


class UnequalAmounts(_OfWholeSamples):
    """Finds workers whose amount of data differs from the others'."""

    FAMILY = AMOUNTS
    SHARE = 1.0
    KEY = "amount"
    TIE = "amounts-differ"
    SETTINGS = (*_OfWholeSamples.SETTINGS, "_amounts")

    def __init__(self, num_workers: int, hosts: Sequence[str] = ()) -> None:
        self._amounts = Levelled(num_workers, total_signals(Compares.AMOUNTS))
        super().__init__(num_workers, self._amounts, hosts)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report faults that begin, change, grow or heal."""
        if self._num_workers < 2:
            return ()
        self._steps += 1
        self._see_parts(step.gathered)
        workers = step.gathered.workers
        # The amount of a repeated batch is no new draw.
        usable_W = step.recurrence.ages_W == 0
        signals = self._amounts.signals
        values_SW = np.array([_known(workers[signal.name], signal.name) for signal in signals])
        values_SW[:, ~usable_W] = np.nan
        rows = zip(values_SW, signals, strict=True)
        differ = [_level(row_W, relative=one.how.relative) for row_W, one in rows]
        self._amounts.see(values_SW, usable_W, step.gathered.step, different=any(differ))
        return self._find(step.gathered)

    def _evidence(self, fault: Fault) -> FaultEvidence:
        evidence = super()._evidence(fault)
        if not fault.tie:
            return evidence
        return replace(evidence, severity=Severity.NOTE, fields={**evidence.fields, "check": MEANT})


def _known(column_W: NDArray[np.generic], name: str) -> Floats:
    """Return a column with NaN where it is unknown; 0 samples are unknown, too."""
    unknown = 0 if name == "num_samples" else MISSING_INT
    values_W: Floats = np.where(column_W == unknown, np.nan, column_W).astype(np.float64)
    return values_W


def _level(values_W: Floats, *, relative: bool) -> bool:
    """Set values near the median to the median; return whether others are left."""
    present = np.flatnonzero(np.isfinite(values_W))
    if len(present) < 2 or (values_W[present] == values_W[present[0]]).all():
        return False
    with np.errstate(divide="ignore"):
        own = np.log(values_W[present]) if relative else values_W[present]
    middle = np.median(own)
    limit = math.log(FACTOR) if relative else DIFFERENCE
    if len(values_W) == 2:  # the middle lies between them
        limit /= 2
    with np.errstate(invalid="ignore"):
        near = ~(np.abs(own - middle) >= limit)
    values_W[present[near]] = np.median(values_W[present])
    return not near.all()


class WorkerOutliers(_OfWholeSamples):
    """Finds workers that differ from the others."""

    FAMILY = OUTLIERS
    SHARE = 0.5
    KEY = "outlier"
    TIE = "workers-differ"

    def __init__(self, num_workers: int, hosts: Sequence[str] = ()) -> None:
        super().__init__(num_workers, SignalSet(num_workers, total_signals()), hosts)
        signals = self._totals.signals
        self._gross = GrossOutliers([signal.how.label for signal in signals], num_workers)
        self._values = GrossValues(num_workers)
        self._group_names: list[str] = []
        self._left_out: list[int] = []
        self._visits = RecentVisits()
        self._tokens = TokenCounts(num_workers)
        self._lengths = LengthOrder()
        self._zeros = ZeroGroups()

    def observe(self, steps: StepBatch) -> Iterator[Iterable[FaultEvidence]]:
        """Process consecutive steps; yield faults that begin, change, grow or heal."""
        if self._num_workers < 2:
            yield from ([] for _ in steps)
            return
        usable_TW = _usable(steps)
        usable_TW[[self._visits.observe(step.gathered.samples) for step in steps]] = False
        tokens_TW = steps.columns.column("loss_weight")
        sizes_TW = np.log(np.where(tokens_TW > 0, tokens_TW, np.nan))
        at = 0
        while at < len(steps):
            piece = self._next_piece(steps, at)
            rows = slice(at, at + len(piece))
            yield from self._observe_piece(piece, usable_TW[rows], sizes_TW[rows])
            at += len(piece)

    def _next_piece(self, steps: StepBatch, start: int) -> list[Step]:
        """Return the steps from ``start`` on with the same groups, as many as are best compared."""
        names = compared_groups(steps[start].report)
        if names and names != self._group_names:
            self._group_names = names
            self._groups = SignalSet(self._num_workers, group_signals(names))
            for worker in self.flagged:
                self._groups.test.flag(worker)
        piece = [steps[start]]
        num_values = self._num_values(steps[start])
        for at in range(start + 1, len(steps)):
            names = compared_groups(steps[at].report)
            num_values += self._num_values(steps[at])
            if num_values > AT_ONCE or (names and names != self._group_names):
                break
            piece.append(steps[at])
        return piece

    def _num_values(self, step: Step) -> int:
        parts = self._parts if compared_groups(step.report) else (self._totals,)
        return sum(len(part.signals) for part in parts) * self._num_workers

    def _observe_piece(
        self, piece: Sequence[Step], usable_TW: Bools, sizes_TW: Floats
    ) -> Iterator[Iterable[FaultEvidence]]:
        numbers = [step.gathered.step for step in piece]
        signals = self._totals.signals
        values_TSW = np.array([totals_of(step, signals) for step in piece])
        values_TSW = np.where(usable_TW[:, None], values_TSW, np.nan)
        totals = self._totals.observe(values_TSW, sizes_TW, numbers)
        in_groups = [bool(compared_groups(step.report)) for step in piece]
        groups = self._observe_groups(piece, in_groups, usable_TW, sizes_TW)
        for step, usable_W, has_groups in zip(piece, usable_TW, in_groups, strict=True):
            self._steps += 1
            next(totals)
            if has_groups:
                next(groups)
            self._left_out = (~usable_W).nonzero()[0].tolist()
            yield self._judge_step(step)

    def _observe_groups(
        self,
        piece: Sequence[Step],
        in_groups: Sequence[bool],
        usable_TW: Bools,
        sizes_TW: Floats,
    ) -> Iterator[int]:
        """Process the groups of the steps that measure them, one with each iteration."""
        if self._groups is None or not any(in_groups):
            return iter(())
        measured = [step for step, has_groups in zip(piece, in_groups, strict=True) if has_groups]
        values_TSW = np.array([groups_of(step, len(self._groups.signals)) for step in measured])
        values_TSW = np.where(usable_TW[in_groups][:, None], values_TSW, np.nan)
        numbers = [step.gathered.step for step in measured]
        return self._groups.observe(values_TSW, sizes_TW[in_groups], numbers)

    def _judge_step(self, step: Step) -> list[FaultEvidence]:
        self._see_parts(step.gathered)
        norms_WG = step.gathered.group_norms_WG
        if norms_WG is not None and (names := compared_groups(step.report)):
            self._zeros.observe(names, norms_WG)
        self._see_canary(step.gathered)
        self._tokens.see(step.gathered.workers["loss_weight"])
        self._lengths.see(step.gathered.workers["sequence_length"])
        found = self._find(step.gathered)
        z_SW = self._totals.test.z_SU.copy()
        z_SW[:, list(self.flagged)] = 0
        gross = self._gross.observe(z_SW, step.gathered.step)
        values = self._values.observe(step.gathered, self.not_compared)
        return [*values, *gross, *found]

    def _evidence(self, fault: Fault) -> FaultEvidence:
        evidence = super()._evidence(fault)
        fields = {**evidence.fields, "tokens": self._tokens.words(fault.ranks)}
        named = {signal.group for traces in fault.traces.values() for signal, _ in traces}
        zeros = self._zeros.find()
        small = all(map(are_small, fault.traces.values()))
        innocent = _POOLS if self._visits.own_pools else self._lengths.words
        if innocent and small and not fault.absorbed:
            fields |= {"many": innocent, "check": MEANT}
            evidence = replace(evidence, cause="inconclusive", severity=Severity.NOTE)
        if fault.absorbed or named.isdisjoint(each for some in zeros.values() for each in some):
            return replace(evidence, fields=fields)
        many = self._parts_of_sequences  # which others than shards of different kinds explain
        words = _words_on_zeros(zeros, self._zeros.steps)
        return replace(evidence, fields={**fields, **words, "many": many})

    def _without_bystanders(self, suspects: list[int], worker: int) -> list[int]:
        """Leave out small differences beside a large one, where each worker has its own samples."""
        if not self._visits.own_pools or are_small(self._traces(worker)):
            return suspects
        return [one for one in suspects if one == worker or not are_small(self._traces(one))]

    @property
    def not_compared(self) -> tuple[int, ...]:
        """Workers that differ, or could not be compared in the last step."""
        return tuple(sorted({*self.flagged, *self._left_out}))

    def _see_canary(self, gathered: GatheredStep) -> None:
        """Note where a canary shows that a worker which differs in most steps has other data."""
        ties = [fault for fault in self._faults if fault.tie and fault.is_open]
        results = results_of(gathered) if self.flagged or ties else None
        if results is None or judge(results).verdict is not CanaryCause.DATA:
            return
        suspect = results.suspect
        steady = suspect in self.steadily_flagged
        for fault in self._faults:
            alone = fault.active == fault.ranks == [suspect] and steady
            if alone or (fault in ties and suspect in fault.active):
                fault.agreed = gathered.step
                fault.reported_count = 0  # report it again

    def restore(self, state: State) -> None:
        """Continue from the state of another detector, with the groups that it compares."""
        names = state["_group_names"]["list"]
        if names:
            self._groups = SignalSet(self._num_workers, group_signals(names))
        super().restore(state)


_POOLS = (
    " Each worker draws again and again from samples of its own, as from a replay buffer: they may "
    "differ by these."
)
_SORTED = (
    " Samples are dealt to the workers in the order of their lengths, {order} ones to the first "
    "worker: they may differ by these."
)
_PLACES = (
    " Each is given an input of its own that stays the same from step to step, as positions do "
    "where workers have parts of the same sequences: they may differ on purpose."
)
_EXCHANGES = (
    " The model's forward pass exchanges tensors among them ({operations}), as where workers have "
    "parts of the same sequences: their losses are not independent, and they may differ on purpose."
)


def _signs_of_parts(gathered: GatheredStep) -> str:
    """Return in a sentence why workers may have parts of the same sequences; empty if nothing."""
    rows = gathered.differences
    if not rows:
        return ""
    operations = held_values(rows, StateKind.EXCHANGED, EXCHANGES)
    if operations:
        return _EXCHANGES.format(operations=listed(list(operations)))
    constant = [row.digests_W for row in rows if row.kind is StateKind.CONSTANT]
    # each worker has an input that stays the same, and is not that of all
    of_each = ((all_W != MISSING_INT).all() and len(np.unique(all_W)) > 1 for all_W in constant)
    return _PLACES if any(of_each) else ""


class RecentVisits(Stateful):
    """The samples of the last steps, and who drew them.

    Several updates may use the samples of one rollout, as in PPO. What is special about them then
    shows again and again, and proves no more than once. Samples that are dealt to the workers anew
    are drawn by others. Where each worker draws from samples of its own, what is special about them
    lasts, and proves little.
    """

    def __init__(self) -> None:
        self._young = SortedMap(np.int32)
        self._old = SortedMap(np.int32)
        self._steps = 0
        self._again = 0  # samples that came again, but for those just before
        self._again_own = 0  # of them, those of the same worker

    @property
    def own_pools(self) -> bool:
        """Whether samples come again on their own worker, and hardly ever on another."""
        return self._again >= _AGAIN and self._again_own >= _MOSTLY * self._again

    def observe(self, samples: Sequence[Ints]) -> bool:
        """Process a step's samples; return whether most were the same workers' own just before."""
        few = [_thinned(own) for own in samples[:_ASKED]]
        drawn, at = np.unique(np.concatenate(few), return_index=True)
        if not len(drawn):
            return False
        self._steps += 1
        if self._steps % _GENERATION == 0:
            self._old, self._young = self._young, SortedMap(np.int32)
        ranks = np.repeat(np.arange(len(few)), [*map(len, few)])[at]
        older, by_old = self._old.find(drawn)
        newer, by = self._young.put(drawn, ranks)
        own = np.where(newer, by == ranks, older & (by_old == ranks))
        if 4 * int(own.sum()) > 3 * len(drawn):
            return True
        self._again += int((newer | older).sum())
        self._again_own += int(own.sum())
        return False


class LengthOrder(Stateful):
    """Whether samples are dealt to the workers in the order of their lengths.

    So do samplers that put samples of about one length into one step. In eight steps or more the
    mean lengths differ, and in nine of ten of these, no worker's is below the next one's, or none
    is above.
    """

    def __init__(self) -> None:
        self._steps = 0  # in which lengths differ
        self._falling = 0  # of them, those in which no worker's is below the next one's
        self._rising = 0

    @property
    def words(self) -> str:
        """The order in a sentence; empty without one."""
        least = 0.9 * max(self._steps, _STEPS_IN_ORDER)
        if max(self._falling, self._rising) < least:
            return ""
        return _SORTED.format(order="the longest" if self._falling >= least else "the shortest")

    def see(self, lengths_W: Floats) -> None:
        """Add a step's mean lengths, NaN where they are unknown."""
        rises = np.diff(lengths_W)
        if np.isfinite(rises).all() and rises.any():
            self._steps += 1
            self._falling += bool((rises <= 0).all())
            self._rising += bool((rises >= 0).all())


_STEPS_IN_ORDER = 8
_ASKED = 16  # workers whose samples are remembered
_FEW = 64  # samples of each, at least
_AGAIN = 64  # samples that came again, to know where they come again
_MOSTLY = 0.95
_GENERATION = 16  # steps; those of the last two are remembered


def _thinned(samples: Ints) -> Ints:
    """Return some of a worker's samples, always the same ones."""
    share = 1 << max(0, (len(samples) // _FEW).bit_length() - 1)
    kept: Ints = samples[samples % share == 0]
    return kept


def _usable(steps: StepBatch) -> Bools:
    """Return which workers can be compared in each step ``[T, W]``.

    Not those that repeat a batch or have one of another size; one stands for all with the same.
    """
    usable_TW = np.array([step.recurrence.ages_W == 0 for step in steps])
    for at, step in enumerate(steps):
        if not step.alike("num_samples"):
            usable_TW[at] &= of_usual_size(step.gathered.workers["num_samples"])
        for group in step.identical:
            usable_TW[at, list(group[1:])] = False
    return usable_TW


MOST_STEPS = 64
"""Limit of :func:`fewest_steps`."""


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    outliers = WorkerOutliers(run.num_workers, run.hosts)
    run.flagged.now = lambda: outliers.flagged
    run.flagged.steadily = lambda: outliers.steadily_flagged
    run.flagged.left_out = lambda: outliers.not_compared
    amounts = UnequalAmounts(run.num_workers, run.hosts)
    return outliers, amounts, AlikePairs(run.num_workers, run.flagged.left_out)


def make_checks(run: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of a run."""
    return (Check("a worker that differs from the others", fewest_steps(run.num_workers)),)


@cache
def fewest_steps(num_workers: int) -> int:
    """Return how many steps the search for outliers needs at least."""
    if num_workers < 2:
        return 0
    num_workers = min(num_workers, MAX_PAIRED_WORKERS)
    part = SignalSet(num_workers, total_signals())
    noise = np.random.default_rng(0)
    sizes_W = np.zeros(num_workers)
    level = alarm_level(OUTLIERS / 2)
    for step in range(MOST_STEPS):
        values_SW = 1 + 0.05 * noise.standard_normal((len(part.signals), num_workers))
        values_SW[:, 0] = 3.0
        next(part.observe(values_SW[None], sizes_W[None], [step]))
        if part.test.evidence >= level:
            return step + 1
    return MOST_STEPS
