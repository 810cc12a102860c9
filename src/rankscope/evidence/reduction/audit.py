"""The detector of reductions that err more than rounding, from residuals by worker and group.

Errors leave different traces, and each has a finding of its own:

- a corrupted element: one group, or few, in one step, and every worker the same;
- one worker's result differs: its residual is high, and most others' are not;
- all groups alike, in step after step: a reduction in a narrower type than meant;
- anything else that lasts: compression that loses something, for instance.

A residual is high by comparison with rounding (:mod:`rankscope.evidence.reduction.levels`) and,
where a group's residuals are always larger than that, with the group's own.

A high group is reported in the same step if it is one of few and was well before. Otherwise the
next steps decide whether it was an exception, or the beginning of a lasting error. They always do
where a communication hook reduces: compression often begins in some later step.

Legend of shapes: W workers, G groups.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankscope.bus.detector import Detector, FaultEvidence
from rankscope.bus.finding import Severity
from rankscope.bus.replicas import ParametersByPlace
from rankscope.bus.step import GatheredStep, StepReport
from rankscope.bus.steps import SharedWork, StepBatch, common_scale
from rankscope.bus.words import count, shortened
from rankscope.evidence.reduction.levels import (
    ELEMENT,
    LOSSY,
    LOW_PRECISION,
    ONE_WORKER,
    STEPS,
    USUAL,
    ExpectedResiduals,
    GroupHistory,
    ReductionFault,
    Streak,
    sums_of_gradients,
)
from rankscope.stats.arrays import Bools, Floats

ALIKE = 3.0
"""Factor by which most groups' residuals may differ from their median under one rounding."""

_NAMED = 4  # groups that a sentence names
_LARGEST_FLOAT16 = 65504.0
_COMPRESSING = ("powerSGD_hook", "quantization", "fp16_compress", "FP16_COMPRESS", "bf16_compress")


@dataclass(frozen=True, slots=True)
class _Step:
    """One step's residuals, of the groups that can be judged."""

    step: int
    names: tuple[str, ...]
    residuals_WG: Floats
    levels_G: Floats
    kappas_G: Floats
    limits_G: Floats
    once_G: Floats
    lasting_G: Floats


class ReductionAudit(Detector):
    """Corrupted elements, single workers that differ, and reductions in too narrow a type.

    It needs ``watch(reduced="sketch")`` and two or more groups of parameters: with one
    (``groups="none"``) the residual is recorded but not judged.

    ``reduced_in``: name of the type in which each group is meant to be reduced, such as
    ``bfloat16``; float32 where a group has none. Groups of an unknown type are not judged.
    ``hook``: name of the communication hook that reduces, which may compress from some step on; a
    lasting error is a note where it is one of torch's that do.
    ``by_loop``: whether the training's own loop reduces: over some workers alone, where the others
    share the work on their samples, or groups that have parameters of their own at each place.
    """

    SETTINGS = ("_num_workers", "_expected", "_hook", "_by_loop")

    def __init__(
        self,
        num_workers: int,
        reduced_in: Mapping[str, str] | None = None,
        *,
        hook: str = "",
        by_loop: bool = False,
        trained: int = 0,
    ) -> None:
        self._num_workers = num_workers
        self._by_loop = by_loop
        self._sharing = SharedWork()
        self._placed = ParametersByPlace(trained)
        self._hook = hook
        self._expected = ExpectedResiduals(num_workers, reduced_in)
        self._groups: dict[str, GroupHistory] = {}
        self._found: dict[str, ReductionFault] = {}
        self._step = 0

    def observe(self, steps: StepBatch) -> Iterator[Iterable[FaultEvidence]]:
        """Process consecutive steps; yield wrong reductions of single or of many steps."""
        sums = _sums_of_steps([step.report for step in steps])
        for step in steps:
            if self._by_loop:
                self._placed.observe(step.gathered.differences)
            if self._by_loop and (self._sharing.observe(step) or _is_cut(step.gathered)):
                yield []
            else:
                yield self._observe(step.gathered, sums.get(step.index))

    def _observe(self, gathered: GatheredStep, sums_G: Floats | None) -> list[FaultEvidence]:
        if self._num_workers < 2 or not gathered.observed:
            return []
        if gathered.residuals_WG is None or sums_G is None:
            return []
        self._step = gathered.step
        now = self._judge(gathered, gathered.residuals_WG, sums_G)
        keys = [*self._check_workers(now), *self._check_groups(now)]
        keys += self._check_lasting(now.names, STEPS)
        return [self._evidence(key) for key in dict.fromkeys(keys)]

    def close(self) -> Iterable[FaultEvidence]:
        """End the run; report errors that have only just begun."""
        waiting = {name: group for name, group in self._groups.items() if group.high.steps}
        keys = list(self._check_lasting(tuple(waiting), 2))
        last = [n for n, g in waiting.items() if g.well and g.high.steps == g.lasting.steps == 1]
        if last:
            worst = max(waiting[name].residual for name in last)
            keys.append(self._add(ELEMENT, last, worst))
            for name in last:
                waiting[name].high.steps = 0
        return [self._evidence(key) for key in keys]

    def _judge(self, gathered: GatheredStep, residuals_WG: Floats, sums_G: Floats) -> _Step:
        """Return the groups whose residuals are known, and their expected residuals."""
        norms_WG = gathered.group_norms_WG
        assert norms_WG is not None, "observe looks"
        lengths_G = np.linalg.norm(norms_WG, axis=0)
        histories = [self._groups.setdefault(name, GroupHistory()) for name in gathered.groups]
        local_G = np.isfinite(lengths_G) & (lengths_G > 0)
        may_be_lost_G = local_G & ~self._may_overflow(gathered)
        if not np.isfinite(gathered.workers["reduced_norm"]).all():
            residuals_WG = _with_lost(residuals_WG, may_be_lost_G, histories)
        usable_G = np.isfinite(residuals_WG).all(axis=0) & local_G
        with np.errstate(divide="ignore", invalid="ignore"):
            kappas_G = lengths_G / sums_G
            kappas = kappas_G.tolist()
            for g in usable_G.nonzero()[0].tolist():
                histories[g].kappa = kappas[g] = histories[g].kappa_of(kappas[g])
            kappas_G = np.array(kappas)
            sums_G = np.where(np.isnan(sums_G), lengths_G / kappas_G, sums_G)
        once_G, lasting_G = self._expected.limits(gathered.groups, kappas_G, sums_G)
        known_G = usable_G & np.isfinite(once_G) & ~self._has_places(gathered.groups)
        middle = (self._num_workers - 1) // 2
        levels_G = np.partition(residuals_WG, middle, axis=0)[middle]
        limits = [h.limit(once) for h, once in zip(histories, once_G.tolist(), strict=True)]
        return _Step(
            step=gathered.step,
            names=tuple(n for n, known in zip(gathered.groups, known_G, strict=True) if known),
            residuals_WG=residuals_WG[:, known_G],
            levels_G=levels_G[known_G],
            kappas_G=np.maximum(kappas_G[known_G], 1.0),
            limits_G=np.array(limits)[known_G],
            once_G=once_G[known_G],
            lasting_G=lasting_G[known_G],
        )

    def _has_places(self, groups: Sequence[str]) -> Bools:
        """Return which groups have parameters that differ by a rank's place ``[G]``."""
        return np.array(
            [any(f"{n}.".startswith(f"{g}.") for n in self._placed.names) for g in groups]
        )

    def _may_overflow(self, gathered: GatheredStep) -> Bools:
        """Return which groups' sums may leave float16, as loss scaling relies on, ``[G]``."""
        narrow_G = np.array([self._expected.type_of(n) == "float16" for n in gathered.groups], bool)
        scale = common_scale(gathered)  # recorded gradients are without it
        largest = float(gathered.workers["grad_max"].sum()) * (1.0 if np.isnan(scale) else scale)
        return np.zeros_like(narrow_G) if largest < _LARGEST_FLOAT16 / 2 else narrow_G

    def _check_workers(self, now: _Step) -> Iterable[str]:
        """Find workers whose result errs though that of most others does not."""
        apart_WG = (now.residuals_WG > now.limits_G) & (now.levels_G <= now.limits_G)
        if not apart_WG.any():
            return
        ranks = tuple(np.flatnonzero(apart_WG.any(axis=1)).tolist())
        names = [now.names[g] for g in np.flatnonzero(apart_WG.any(axis=0))]
        limit = float(now.limits_G[apart_WG.any(axis=0)].max())
        worst = float(now.residuals_WG[apart_WG].max())
        yield self._add(ONE_WORKER, names, worst, ranks=ranks, limit=limit)

    def _check_groups(self, now: _Step) -> Iterable[str]:
        """Find groups that err in single steps and are well in others."""
        few = int((now.levels_G > now.limits_G).sum()) <= max(1, len(now.names) // 2)
        sudden = list[str]()
        over = dict[str, Streak]()
        for name, level, limit, common, once, lasting in zip(
            now.names,
            now.levels_G.tolist(),
            now.limits_G.tolist(),
            (self._common(now) * now.kappas_G).tolist(),
            now.once_G.tolist(),
            now.lasting_G.tolist(),
            strict=True,
        ):
            is_sudden, before = self._groups[name].add(
                now.step,
                level,
                limit=limit,
                once=once,
                lasting=lasting,
                common=common,
                at_once=few and not self._hook,
            )
            if is_sudden:
                sudden.append(name)
            if before is not None:
                over[name] = before
        if over:
            yield self._add(
                ELEMENT,
                list(over),
                max(streak.worst for streak in over.values()),
                since=min(streak.since for streak in over.values()),
                last=max(streak.last for streak in over.values()),
                steps=max(streak.steps for streak in over.values()),
            )
        if sudden:
            yield self._add(ELEMENT, sudden, max(self._groups[n].residual for n in sudden))

    def _common(self, now: _Step) -> float:
        """Return the largest residual of a group that is like the others, if most err for long."""
        before_G = np.array([self._groups[name].lasting.steps > 0 for name in now.names], bool)
        lasting_G = before_G & (now.levels_G > now.lasting_G)
        if 2 * lasting_G.sum() <= len(now.names):
            return 0.0
        relative = np.sort((now.levels_G / now.kappas_G)[lasting_G])
        return USUAL * float(relative[(len(relative) - 1) // 2])

    def _check_lasting(self, names: Sequence[str], least: int) -> Iterable[str]:
        """Find groups that err in at least so many steps in a row."""
        lasting = {n: self._groups[n] for n in names if self._groups[n].lasting.steps >= least}
        if not lasting:
            return
        fits = self._fits(lasting, names)
        yield self._add(
            LOW_PRECISION if fits else LOSSY,
            list(lasting),
            float(np.median([group.residual for group in lasting.values()])),
            since=min(group.lasting.since for group in lasting.values()),
            steps=max(group.lasting.steps for group in lasting.values()),
            fits=fits,
        )

    def _fits(self, lasting: Mapping[str, GroupHistory], names: Sequence[str]) -> str:
        """Return the narrower types that explain a lasting error; empty if none does."""
        meant = {self._expected.type_of(name) for name in lasting}
        comparable = [name for name in names if self._expected.type_of(name) in meant]
        relative = np.array([g.residual / max(g.kappa, 1.0) for g in lasting.values()])
        typical = float(np.median(relative))
        alike = (relative <= ALIKE * typical) & (relative >= typical / ALIKE)
        if len(meant) > 1 or 2 * alike.sum() <= len(alike) or 2 * len(lasting) < len(comparable):
            return ""
        residual = float(np.median([group.residual for group in lasting.values()]))
        kappa = float(np.median([group.kappa for group in lasting.values()]))
        return " or ".join(self._expected.types_that_fit(residual, kappa, meant.pop()))

    def _add(
        self,
        key: str,
        names: Sequence[str],
        residual: float,
        *,
        ranks: tuple[int, ...] | None = None,
        limit: float | None = None,
        since: int | None = None,
        last: int | None = None,
        steps: int = 1,
        fits: str = "",
    ) -> str:
        """Add new evidence of an error to earlier evidence; return its key."""
        fault = ReductionFault(
            first=self._step if since is None else since,
            last=self._step if last is None else last,
            steps=steps,
            groups=tuple(sorted(names)),
            ranks=tuple(range(self._num_workers)) if ranks is None else ranks,
            residual=residual,
            limit=max(self._groups[name].once for name in names) if limit is None else limit,
            fits=fits,
        )
        before = self._found.get(key)
        if before is not None:
            lasting = key in (LOW_PRECISION, LOSSY)
            fault = replace(
                fault,
                first=min(before.first, fault.first),
                steps=before.steps + (1 if lasting else steps),
                groups=tuple(sorted({*before.groups, *names})),
                ranks=tuple(sorted({*before.ranks, *fault.ranks})),
                residual=residual if lasting else max(residual, before.residual),
            )
        self._found[key] = fault
        return key

    def _evidence(self, key: str) -> FaultEvidence:
        fault = self._found[key]
        types = sorted({self._expected.type_of(group) for group in fault.groups})
        severity = Severity.ERROR
        if key in (LOW_PRECISION, LOSSY):
            meant = any(name in self._hook for name in _COMPRESSING)
            severity = Severity.NOTE if meant else Severity.WARNING
        return FaultEvidence(
            cause="numerics.reduction_error",
            key=key,
            severity=severity,
            ranks=fault.ranks,
            first_step=fault.first,
            last_step=fault.last,
            count=fault.steps,
            groups=fault.groups,
            fields={
                "where": name_groups(fault.groups),
                "residual": f"{fault.residual:.2g}",
                "against": f"where rounding gives {fault.limit:.1g} at most",
                "steps": count(fault.steps, "audited step"),
                "fits": fault.fits,
                "meant": " or ".join(types),
                "hook": self._hook.rpartition(".")[2],
            },
            numbers={
                "residual": fault.residual,
                "limit": fault.limit,
                "steps": fault.steps,
                "fits": fault.fits,
            },
        )


def _sums_of_steps(reports: Sequence[StepReport]) -> dict[int, Floats]:
    """Return the norm of the sum of the workers' gradients ``[G]``, by index of the step."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, report in enumerate(reports):
        norms_WG = report.gathered.group_norms_WG
        if norms_WG is not None and report.gathered.residuals_WG is not None:
            by_shape.setdefault(norms_WG.shape, []).append(index)
    found: dict[int, Floats] = {}
    for shape, indices in by_shape.items():
        norms = np.array([reports[index].gathered.group_norms_WG for index in indices])
        cosines = [reports[index].group_cosine_rest_WG for index in indices]
        unknown_WG = np.full(shape, np.nan)
        cosines_SWG = np.array([unknown_WG if one is None else one for one in cosines])
        found |= zip(indices, sums_of_gradients(norms, cosines_SWG), strict=True)
    return found


def _is_cut(gathered: GatheredStep) -> bool:
    """Return whether elements were clipped before a loop's gradient was read, at its update."""
    return bool(np.isfinite(gathered.workers["clip_value"]).any())


def _with_lost(
    residuals_WG: Floats, may_be_lost_G: Bools, histories: Sequence[GroupHistory]
) -> Floats:
    """Give a residual of 1 to a group that was well and whose reduced gradient is not finite.

    Groups that err all the time may overflow: their type is narrower than meant.
    """
    known_WG = np.isfinite(residuals_WG)
    well_G = np.array([h.well and not h.lasting.steps for h in histories])
    lost_WG = ~known_WG & may_be_lost_G & well_G & known_WG.any(axis=1, keepdims=True)
    return np.where(lost_WG, 1.0, residuals_WG)


def name_groups(groups: Sequence[str]) -> str:
    """Return groups as words, a long list cut: ``the groups a, b, c, d and 3 others``."""
    if len(groups) == 1:
        return f"group {groups[0]}"
    return f"the groups {shortened(groups, _NAMED)}"
