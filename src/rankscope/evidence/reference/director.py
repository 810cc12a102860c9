"""Reference steps at the root: collects the workers' shares of a step, and judges it."""

import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rankscope.bus.finding import Finding
from rankscope.bus.plan import Plan
from rankscope.bus.probe import DirectedRun
from rankscope.bus.shares import ShareDirector
from rankscope.bus.step import GatheredStep
from rankscope.bus.words import shortened
from rankscope.evidence.reference.share import ReferenceShare
from rankscope.evidence.reference.slopes import judge_slopes
from rankscope.evidence.reference.verify import ReferenceAnswer, Verification, verify
from rankscope.evidence.reference.words import LossCheck, declined, derived, verified
from rankscope.stats.arrays import Floats

_log = logging.getLogger("rankscope")

_UNKNOWN = (float("nan"),)
_MOST_BLUR = 0.5  # of a gradient's norm: beyond this, agreement proves nothing
_SAME = 1e-3  # relative: sums of factors
_SAME_FACTOR = 1e-5  # relative: rounding of losses in float32
_UNKNOWN_FACTOR = (
    "the factor between the loss and what backward was called on is not known (the gradient is "
    "that of what backward was called on): a loop that calls watch() can give the loss by "
    "scope.loss() before its backward pass"
)
_NO_ONE_MODEL = (
    "the workers hold different values of {}, so that it is the gradient of no one model"
)
_CUT = "elements were clipped, and the gradient before it is not known"
_SET_ASIDE = (
    "the optimizer may get a gradient made of several reductions, of which this step has the last"
)
_PROVE = ("verify.agrees", "verify.declined")  # whatever the optimizer got before
_MOST_NAMED = 3


class Verifications(ShareDirector[ReferenceShare]):
    """Reference steps of one run."""

    kind = ReferenceShare

    def __init__(self, run: DirectedRun) -> None:
        super().__init__(run)
        self._by_loop = run.by_loop
        self._plan = Plan.of(run.options.get("plan"))

    def declined(self, why: str) -> ReferenceShare:
        """Return a share that holds nothing but the reason."""
        return ReferenceShare(declined=why)

    def miss(self, step: int) -> Iterable[Finding]:
        """Return that the step cannot be checked."""
        yield declined("a worker did not send its part", (), step)

    def judge(self, step: GatheredStep, shares: Mapping[int, ReferenceShare]) -> Iterable[Finding]:
        """Judge the step's gradient."""
        finding = self._judge(step, shares)
        aside = _is_set_aside(step)
        lost = finding.cause == "verify.micro_batches" and _are_divided(step, shares)
        if aside and not lost and finding.cause not in _PROVE:
            finding = declined(_SET_ASIDE, (), step.step)
        yield finding

    def _judge(self, step: GatheredStep, parts: Mapping[int, ReferenceShare]) -> Finding:
        loss = LossCheck.of([part for _, part in sorted(parts.items())], self.num_workers)
        slopes = [part.slopes for _, part in sorted(parts.items())]
        if len(parts) == self.num_workers and None not in slopes and slopes[0] is not None:
            num_micro = max(map(len, step.micro_losses), default=1)
            judged = judge_slopes(slopes[0], self.num_workers)
            return derived(
                judged,
                slopes[0],
                step.step,
                self.num_workers,
                num_micro,
                loss=loss,
                by_loop=self._by_loop,
            )
        reasons = {rank: part.declined for rank, part in sorted(parts.items()) if part.declined}
        if reasons:
            everyone = len(reasons) == self.num_workers
            return declined(reasons[min(reasons)], () if everyone else list(reasons), step.step)
        why = self._why_not(parts)
        if why:
            return declined(why, (), step.step)
        parts_W = [parts[rank] for rank in range(self.num_workers)]
        scales_W = _loss_factors(step, parts_W)
        scheduled = float(step.workers.get("schedule_scale", _UNKNOWN)[0])
        in_pipeline = bool(np.isfinite(scheduled))
        meant = self._plan.loss_weighting
        try:
            found = verify(
                parts_W,
                scales_W,
                step.micro_weights,
                meant,
                scheduled if in_pipeline else 1.0,
                in_pipeline=in_pipeline,
                clip_factor=float(step.workers.get("clip_factor", _UNKNOWN)[0]),
            )
        except Exception as error:  # the run goes on without it
            _log.debug("a reference step could not be judged", exc_info=True)
            return declined(f"what was sent of it cannot be compared ({error})", (), step.step)
        cut = all(part.clips_value for part in parts_W)
        if cut and not all(len(part.reduced_PK) for part in parts_W):
            return declined(_CUT, (), step.step)
        unclear = found.answer in (ReferenceAnswer.AGREES, ReferenceAnswer.GRADIENT)
        why = _proves_nothing(found, parts_W) if unclear else ""
        if why:
            return declined(why, (), step.step)
        most = max(len(part.terms_MPK) for part in parts_W)
        clips = self._plan.max_norm is not None or all(part.clips for part in parts_W)
        return verified(
            found,
            step.step,
            self.num_workers,
            most,
            loss=loss,
            by_loop=self._by_loop,
            clips=clips,
            planned=meant is not None,
        )

    def _why_not(self, parts: Mapping[int, ReferenceShare]) -> str:
        """Return why the workers' parts cannot be compared; empty if they can."""
        if len(parts) < self.num_workers:
            return "it was not asked for on all ranks in the same step"
        first, *others = parts.values()
        if any(_kind_of(one) != _kind_of(first) for one in others):
            return "the workers train different parameters"
        if any(one.given_PK.shape != first.given_PK.shape for one in others):
            return "the workers have too different numbers of micro-batches"
        for part in parts.values():
            if not (np.isfinite(part.given_PK).all() and np.isfinite(part.terms_MPK).all()):
                return "it is not finite"
        return ""


def _is_set_aside(step: GatheredStep) -> bool:
    """Return whether gradients of the step were thrown away or kept elsewhere before its end."""
    return bool(step.workers.get("grad_set_aside", _UNKNOWN)[0] > 0)


def _are_divided(step: GatheredStep, shares: Mapping[int, ReferenceShare]) -> bool:
    """Return whether losses were divided by the number of passes, as those of micro-batches are."""
    passes_W = np.array([len(shares[rank].terms_MPK) for rank in sorted(shares)])
    scales_W = np.asarray(step.workers["grad_scale"])
    return bool((passes_W > 1).all()) and np.allclose(passes_W * scales_W, 1, rtol=_SAME)


def _loss_factors(step: GatheredStep, parts_W: Sequence[ReferenceShare]) -> tuple[Floats, ...]:
    """Return the factor on each micro-batch's loss by worker; NaN where it is not known."""
    if _repeats_its_batch(step):
        scales_W = tuple(np.full(len(one), np.nan) for one in step.micro_losses)
    else:
        scales_W = step.micro_scales
        if not scales_W or not all(np.isfinite(scales).all() for scales in scales_W):
            scales_W = _scales_by_value(parts_W, step.micro_losses) or scales_W
        if not _is_set_aside(step):  # the passes before that have no loss here
            scales_W = tuple(map(_of_passes, scales_W, parts_W))
    if step.workers["loss_divided"].all():  # and the sum over workers is in them
        scales_W = tuple(s / p.summed_workers for s, p in zip(scales_W, parts_W, strict=True))
    return scales_W


def _repeats_its_batch(step: GatheredStep) -> bool:
    """Return whether the passes of each worker's step share samples, a quarter at least.

    They are several losses then, and not micro-batches: what each should weigh is not known.
    """
    if max(map(len, step.micro_losses), default=1) < 2:
        return False
    return all(0 < 4 * len(np.unique(own)) <= 3 * len(own) for own in step.samples)


def _of_passes(scales_M: Floats, part: ReferenceShare) -> Floats:
    """Return the losses' factors as those of forward passes, of which several make one loss.

    So a worker's passes count as a mean over them. Left as they are: factors of several losses that
    differ, or whose sum is not 1.
    """
    passes, losses = len(part.terms_MPK), len(scales_M)
    alone = losses == 1 or np.allclose(scales_M * losses, 1, rtol=_SAME)
    if not losses or passes <= losses or not alone:
        return scales_M
    return np.full(passes, scales_M[0] * losses / passes)


def _scales_by_value(
    parts_W: Sequence[ReferenceShare], losses_W: Sequence[Floats]
) -> tuple[Floats, ...]:
    """Return what backward was called on over the loss, by micro-batch; nothing if unknown.

    So is the factor of a loss that was given after its backward pass. It is known where it is the
    same for all micro-batches of all workers: then nothing else was added to the loss.
    """
    roots_W = [np.array(part.roots_M) for part in parts_W]
    if [len(roots) for roots in roots_W] != [len(losses) for losses in losses_W]:
        return ()
    with np.errstate(divide="ignore", invalid="ignore"):
        scales_W = tuple(r / losses for r, losses in zip(roots_W, losses_W, strict=True))
    scales_N = np.concatenate(scales_W)
    alike = (
        np.isfinite(scales_N).all() and np.ptp(scales_N) <= _SAME_FACTOR * np.abs(scales_N).max()
    )
    return scales_W if len(scales_N) > 1 and alike else ()


def _proves_nothing(found: Verification, parts_W: Sequence[ReferenceShare]) -> str:
    """Return why an agreement proves nothing; empty if it proves something."""
    axis = parts_W[0].axis
    if axis and found.blur > _MOST_BLUR:
        return f"rounding, or replicas that differ over {axis}, may change most of it"
    differing = _differing(parts_W)
    if differing:
        return _NO_ONE_MODEL.format(shortened(differing, _MOST_NAMED))
    agrees = found.answer is ReferenceAnswer.AGREES
    return _UNKNOWN_FACTOR if agrees and found.weighting == "backward" else ""


def _differing(parts_W: Sequence[ReferenceShare]) -> list[str]:
    """Return the parameters of which the workers hold different values.

    Each has computed its own part at its own values: a difference says what is wrong all the same,
    an agreement nothing.
    """
    first, *others = parts_W
    return sorted(
        name
        for name, digest in first.digests.items()
        if any(one.digests.get(name, digest) != digest for one in others)
    )


def _kind_of(part: ReferenceShare) -> tuple[object, ...]:
    return part.names, part.types, part.copies, part.summed_workers, part.axis


make_director = Verifications
