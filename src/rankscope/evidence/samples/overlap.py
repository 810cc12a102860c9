"""The detector of overlapping shards: different workers draw the same samples in an epoch.

Equality of samples is exact evidence, but it also has innocent readings. Their probability decides
how severe the finding is.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence
from rankscope.bus.finding import Severity
from rankscope.bus.steps import RankGroups, Step, StepBatch
from rankscope.bus.words import count
from rankscope.evidence.samples.epochs import Padding
from rankscope.stats.arrays import Ints
from rankscope.stats.draws import DrawnSamples, count_common
from rankscope.stats.samples import LIKELY, SURE, Followed, SampleCounts, ThinningLedger
from rankscope.stats.state import Stateful

_BY_CONTENT = (
    " Samples are told here by the content of the batch's tensors: with scope.batch(ids), equal "
    "content of several samples, or one sample in several pieces, counts for no overlap."
)
_AGAIN = (
    "It is not known whether the workers draw with replacement; that, or data that hold the same "
    "content several times, would explain"
)
_MEANT = "Draws that repeat, as declared or as the data loaders say, explain"
_MADE_ANEW = (
    "The workers drew more different samples than the data set has rows: rows become other samples "
    "in each epoch, as by padding or augmentation, which explains"
)
_GIVE_IDS = "Samples are compared by their ids where scope.batch(ids) gives them."
_FILLED = "Copies that fill up a batch, so that all workers have equally many samples, explain"
_STEPS_OF_OVERLAP = 3
_DRIFT = 0.02  # share of its draws
_DRAWS_AGAIN = 16
_OWN_SHARE = 0.25  # of the share that a healthy epoch's beginning expects
_SHARES = (0.98, 0.9)  # of overlaps that concern one worker
_ONE_WORKER = 0.75  # of all overlaps are one worker's; at most 2/3 where two workers are wrong
_BATCH = 4  # samples
_NONE = np.empty(0, np.int64)


class OverlappingShards(Detector):
    """Different workers that draw the same samples within an epoch.

    In an epoch of a healthy job, no sample comes twice. The length of an epoch is unknown here.
    But when the next one begins, most draws come again, and in a share of about 1/W it is a
    worker's own samples that do; shards that overlap repeat those of others alone. So such a run of
    steps begins an epoch, and its draws are compared with each other only.

    Sampling with replacement overlaps too, on purpose; so does content that occurs several times
    in the data. Both hit a worker's own samples in a share of at least 1/W of all repeats
    (:class:`_ShareTest`), and neither prefers one worker (``chance_of_one_worker``). These two
    tests may be read after every step, and together are wrong with at most the probability that
    is stated. It holds as long as repeats come one by one. Whole shards that are drawn with
    replacement come in hundreds: such a job needs ``repeats``.

    A worker that draws fewer samples than most, or more, ends its epochs at other steps than they:
    overlaps of such workers alone are none.

    Workers with identical batches count as one worker here: :class:`DuplicateBatches` reports
    them. Beyond ``capacity`` different samples, only a random share of them is followed: the same
    holds in it, and the evidence states the share.

    The few samples that a sampler adds at an epoch's end, so that all workers have equally many,
    are a note of their own. Where the batches of single steps are filled up in this way, the copies
    prove nothing: neither fewer than workers inside one step, nor the worker that they come from;
    unless nearly all steps have some.

    More different samples than the data set has ``rows`` are none that one could recognize: rows
    become other tensors in each epoch. Nothing is proven then.
    """

    SETTINGS = ("_num_workers", "_repeats", "_where", "_before_W", "_rows")

    def __init__(
        self,
        num_workers: int,
        capacity: int = 1 << 20,
        *,
        repeats: bool = False,
        seeds: Sequence[int | None] = (),
        rows: int | None = None,
    ) -> None:
        self._num_workers = num_workers
        self._rows = math.inf if rows is None else rows
        self._made_anew = False
        self._where = _where_to_look(seeds)
        self._repeats = repeats
        self._drawn = self._remembered = 0  # samples of the epoch up to the step before
        self._named = True
        self._ledger = ThinningLedger(capacity)
        self._padding = Padding(num_workers)
        self._global_batch = 0
        self._lengths_W = np.zeros(num_workers, np.int64)  # samples drawn so far
        self._new_since = 0
        self._overlaps = self._proven = False
        self._counted = _Accounts(num_workers)
        self._pending = _Accounts(num_workers)
        self._again = self._again_own = 0  # in the last steps, if most of their draws came again
        self._error = False
        self._previous = _NONE
        self._before_W: Sequence[Ints] = ()

    def observe(self, steps: StepBatch) -> Iterator[Iterable[FaultEvidence]]:
        """Process consecutive steps; yield proven overlaps, again when there are more."""
        drawn = steps.columns.samples
        if any(step.identical for step in steps):
            drawn = DrawnSamples([_of_different_workers(step) for step in steps])
        follow = self._ledger.observe(drawn)
        for at, step in enumerate(steps):
            one_in = self._ledger.one_in
            now = next(follow)
            self._new_since = self._new_since * one_in // self._ledger.one_in
            found = self._observe(step, drawn[at], now)
            self._drawn = now.drawn
            self._remembered = now.remembered
            distinct, error = self._ledger.scale_up(now.remembered)
            self._made_anew = self._made_anew or distinct - 4 * error > self._rows
            if self._begins_epoch():
                if not now.counts.new:  # else a buffer of samples may still grow
                    found += self._padding.end_epoch()
                self._begin_epoch([] if now.counts.new else [drawn[at]])
                follow = self._ledger.observe(drawn.after(at))
            yield found

    def _observe(self, step: Step, drawn_W: Sequence[Ints], now: Followed) -> list[FaultEvidence]:
        if any(map(len, step.gathered.samples)):
            self._named = self._named and step.all_true("samples_named")
        self._lengths_W += list(map(len, step.gathered.samples))
        if not self._ledger.complete:
            return []
        number = step.gathered.step
        exact = self._ledger.one_in == 1
        padding = self._padding.observe(number, now.counts, now.samples) if exact else ()
        return [*padding, *self._follow(number, drawn_W, now.samples, step.identical, now.counts)]

    def _follow(
        self,
        step: int,
        drawn_W: Sequence[Ints],
        followed: Ints,
        groups: RankGroups,
        counts: SampleCounts,
    ) -> Iterable[FaultEvidence]:
        """Add a step's overlaps; ``followed`` are the drawn samples that count.

        A step's repeats wait for the next step: an epoch may begin within it.
        """
        lengths = [len(batch) for batch in drawn_W if len(batch)]
        self._global_batch = max(self._global_batch, sum(lengths))
        self._new_since += counts.new if self._overlaps else 0
        near = self._near(drawn_W, followed, counts.repeated_cross)
        if not (counts.repeats or self._pending.all.steps or self._pending.all.own):
            return ()
        self._overlaps = self._overlaps or counts.repeated_cross + counts.shared > 0
        again = counts.repeated_own + counts.repeated_cross
        step_alone = _Accounts(self._num_workers)
        step_alone.add(step, counts, lengths, groups, near, self._ledger.one_in)
        if again > counts.new:
            self._again += again
            self._again_own += counts.repeated_own
            self._pending.merge(step_alone)
            chance = chance_of_share(self._again_own, self._again, 1 / max(len(lengths), 2))
            if not counts.new or chance > SURE:
                return ()  # it may be the next epoch
            step_alone = _Accounts(self._num_workers)
        self._again = self._again_own = 0
        more = self._pending.all.steps > 0
        self._counted.merge(self._pending)
        self._pending = step_alone
        enough = (
            self._new_since > self._global_batch and self._counted.all.steps >= _STEPS_OF_OVERLAP
        )
        self._proven = self._proven or enough
        return (self._evidence(),) if self._proven and more and not self._out_of_step() else ()

    def _out_of_step(self) -> bool:
        """Return whether all workers that overlap have drawn fewer samples than most, or more."""
        most = np.median(self._lengths_W)
        apart_W = np.abs(self._lengths_W - most) > _DRIFT * most
        return all(apart_W[rank] for rank in self._counted.all.ranks())

    def _begins_epoch(self) -> bool:
        """Return whether most of the last steps' draws came again, own ones among them."""
        plausible = _OWN_SHARE * self._again <= self._num_workers * self._again_own
        return self._again >= _DRAWS_AGAIN and self._again_own > 0 and plausible

    def _begin_epoch(self, steps: Sequence[Sequence[Ints]]) -> None:
        """Compare the draws of these steps and of all later ones with each other only."""
        self._ledger.forget()
        for _ in self._ledger.observe(DrawnSamples(steps)):
            pass
        self._again = self._again_own = 0
        self._pending = _Accounts(self._num_workers)
        if not self._proven:
            self._overlaps = False
            self._new_since = 0
            self._counted = _Accounts(self._num_workers)

    def _near(self, drawn_W: Sequence[Ints], followed: Ints, cross: int) -> int:
        """Return how many of the cross repeats may have the content of a draw in the step before.

        In a file that is not shuffled, equal contents may stand beside each other. That does not
        explain a worker's whole batch.
        """
        if self._named:
            return 0
        previous, self._previous = self._previous, followed
        before_W, self._before_W = self._before_W, drawn_W
        if not cross:
            return 0
        near = min(count_common(followed, previous), cross)
        return max(near - _in_whole_batches(drawn_W, before_W), 0) if near else 0

    def _severity(self) -> tuple[Severity, float]:
        """Return severity and a bound on the probability of the innocent readings."""
        counted = self._counted.judged
        far = counted.far_apart.log_ratio
        close = counted.close_by.log_ratio
        one_worker = counted.chance_of_one_worker()
        chance = _either(_chance(far, close, far + close), one_worker)
        # Equal contents beside each other in a file share a step or follow closely, without fault.
        sure = chance if self._named else _either(_chance(far), one_worker)
        chance, sure = min(1.0, 2 * chance), min(1.0, 2 * sure)  # of two accounts, one is judged
        self._error = self._error or sure < SURE
        if self._error:
            return Severity.ERROR, min(chance, SURE)
        return (Severity.WARNING if chance < LIKELY else Severity.NOTE), chance

    def _evidence(self) -> FaultEvidence:
        severity, chance = self._severity()
        made_anew = self._made_anew and not self._named
        severity = Severity.NOTE if self._repeats or made_anew else severity
        counted = self._counted.all
        again = _MEANT if self._repeats else _AGAIN
        innocent = again if counted.cross + counted.own else _FILLED
        innocent = _MADE_ANEW if made_anew else innocent
        ranks = counted.ranks()
        overlaps = counted.cross + counted.shared
        one_in = self._ledger.one_in
        distinct, error = self._ledger.scale_up(self._remembered)
        of = f" among the one in {one_in:,} samples that are followed" if one_in > 1 else ""
        return FaultEvidence(
            cause="data.overlapping_shards",
            severity=severity,
            ranks=ranks,
            first_step=counted.first,
            last_step=counted.last,
            count=overlaps,
            fields={
                "overlaps": count(overlaps, "draw") + of,
                "chance": f"{max(chance, 1e-12):.2g}",
                "own": count(counted.own, "draw"),
                "Where": _GIVE_IDS if made_anew else self._where,
                "innocent": innocent,
                "by_content": "" if self._named else _BY_CONTENT,
            },
            numbers={
                "drawn_from_others": counted.cross,
                "drawn_from_own": counted.own,
                "shared_inside_steps": counted.shared,
                "steps": counted.steps,
                "innocent_probability": chance,
                "samples_drawn": self._drawn,
                "samples_distinct": round(distinct),
                "samples_distinct_error": round(error),
                "follows_one_sample_in": one_in,
            },
        )


class _Accounts(Stateful):
    """The overlaps of all kinds, and those without the copies that may fill up a step's batch."""

    def __init__(self, num_workers: int) -> None:
        self.all = _Account(num_workers)
        self._others = _Account(num_workers)
        self._num_workers = num_workers

    def add(
        self,
        step: int,
        counts: SampleCounts,
        lengths: Sequence[int],
        groups: RankGroups,
        near: int,
        one_in: int,
    ) -> None:
        """Add one step, of which one sample in ``one_in`` counts; see :meth:`_Account.add`."""
        self.all.add(step, counts, lengths, groups, near)
        inside = counts.shared + counts.repeated_in_batch  # their sum prefers neither
        if inside * one_in < len(lengths):
            counts = replace(counts, shared=0, repeated_in_batch=0, shared_between=())
        self._others.add(step, counts, lengths, groups, near)

    def merge(self, later: "_Accounts") -> None:
        """Add the sums of later steps."""
        self.all.merge(later.all)
        self._others.merge(later._others)

    @property
    def judged(self) -> "_Account":
        """All overlaps where nearly all steps have some: of W sizes, one needs no copies."""
        steps = self.all.last - self.all.first + 1
        without = steps - self.all.steps
        often = chance_of_share(without, steps, 1 / self._num_workers) < SURE
        return self.all if often else self._others


class _Account(Stateful):
    """Sums of overlaps over steps, and which worker takes part in how many of them."""

    def __init__(self, num_workers: int) -> None:
        self.cross = 0
        self.own = 0
        self.shared = 0
        self.steps = 0
        self.first = -1
        self.last = -1
        self.far_apart = _ShareTest()
        self.close_by = _ShareTest()
        self._links = 0
        self._log_in_W = np.zeros(num_workers)  # of 1/p, over the overlaps that concern a worker
        self._log_out_W = np.zeros(num_workers)  # of 1/(1-p), over the others
        self._links_W = np.zeros(num_workers, np.int64)
        self._alike: set[int] = set()

    def add(
        self, step: int, counts: SampleCounts, lengths: Sequence[int], groups: RankGroups, near: int
    ) -> None:
        """Add one step; ``near`` cross repeats are so close that a file's order explains them."""
        cross = counts.repeated_cross
        own = counts.repeated_own
        workers = len(lengths)
        self.own += own + counts.repeated_in_batch
        if workers > 1:
            inside = (sum(lengths) / workers - 1) / (sum(lengths) - 1)
            self.far_apart.add(cross - near, own, 1 / workers)
            self.close_by.add(counts.shared, counts.repeated_in_batch, inside)
        if not cross + counts.shared:
            return
        self.cross += cross
        self.shared += counts.shared
        self.steps += 1
        self.first = step if self.first < 0 else self.first
        self.last = step
        pairs = counts.shared_between
        links = sum(counts.crossing_by_rank) // 2 + sum(number for _, _, number in pairs)
        links_W = np.array(counts.crossing_by_rank, np.int64)
        for i, j, number in pairs:
            links_W[[i, j]] += number
        self._links += links
        self._links_W += links_W
        if workers > 2:
            self._log_in_W += links_W * math.log(workers / 2)
            self._log_out_W -= (links - links_W) * math.log1p(-2 / workers)
        for group in groups:
            if self._links_W[group[0]]:
                self._alike.update(group)

    def merge(self, later: "_Account") -> None:
        """Add the sums of later steps."""
        self.cross += later.cross
        self.own += later.own
        self.shared += later.shared
        self.steps += later.steps
        self.first = later.first if self.first < 0 else self.first
        self.last = max(self.last, later.last)
        self.far_apart.merge(later.far_apart)
        self.close_by.merge(later.close_by)
        self._links += later._links
        self._log_in_W += later._log_in_W
        self._log_out_W += later._log_out_W
        self._links_W += later._links_W
        self._alike |= later._alike

    def ranks(self) -> tuple[int, ...]:
        """Return the one worker that takes part in most overlaps, or else all that do in some."""
        most = int(self._links_W.argmax())
        mostly = self._links_W[most] >= _ONE_WORKER * self._links
        if mostly and not self._alike and self.chance_of_one_worker() < 1:
            return (most,)
        return tuple(sorted({*np.flatnonzero(self._links_W).tolist(), *self._alike}))

    def chance_of_one_worker(self) -> float:
        """Bound the probability that by chance one worker takes part in so many overlaps.

        Each overlap concerns two workers; if any two were equally likely, a given worker would be
        one of them with probability p = 2/W. The likelihood ratios against shares of 1, and of
        ``_SHARES``, are supermartingales of mean 1 for each worker, and so is their average.
        """
        if not self._links:
            return 1.0
        out_W = self._links - self._links_W
        ratios = [np.where(out_W, -np.inf, self._log_in_W)]
        ratios += [
            self._links_W * math.log(q) + self._log_in_W + out_W * math.log(1 - q) + self._log_out_W
            for q in _SHARES
        ]
        log_average = np.logaddexp.reduce(np.array(ratios), axis=0).max() - math.log(len(ratios))
        return min(1.0, len(self._links_W) * math.exp(-max(float(log_average), 0.0)))


class _ShareTest(Stateful):
    """Tests whether repeats hit a worker's own samples less often than an innocent job would.

    Under the null, each repeat is an own one with probability p or more. Then the product of
    likelihood ratios against "never", and the one against "half as often", are supermartingales
    of mean 1, and so is their average: the chance that it ever exceeds 1/a is at most a, whenever
    one looks.
    """

    def __init__(self) -> None:
        self._log_never = 0.0
        self._log_half = 0.0

    def add(self, others: int, own: int, p: float) -> None:
        """Add repeats of others' and of own samples, and the null's share p of own ones."""
        if p > 0:
            self._log_never += -math.inf if own else -others * math.log1p(-p)
            self._log_half += others * math.log((1 - p / 2) / (1 - p)) - own * math.log(2)

    def merge(self, later: "_ShareTest") -> None:
        """Add the repeats of a test of later steps."""
        self._log_never += later._log_never
        self._log_half += later._log_half

    @property
    def log_ratio(self) -> float:
        """Logarithm of that average."""
        return float(np.logaddexp(self._log_never, self._log_half)) - math.log(2)


def _of_different_workers(step: Step) -> Sequence[Ints]:
    """Return the workers' samples, without workers that draw the same as another."""
    doubles = {rank for group in step.identical for rank in group[1:]}
    samples = step.gathered.samples
    return [batch[:0] if rank in doubles else batch for rank, batch in enumerate(samples)]


def _in_whole_batches(drawn_W: Sequence[Ints], before_W: Sequence[Ints]) -> int:
    """Count the samples in batches that another worker drew as a whole in the step before."""
    before = {np.sort(batch).tobytes(): rank for rank, batch in enumerate(before_W)}
    return sum(
        len(batch)
        for rank, batch in enumerate(drawn_W)
        if before.get(np.sort(batch).tobytes(), rank) != rank and len(np.unique(batch)) >= _BATCH
    )


def _where_to_look(seeds: Sequence[int | None]) -> str:
    """Return possible causes of overlapping shards, given the samplers' seeds."""
    if not seeds or None in seeds:
        return (
            "Check that all ranks split and shuffle the data with the same seed and the same "
            "set_epoch (random_split needs a generator with that seed), and that each takes the "
            "share of its own rank."
        )
    if len(set(seeds)) > 1:
        return (
            f"The samplers shuffle with seeds {', '.join(map(str, dict.fromkeys(seeds)))}: give "
            "all ranks one seed, so that their shards are disjoint."
        )
    return (
        f"All samplers shuffle with seed {seeds[0]}. See that each gets the same epoch in "
        "set_epoch at the same time; then num_replicas and rank of the samplers, and a split "
        "before them that differs between ranks (random_split needs a generator that is seeded "
        "alike)."
    )


def chance_of_share(found: int, total: int, p: float) -> float:
    """Bound the probability of so small a share of trials with probability p or more each.

    Chernoff: ``exp(-n KL(k/n, p))``.

    Example:
        >>> chance_of_share(0, 4, 0.5), chance_of_share(3, 4, 0.5)
        (0.0625, 1.0)
    """
    share = found / total if total else 1.0
    if share >= p:
        return 1.0
    inside = share * math.log(share / p) if share else 0.0
    return math.exp(-total * (inside + (1 - share) * math.log((1 - share) / (1 - p))))


def _either(one: float, other: float) -> float:
    """Bound the probability that the smaller of two bounds is wrong."""
    return min(1.0, 2 * min(one, other))


def _chance(*log_ratios: float) -> float:
    """Bound the probability that the null ever looks like this, in [0, 1].

    The average of supermartingales of mean 1 is one, too; ``log_ratios`` are their logarithms.
    """
    log_average = float(np.logaddexp.reduce(log_ratios)) - math.log(len(log_ratios))
    return math.exp(-max(log_average, 0.0))
