"""Workers against sampling: are they all more alike, or all more different, than chance makes them?

A fault that all workers share leaves them exchangeable, so comparing one with the others shows
nothing. The spread *inside* workers shows it: with two or more micro-batches a worker, by exact
e-values (:mod:`rankscope.stats.spread`). Workers that are too similar are a warning
inside the false-alarm budget, or a note where the samples are known to differ; workers whose data
differ in kind are a note, since shards by domain are healthy.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence, PersistentFault, RunFacts
from rankscope.bus.finding import Severity
from rankscope.bus.messages import Derived
from rankscope.bus.step import GatheredStep, reduced_norm
from rankscope.bus.steps import Step
from rankscope.bus.words import count
from rankscope.stats.arrays import Floats
from rankscope.stats.bets import (
    SAMPLING,
    ShiryaevRoberts,
    alarm_level,
    bound_in_words,
    false_alarm_bound,
)
from rankscope.stats.direction import (
    cosines_from_gram,
    gram,
    has_direction,
    leave_one_out,
    mean_and_min_cosine,
    norm_weighted_cosine,
    norm_weighted_cosine_from_mean,
    step_values,
)
from rankscope.stats.noise_scale import ratio_of_sums
from rankscope.stats.spread import (
    STRENGTHS,
    Units,
    expected_std,
    mean_and_std,
    pool_units,
    population_std,
    rank_bets,
    spread_ranks,
    value_range,
)
from rankscope.stats.units import HEALED, FollowedUnit

SEED = 0x5A3B
"""Seeds the rotations, together with the step's number."""

RECENT = 64
"""Steps over which a finding states the ratio."""

_REPEATED = 4096
"""Age in steps from which on the batches of all workers together count as forgotten."""

_TAIL_SHARE = 0.5
_PROVEN = 0.9
_LOSSES = 0
_NORMS = 1


class Sampling(Detector):
    """Compares the spread between workers with the spread inside them."""

    SETTINGS = ("_num_workers", "_flagged")

    def __init__(self, num_workers: int, flagged: Callable[[], Sequence[int]] = tuple) -> None:
        self._num_workers = num_workers
        self._flagged = flagged
        level = alarm_level(SAMPLING * _TAIL_SHARE)
        self._low = _Alarm(level, 1)
        self._high = _Alarm(level, 2)
        self._similar = Severity.WARNING
        self._steps = 0
        self._averaged = False
        self._recent: deque[tuple[float, float, bool]] = deque(maxlen=RECENT)

    def observe_step(self, step: Step) -> Iterable[FaultEvidence]:
        """Process a step; report workers that are too similar or too different, and its end."""
        if self._num_workers < 2:
            return ()
        self._steps += 1
        gathered = step.gathered
        flagged = self._flagged()
        if _came_before(step) or step.identical or len(flagged) > self._num_workers - 2:
            return ()
        gathered = _without(gathered, flagged)
        observed, expected = _loss_stds(gathered, {} if flagged else step.report.values)
        squares = observed * observed, expected * expected  # infinite, where a power would raise
        drawn, distinct = (
            step.report.values.get(name, math.nan) for name in ("samples_drawn", "samples_distinct")
        )
        self._recent.append((*squares, 0 < drawn == distinct))  # all are known, and differ
        return list(self._bet(gathered))

    def _bet(self, gathered: GatheredStep) -> Iterable[FaultEvidence]:
        """Bet on the rank of the spread between workers among other deals of the units."""
        losses = pool_units(gathered.micro_losses, gathered.micro_weights)
        norms = pool_units(gathered.micro_norms)
        if losses is None and norms is None:
            return
        rng = np.random.default_rng([SEED, gathered.step])
        low = self._units_for_low(gathered, losses)
        if low is not None:
            e_low, _ = rank_bets(spread_ranks(low, rng, same_index=False))
            was_open = self._low.open
            if self._low.add(gathered.step, e_low, 0):
                if not was_open:  # a note where nearly all samples since then are known to differ
                    proven = [distinct for _, _, distinct in self._recent][-self._low.duration :]
                    noted = sum(proven) >= _PROVEN * len(proven)
                    self._similar = Severity.NOTE if noted else Severity.WARNING
                what = "losses" if low is losses else "gradient norms"
                key = "sampling.too_similar"
                cause = "data.duplicate_batches"
                yield self._evidence(key, cause, self._similar, self._low, what)
        changed = False
        for source, units in ((_LOSSES, losses), (_NORMS, norms)):
            if units is not None:
                _, e_high = rank_bets(spread_ranks(units, rng, same_index=True))
                changed |= self._high.add(gathered.step, e_high, source)
        if changed:
            of_losses, of_norms = self._high.evidence_of_sources.tolist()
            what = "losses" if of_losses >= of_norms else "gradient norms"
            key = "sampling.too_different"
            cause = "inconclusive"
            yield self._evidence(key, cause, Severity.NOTE, self._high, what)

    def _units_for_low(self, gathered: GatheredStep, losses: Units | None) -> Units | None:
        """Return the units that may move to any other place: losses, unless these are averages.

        All but the first gradient norm of a worker are estimates, which may move among themselves.
        """
        if losses is None:
            return pool_units(gathered.micro_norms, from_index=1)
        if gathered.observed:
            losses_W = gathered.workers["loss"]
            norms_W = gathered.workers["grad_norm"]
            equal = population_std(losses_W) <= 1e-9 * float(np.abs(losses_W).max())
            self._averaged = equal and population_std(norms_W) > 1e-2 * float(np.mean(norms_W))
        return None if self._averaged else losses

    def _evidence(
        self, key: str, cause: str, severity: Severity, alarm: "_Alarm", what: str
    ) -> FaultEvidence:
        shown = len(self._recent) - alarm.quiet
        steps = list(self._recent)[-alarm.duration : shown]
        sums = np.array([pair for *pair, _ in steps if np.isfinite(pair).all()]).reshape(-1, 2)
        ratio = ratio_of_sums(sums, root=True).value
        known = math.isfinite(ratio)
        far = f" (losses {ratio:.2f} times as far as sampling explains)" if known else ""
        return alarm.evidence(
            cause,
            severity,
            (),
            {
                "what": what,
                "ratio": far,
                "steps": count(self._steps, "step"),
                "bound": bound_in_words(self._steps),
            },
            {
                "steps": alarm.count,
                "steps_compared": self._steps,
                "dispersion_ratio": ratio if known else None,
                "false_alarm_probability": false_alarm_bound(self._steps),
            },
            key=key,
        )


class _Alarm(PersistentFault):
    """E-detectors, one for each source and bet, that alarm together; then the strongest counts."""

    SETTINGS = (*PersistentFault.SETTINGS, "_level")

    def __init__(self, level: float, num_sources: int) -> None:
        super().__init__()
        self._level = level
        self._detectors = ShiryaevRoberts(len(STRENGTHS), num_sources)
        self._followed = self._follow()
        self._fed: deque[int] = deque(maxlen=RECENT)
        self.duration = 1

    @property
    def evidence_of_sources(self) -> Floats:
        """Evidence of each source: the logarithm of that of its strongest bet."""
        evidence_S: Floats = self._followed.log_BS.max(axis=0)
        return evidence_S

    def _follow(self) -> FollowedUnit:
        evidence_BS = self._detectors.evidence.astype(np.float64)
        patient_B = np.zeros(len(STRENGTHS), bool)
        ages_BS = self._detectors.age.copy()
        return FollowedUnit.of(np.log(np.maximum(evidence_BS, 1.0)), ages_BS, patient_B)

    @property
    def quiet(self) -> int:
        """Number of steps since the last one that showed it."""
        return sum(step > self.last for step in self._fed)

    def add(self, step: int, e_B: Floats, source: int) -> bool:
        """Add the e-values of a step and source; return whether it changes."""
        if not self._fed or self._fed[-1] != step:
            self._fed.append(step)
            self.duration = min(self.duration + 1, RECENT)
        if not self.open:
            self._detectors.observe(e_B.astype(np.float32), (slice(None), source))
            if float(self._detectors.evidence.mean()) >= self._level:
                self._open(step)
            return self.open
        self._followed.observe(e_B[:, None], slice(source, source + 1))
        if self._followed.certainty <= HEALED:
            self._detectors.restart(...)
            return self.close()
        if self._followed.certainty < 1:
            return False
        self.last = step
        self.count += 1
        return True

    def _open(self, step: int) -> None:
        strongest = int(self._detectors.evidence.argmax())
        age = float(self._detectors.age.flat[strongest])
        self.duration = int(np.clip(round(age), 1, len(self._fed)))
        began = self._fed[-self.duration]
        self.first = began if self.first < 0 else self.first
        self.last = step
        self.count += self.duration
        self.open = True
        self._followed = self._follow()


def _came_before(step: Step) -> bool:
    """Return whether a worker or all of them repeat a batch, which is no new draw."""
    recurrence = step.recurrence
    age = step.gathered.step - recurrence.before if recurrence.before >= 0 else _REPEATED + 1
    return bool(recurrence.ages_W.any()) or age <= _REPEATED


def _without(gathered: GatheredStep, workers: Sequence[int]) -> GatheredStep:
    """Return the step without some workers, in the fields used here."""
    if not workers:
        return gathered
    kept = [worker for worker in range(gathered.num_workers) if worker not in workers]
    used = ("loss", "loss_sem", "grad_norm")
    micro = (gathered.micro_losses, gathered.micro_weights, gathered.micro_norms)
    losses, weights, norms = (tuple(of[w] for w in kept) if of else () for of in micro)
    return replace(
        gathered,
        workers={name: gathered.workers[name][kept] for name in used},
        samples=tuple(gathered.samples[worker] for worker in kept),
        micro_losses=losses,
        micro_weights=weights,
        micro_norms=norms,
    )


def _loss_stds(gathered: GatheredStep, values: Mapping[str, float]) -> tuple[float, float]:
    """Return the losses' std over workers, and the one that sampling alone would give."""
    if "loss_std" in values and "loss_std_expected" in values:
        return values["loss_std"], values["loss_std_expected"]
    workers = gathered.workers
    return population_std(workers["loss"]), expected_std(workers["loss_sem"])


def make_judges(run: RunFacts) -> tuple[Detector, ...]:
    """Return the detectors of a run."""
    return (Sampling(run.num_workers, run.flagged.now),)


def derive(gathered: GatheredStep) -> Derived:
    """Return the spreads and cosines of a step."""
    directions, cosine_rest_W, cosines_WW = _directions(gathered)
    return Derived(
        steps={**_spreads(gathered), **directions},
        workers={"cosine_rest": cosine_rest_W},
        report={
            "cosines_WW": cosines_WW,
            "group_cosine_rest_WG": _group_directions(gathered),
        },
    )


def _spreads(gathered: GatheredStep) -> dict[str, float]:
    losses_W = gathered.workers["loss"]
    _, loss_std = mean_and_std(losses_W)
    norm_mean = math.nan
    norm_std = math.nan
    if gathered.observed:
        norm_mean, norm_std = mean_and_std(gathered.workers["grad_norm"])
    return {
        "loss_std": loss_std,
        "loss_range": value_range(losses_W),
        "loss_std_expected": expected_std(gathered.workers["loss_sem"]),
        "grad_norm_mean": norm_mean,
        "grad_norm_std": norm_std,
    }


def _directions(gathered: GatheredStep) -> tuple[dict[str, float], Floats, Floats | None]:
    """Return the columns of the steps table, ``cosine_rest`` ``[W]`` and all cosines.

    Without sketches, norms give the mean weighted by them, and the cosine of two workers.
    """
    values = dict.fromkeys(
        ("cosine_mean", "cosine_weighted", "cosine_min", "directions_undefined"), math.nan
    )
    undefined_W = np.full(gathered.num_workers, math.nan)
    if not gathered.observed:
        return values, undefined_W, None
    consensus = gathered.consensus
    if consensus is not None:
        return step_values(consensus), consensus.cosine_rest_W, None
    if gathered.sketches_WK is None:
        norms_W = gathered.workers["grad_norm"]
        reduced = reduced_norm(gathered)
        weighted = norm_weighted_cosine_from_mean(norms_W, reduced)
        values["cosine_weighted"] = weighted
        values["directions_undefined"] = float(np.sum(~(np.isfinite(norms_W) & (norms_W > 0))))
        return values, np.full(2, weighted) if len(norms_W) == 2 else undefined_W, None
    gram_WW = gram(gathered.sketches_WK)
    cosines_WW = cosines_from_gram(gram_WW)
    mean, smallest = mean_and_min_cosine(cosines_WW)
    values = {
        "cosine_mean": mean,
        "cosine_weighted": norm_weighted_cosine(gram_WW),
        "cosine_min": smallest,
        "directions_undefined": float(len(gram_WW) - np.count_nonzero(has_direction(gram_WW))),
    }
    return values, leave_one_out(gram_WW), cosines_WW


def _group_directions(gathered: GatheredStep) -> Floats | None:
    """Return for each worker and group ``[W, G]`` its leave-one-out cosine, None without sketch."""
    if gathered.consensus is not None and gathered.groups_in_turn is not None:
        cosines_WG = np.full((gathered.num_workers, len(gathered.groups)), math.nan)
        cosines_WG[:, gathered.groups_in_turn] = gathered.consensus.group_cosine_rest_Wg
        return cosines_WG
    sketches_WGK = gathered.group_sketches_WGK
    if sketches_WGK is None or not sketches_WGK.size:
        return None
    return np.ascontiguousarray(leave_one_out(gram(sketches_WGK.swapaxes(0, 1))).T)
