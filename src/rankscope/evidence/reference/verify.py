"""The reference step: is a step's gradient what one process would have computed?

Each worker has computed the gradient ``h_im`` of each of its micro-batches once more, by itself,
as its own backward pass had multiplied it by ``s_im``. The gradient of the micro-batch's own mean
loss is ``h_im / s_im``, and that of a single process is

    r = sum_i sum_m  e_im h_im / s_im,

with the intended weights e: ``1/(W M_i)`` if each worker's mean loss counts alike, ``n_im / N`` if
each label token does. The gradient that the optimizer got is compared with it, for each parameter
by the norm of the difference, within the bound of rounding:

    (u (M + W + 4) + v (4 + sqrt(n / k))) sum_im |e_im / s_im| |h_im|,

the first-order bound of a sum, with the unit roundoff u of the parameter's type. All gradients are
linear sketches (:mod:`rankscope.gradients.sketch`), which are added up in float64, one after the
other. A sketch adds up a parameter's n elements in float32, to k numbers: the roundings of n/k sums
are a random walk, in units of v, the unit roundoff of float32. A sketch holds each element of a
parameter that is no longer than it; of a longer one it estimates the norm of a difference to within
9 % (k = 251), which suffices. A single wrong element of a large parameter stays below the bound if
its error does.

If the two differ, the least-squares weights of the micro-batches in the given gradient explain how.

Legend of shapes: W workers, M micro-batches of one worker, N all micro-batches, worker by worker,
P parameters, k numbers in a sketch.

Source of the bound: Higham, "Accuracy and Stability of Numerical Algorithms" (2002), chapter 4.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.steps import LEAST_SCALER
from rankscope.evidence.reference.share import ReferenceShare
from rankscope.stats.arrays import Bools, Floats, Floats32, median
from rankscope.stats.rounding import UNIT_ROUNDOFF

_CLEAR = 100.0  # a gradient so many times its bound has a direction beyond rounding
_VISIBLE = 2.0  # the same, if no gradient is so clear
_EQUAL = 0.02  # relative: weights this close are the same
_MOST_GROWN = 1.25  # a norm, by its estimate alone
_SAME = 1e-3  # relative: factors that are computed apart
_FACTORS = 3  # different ones show that each parameter has its own
_UNCLEAR = 0.25  # standard error beyond which a weight is unknown


class ReferenceAnswer(StrEnum):
    """How the given gradient compares with that of a single process."""

    AGREES = "agrees"
    """It is the same, within rounding; or smaller by one factor, after the reduction."""
    SCALE = "scale"
    """All of it has one factor."""
    MICRO_BATCHES = "micro_batches"
    """Some micro-batches are missing."""
    WEIGHTING = "weighting"
    """Micro-batches have other weights than intended."""
    PARAMETERS = "parameters"
    """A few parameters differ."""
    GRADIENT = "gradient"
    """It differs in another way."""


class GradientMismatch(StrEnum):
    """How a parameter's gradient differs."""

    NOT_REDUCED = "not_reduced"
    """Every worker holds its own."""
    MISSING = "missing"
    """It is zero."""
    SCALE = "scale"
    """It has a factor of its own."""
    PARTIAL = "partial"
    """Each rank along another axis of the mesh holds a part of it, which were not summed."""
    CHANGED = "changed"
    """It differs in another way."""


@dataclass(frozen=True, slots=True)
class OddParameter:
    """A parameter whose gradient differs, where most agree."""

    name: str
    how: GradientMismatch  # how it differs
    factor: float  # its ratio to the reference; NaN if it is no multiple
    error: float  # relative norm of the difference
    afterwards: bool  # it was changed after the reduction
    axis: str = ""  # axis over which it was not summed; empty if that is not how it differs


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a reference step."""

    answer: ReferenceAnswer
    weighting: str  # intended or fitting best: a key of ``_weightings``
    error: float = 0.0  # largest relative one that agrees; of all, if too few do
    bound: float = 0.0  # bound of rounding on it
    parameter: str = ""  # the parameter of that error
    dtype: str = "float32"
    factor: float = 1.0  # the given gradient over the reference
    clipped: float = 1.0  # factor of all gradients after the reduction, if that is all
    in_loss: bool = False  # the factor, or the weights, were there when backward was called
    changed: float = float("nan")  # the same of most parameters; NaN if unknown
    ratios: tuple[tuple[float, ...], ...] = ()  # weights over the intended ones, if fitted
    odd: tuple[OddParameter, ...] = ()  # where most agree, or nothing was reduced
    num_parameters: int = 0
    blur: float = 0.0  # bound of rounding over the norm, for most parameters
    held: tuple[str, ...] = ()  # parameters without a gradient after a sound reduction
    shrunk: tuple[float, ...] = ()  # factors of others after it, where each has its own
    by_value: bool = False  # elements were clipped after a sound reduction
    summed: tuple[str, ...] = ()  # parameters changed after it, as a sum over stages does
    # relative distance of a gradient that all workers share from any sum of the micro-batches'
    from_sums: float = 0.0

    @property
    def ulps(self) -> float:
        """The error in units in the last place of the parameter's type."""
        return self.error / (2 * UNIT_ROUNDOFF.get(self.dtype, UNIT_ROUNDOFF["float32"]))


def verify(
    parts_W: Sequence[ReferenceShare],  # each worker's share, all of them of the same parameters
    scales_W: Sequence[Floats],
    tokens_W: Sequence[Floats],  # label tokens of each micro-batch; NaN if unknown
    meant: str | None = None,
    scheduled: float = 1.0,  # a pipeline's factor after the backward passes
    *,
    in_pipeline: bool = False,  # stages may sum the gradients of weights that they share
    clip_factor: float = math.nan,  # of the step's clipping by norm; NaN if unknown
) -> Verification:
    """Return whether a step's gradient is what one process would have computed."""
    step = _Step(parts_W, scales_W, scheduled, clip_factor)
    references = [
        _Reference(step, name, weights_N)
        for name, weights_N in _weightings(step, tokens_W, meant).items()
    ]
    finders: tuple[Callable[[_Reference], Verification | None], ...] = (
        _find_agreement,
        _find_factor,
        _find_held,
        *((_find_summed,) if in_pipeline else ()),
        _find_odd,
        _find_unreduced,
        _find_weights,
    )
    for find in finders:
        found = [one for one in map(find, references) if one is not None]
        if found:
            return min(found, key=_simplicity)
    return references[0].describe(
        ReferenceAnswer.GRADIENT, factor=1.0, from_sums=_distance_from_sums(step)
    )


class _Step:
    """The shares of all workers."""

    def __init__(
        self,
        parts_W: Sequence[ReferenceShare],
        scales_W: Sequence[Floats],
        scheduled: float,
        clip_factor: float,
    ) -> None:
        first = parts_W[0]
        self.scheduled = scheduled
        self.clip_factor = clip_factor
        self.names = first.names
        self.types = first.types
        self.num_workers = len(parts_W)
        self.parts_W = parts_W
        self.counts_W = [len(part.terms_MPK) for part in parts_W]
        self.worker_N = np.repeat(np.arange(len(parts_W)), self.counts_W)
        self.terms = [term_PK for part in parts_W for term_PK in part.terms_MPK]
        self.norms_NP = np.concatenate([part.norms_MP for part in parts_W])
        complete = all(
            len(scales) == count and np.isfinite(scales).all() and scales.all()
            for scales, count in zip(scales_W, self.counts_W, strict=True)
        )
        self.knows_scales = complete
        self.scales_N = np.concatenate(scales_W) if complete else np.ones(len(self.terms))
        self.given_W = _gathered([part.given_PK for part in parts_W], first.copies)
        self.given = list({one_PK.tobytes(): one_PK for one_PK in self.given_W}.values())
        """The gradients without those that are equal in all bits."""
        self.axis = first.axis
        replicas_W = [part.replicas_PK for part in parts_W]
        self.replicas_PK = _gathered(replicas_W, first.copies)[0] if self.axis else None
        single = UNIT_ROUNDOFF["float32"]
        self.roundoff_P = np.array([UNIT_ROUNDOFF.get(t, single) for t in self.types])
        self.sketching_P = single * (4 + np.sqrt(first.elements_P / first.given_PK.shape[1]))
        """Bound of rounding on a sketch, over its norm ``[P]``."""
        self.product_rounding_P = 8 * (self.roundoff_P + single) + self.sketching_P
        """The same between a gradient and its product with a number ``[P]``."""

    @property
    def loss_factor(self) -> float:
        """The factor on the losses of a worker, with that of a gradient scaler."""
        return float(median(np.bincount(self.worker_N, np.abs(self.scales_N)).astype(np.float64)))

    def of_reduced(self, over: float = 1.0) -> "_Step":
        """Return the step with the gradients as the reduction left them, over a factor."""
        parts_W = [
            replace(part, given_PK=part.reduced_PK / np.float32(over)) for part in self.parts_W
        ]
        ends = np.cumsum(self.counts_W)[:-1]
        scales_W = np.split(self.scales_N, ends)
        return _Step(parts_W, scales_W, self.scheduled, self.clip_factor)

    def sum_of(self, factors_N: Floats) -> Floats:
        """Return the weighted sum of all micro-batches' gradients, float64 ``[P, k]``."""
        total: Floats = np.zeros(self.terms[0].shape)
        for factor, term_PK in zip(factors_N, self.terms, strict=True):
            if factor:
                total += factor * term_PK
        return total

    def bound_of(self, factors_N: Floats) -> Floats:
        """Return the bound of rounding on such a sum ``[P]``."""
        roundings = max(self.counts_W) + self.num_workers + 4
        sizes_P = np.abs(factors_N) @ self.norms_NP
        unsteady_NP = np.stack([part.unsteady_P for part in self.parts_W])[self.worker_N]
        bound_P: Floats = (roundings * self.roundoff_P + self.sketching_P) * sizes_P
        unsteady_P: Floats = 4 * np.abs(factors_N) @ unsteady_NP
        return bound_P + unsteady_P

    @cached_property
    def changes(self) -> tuple[float, Bools] | None:
        """The gradient's factor after the reduction, and which parameters have another ``[P]``.

        None if they are not known.
        """
        first = self.parts_W[0]
        if not all(len(part.reduced_PK) for part in self.parts_W):
            return None
        reduced_PK = _gathered([part.reduced_PK for part in self.parts_W], first.copies)[0]
        ratios_P = _ratios(self.given_W[0], reduced_PK)
        known_P = np.isfinite(ratios_P)
        factor = float(median(ratios_P[known_P])) if known_P.any() else 1.0
        far_P = _norms(self.given_W[0] - factor * reduced_PK)
        size_P = abs(factor) * _norms(reduced_PK)
        return factor, far_P > self.product_rounding_P * size_P


class _Reference:
    """The gradient of a single process, with one kind of weights."""

    def __init__(self, step: _Step, weighting: str, weights_N: Floats) -> None:
        self.step = step
        self.weighting = weighting
        self.weights_N = weights_N
        factors_N = weights_N / step.scales_N
        self.sum_PK = step.sum_of(factors_N)
        self.bound_P = step.bound_of(factors_N)
        self.norm_P = _norms(self.sum_PK)

    @cached_property
    def clear(self) -> Bools:
        """Which parameters' gradients have a direction beyond rounding ``[P]``."""
        clear_P: Bools = self.norm_P > _CLEAR * self.bound_P
        return clear_P if clear_P.any() else self.norm_P > _VISIBLE * self.bound_P

    @cached_property
    def factor(self) -> float:
        """The given gradient over the reference, for most parameters."""
        ratios_P = _ratios(self.step.given[0], self.sum_PK)
        clear_P = np.isfinite(ratios_P) & self.clear
        return float(median(ratios_P[clear_P])) if clear_P.any() else 1.0

    def distances(self, factor: float) -> Floats:
        """Return the given gradient's distance from a multiple, on the farthest worker ``[P]``."""
        far = [_norms(given_PK - factor * self.sum_PK) for given_PK in self.step.given]
        farthest_P: Floats = np.max(far, axis=0)
        return farthest_P

    def agreeing(self, factor: float) -> Bools:
        """Return which parameters agree with a multiple, within rounding ``[P]``."""
        agree_P: Bools = self.distances(factor) <= abs(factor) * self.bound_P
        return agree_P

    def describe(self, answer: ReferenceAnswer, *, factor: float, **more: object) -> Verification:
        """Return an answer with the largest difference from a multiple of the reference."""
        far_P = self.distances(factor)
        agree_P = self.agreeing(factor)
        relative_P = _over(far_P, abs(factor) * self.norm_P)
        among_P = agree_P if answer is ReferenceAnswer.PARAMETERS or agree_P.all() else ~agree_P
        clear_P = among_P & (self.norm_P > self.bound_P)
        at = int(np.argmax(np.where(clear_P if clear_P.any() else among_P, relative_P, -1.0)))
        return Verification(
            answer=answer,
            weighting=self.weighting,
            error=float(relative_P[at]),
            bound=float(_over(self.bound_P, self.norm_P)[at]),
            parameter=self.step.names[at],
            dtype=self.step.types[at],
            factor=factor,
            blur=float(median(_over(self.bound_P, self.norm_P))),
            num_parameters=len(self.step.names),
            changed=float("nan") if self.step.changes is None else self.step.changes[0],
            **more,  # type: ignore[arg-type]
        )


def _weightings(step: _Step, tokens_W: Sequence[Floats], meant: str | None) -> Mapping[str, Floats]:
    """Return the weights that may be intended, by name, each ``[N]``; all but sums add up to 1.

    ``backward``: those of the backward passes, if the loss is not known.
    ``worker``: each micro-batch of a worker counts alike, and each worker. ``tokens_of_worker``:
    each label token of a worker, and each worker. ``token``: each label token.
    """
    each_N = 1.0 / np.array(step.counts_W, np.float64)[step.worker_N]
    if not step.knows_scales:
        factor = step.parts_W[0].summed_workers * step.scheduled
        return {"backward": np.full(len(step.terms), factor / step.num_workers)}
    found = {"worker": each_N / step.num_workers}
    tokens_N = np.concatenate(tokens_W) if len(tokens_W) else np.empty(0)
    if len(tokens_N) == len(step.terms) and np.isfinite(tokens_N).all() and tokens_N.all():
        own_W = np.bincount(step.worker_N, tokens_N)
        if np.allclose(step.scales_N, tokens_N) and meant is None:
            found = {"sum": tokens_N / step.num_workers, **found}
        found["tokens_of_worker"] = tokens_N / own_W[step.worker_N] / step.num_workers
        found["token"] = tokens_N / tokens_N.sum()
    if meant == "token" and "token" in found:
        return {"token": found["token"]}
    if meant == "worker":
        found.pop("token", None)
    return found


def _find_agreement(reference: _Reference) -> Verification | None:
    if not reference.agreeing(1.0).all():
        return None
    return reference.describe(ReferenceAnswer.AGREES, factor=1.0)


def _find_factor(reference: _Reference) -> Verification | None:
    """Return an answer where all parameters have one factor."""
    factor = reference.factor
    if not factor or not reference.agreeing(factor).all():
        return None
    if _is_clipped(reference, factor):
        return reference.describe(ReferenceAnswer.AGREES, factor=factor, clipped=factor)
    reduced = _before_clipping(reference)
    before = None if reduced is None else _find_factor(reduced)
    return before or reference.describe(
        ReferenceAnswer.SCALE, factor=factor, in_loss=_is_in_loss(reference.step)
    )


def _before_clipping(reference: _Reference) -> _Reference | None:
    """Return the same with the reduced gradient, whose answer clipping hides; None without."""
    step = reference.step
    clips = all(part.clips for part in step.parts_W)
    if not clips or step.changes is None or abs(step.changes[0] - 1) <= _EQUAL:
        return None
    return _Reference(step.of_reduced(), reference.weighting, reference.weights_N)


def _is_clipped(reference: _Reference, factor: float) -> bool:
    """Return whether the gradient became smaller after a sound reduction."""
    step = reference.step
    if step.changes is None or not 0 < factor < 1:
        return False
    changed, _ = step.changes
    reduced = factor / changed  # over the reference
    if np.isclose(factor, step.clip_factor, rtol=_SAME):  # of what one process would compute
        return True
    sound = [1.0, step.loss_factor] if step.loss_factor >= LEAST_SCALER else [1.0]
    return abs(changed - 1) > 1e-6 and any(np.isclose(reduced, one, rtol=_SAME) for one in sound)


def _is_in_loss(step: _Step) -> bool:
    """Return whether the reduction gave the mean of the backward passes' gradients."""
    summed = step.parts_W[0].summed_workers * step.scheduled
    alike_N = step.scales_N * summed / step.num_workers
    return bool(_Reference(step, "backward", alike_N).agreeing(1.0).all())


def _find_held(reference: _Reference) -> Verification | None:
    """Return an answer where the reduced gradient agrees, and some of it was taken back after that.

    A layer may be held back, on all workers. And each parameter may be clipped by its own norm: no
    two such factors are the same.
    """
    step = reference.step
    if step.changes is None:
        return None
    if all(part.clips_value for part in step.parts_W):
        return _find_cut(reference)
    reduced = step.of_reduced()
    sound = _find_agreement(_Reference(reduced, reference.weighting, reference.weights_N))
    given_PK = step.given_W[0]
    if sound is None or len(step.given) > 1:
        return None
    ratios_P = _ratios(given_PK, reduced.given_W[0])
    size_P = _norms(reduced.given_W[0])
    far_P = _norms(given_PK - np.nan_to_num(ratios_P)[:, None] * reduced.given_W[0])
    if (
        (far_P > step.product_rounding_P * size_P).any()
        or (ratios_P > 1 + _EQUAL).any()
        or (ratios_P < 0).any()
    ):
        return None
    held_P = (size_P > 0) & ~given_PK.any(axis=1)
    others = ratios_P[(size_P > 0) & ~held_P & (ratios_P < 1 - _EQUAL)]
    if len(others) and len(np.unique(np.round(others / _EQUAL))) < _FACTORS:
        return None
    held = tuple(name for name, one in zip(step.names, held_P, strict=True) if one)
    return replace(sound, held=held, shrunk=tuple(map(float, others)))


def _find_cut(reference: _Reference) -> Verification | None:
    """Return an answer where the reduced gradient agrees, and torch clipped its elements.

    No norm may grow then. Where the reduced gradient has a factor of the loss, a scaler's it is if
    a gradient that was not clipped has lost it.
    """
    step = reference.step
    given_PK = step.given_W[0]
    for over in dict.fromkeys((1.0, step.loss_factor)):
        reduced = step.of_reduced(over)
        sound = _find_agreement(_Reference(reduced, reference.weighting, reference.weights_N))
        reduced_PK = reduced.given_W[0]
        size_P = _norms(reduced_PK)
        left_P = _norms(given_PK - reduced_PK) <= step.product_rounding_P * size_P
        if (
            sound is not None
            and len(step.given) == 1
            and (_norms(given_PK) <= _MOST_GROWN * size_P).all()
            and (over == 1 or over >= LEAST_SCALER or left_P.any())
        ):
            return replace(sound, by_value=True)
    return None


def _find_summed(reference: _Reference) -> Verification | None:
    """Return an answer where the reduced gradient agrees, and few parameters changed after that.

    Stages of a pipeline that hold copies of one weight sum its gradients then.
    """
    step = reference.step
    if step.changes is None or len(step.given) > 1:
        return None
    reduced = step.of_reduced()
    sound = _find_agreement(_Reference(reduced, reference.weighting, reference.weights_N))
    changed_P = step.changes[1]
    if sound is None or not 0 < 4 * changed_P.sum() <= len(changed_P):
        return None
    names = tuple(name for name, one in zip(step.names, changed_P, strict=True) if one)
    return replace(sound, summed=names)


def _find_odd(reference: _Reference) -> Verification | None:
    """Return an answer where at least half of the parameters agree."""
    for factor in dict.fromkeys((1.0, reference.factor)):
        agree_P = reference.agreeing(factor)
        clear_P = reference.clear
        if factor and 2 * (agree_P & clear_P).sum() >= max(clear_P.sum(), 1):
            places = np.flatnonzero(~agree_P).tolist()
            odd = tuple(_odd_parameter(reference, at, factor) for at in places)
            return reference.describe(ReferenceAnswer.PARAMETERS, factor=factor, odd=odd)
    return None


def _find_unreduced(reference: _Reference) -> Verification | None:
    """Return an answer where every worker holds its own gradient."""
    step = reference.step
    if len(step.given) == 1:
        return None
    odd = tuple(_odd_parameter(reference, at, 1.0) for at in range(len(step.names)))
    if any(one.how is not GradientMismatch.NOT_REDUCED for one in odd):
        return None
    return reference.describe(ReferenceAnswer.PARAMETERS, factor=1.0, odd=odd)


def _odd_parameter(reference: _Reference, at: int, factor: float) -> OddParameter:
    step = reference.step
    bound = abs(factor) * float(reference.bound_P[at])
    whole_K = factor * reference.sum_PK[at]
    given_WK = [given_PK[at] for given_PK in step.given_W]
    afterwards = step.changes is not None and bool(step.changes[1][at])
    ratio = float(_ratios(given_WK[0][None], whole_K[None])[0])
    far = max(float(np.linalg.norm(given_K - whole_K)) for given_K in given_WK)
    error = float(_over(np.array([far]), np.array([np.linalg.norm(whole_K)]))[0])

    def fits(expected_WK: Sequence[Floats]) -> bool:
        pairs = zip(given_WK, expected_WK, strict=True)
        return all(np.linalg.norm(given_K - own_K) <= 2 * step.num_workers * bound
                   for given_K, own_K in pairs)  # fmt: skip

    how = GradientMismatch.CHANGED
    own_ratio = float("nan")
    axis = ""
    if not any(given_K.any() for given_K in given_WK):
        how = GradientMismatch.MISSING
    elif len(given_WK) > 1 and fits(_own_gradients(reference, at, factor)):
        how = GradientMismatch.NOT_REDUCED
    elif _is_partial(reference, at, whole_K, ratio):
        how = GradientMismatch.PARTIAL
        axis = step.axis
    elif np.isfinite(ratio) and fits([ratio * whole_K] * len(given_WK)):
        how = GradientMismatch.SCALE
        own_ratio = ratio
    return OddParameter(step.names[at], how, own_ratio, error, afterwards, axis)


def _is_partial(reference: _Reference, at: int, whole_K: Floats, ratio: float) -> bool:
    """Return whether a parameter's gradient is the sum of its parts on ranks along another axis.

    A multiple of the whole gradient on each of them may sum up to it by chance.
    """
    step = reference.step
    if step.replicas_PK is None:
        return False
    far = np.linalg.norm(step.replicas_PK[at] - whole_K)
    from_multiple = np.linalg.norm(step.given_W[0][at] - ratio * whole_K)
    bound = 2 * step.num_workers * np.linalg.norm(whole_K) * reference.bound_P[at]
    return bool(far * reference.norm_P[at] <= bound and 2 * far < from_multiple)


def _own_gradients(reference: _Reference, at: int, factor: float) -> list[Floats]:
    """Return each worker's own gradient of a parameter, without a reduction."""
    step = reference.step
    factors_N = factor * step.num_workers * reference.weights_N / step.scales_N
    own_WK = [np.zeros(len(reference.sum_PK[at])) for _ in step.parts_W]
    for rank, each, term_PK in zip(step.worker_N, factors_N, step.terms, strict=True):
        own_WK[rank] += each * term_PK[at]
    return own_WK


def _find_weights(reference: _Reference) -> Verification | None:
    """Return an answer where other weights of the micro-batches explain the given gradient."""
    reduced = _before_clipping(reference)
    if reduced is not None:
        return _find_weights(reduced)
    step = reference.step
    factors_N, errors_N = _fit(step)
    fitted = _Reference(step, reference.weighting, factors_N * step.scales_N)
    if not np.all(fitted.distances(1.0) <= 2 * fitted.bound_P + reference.bound_P):
        return None
    to_ratios_N = step.scales_N / reference.weights_N
    ratios_N = factors_N * to_ratios_N
    unsure_N = errors_N * np.abs(to_ratios_N)
    if not np.all(unsure_N < _UNCLEAR):
        return None
    absent_N = np.abs(ratios_N) <= np.maximum(_EQUAL, 4 * unsure_N)
    ratios_N = np.where(absent_N, 0.0, ratios_N)
    present_N = ratios_N[~absent_N]
    alike = len(present_N) and np.ptp(present_N) <= _EQUAL * abs(median(present_N))
    missing = bool(absent_N.any() and alike)
    ends = np.cumsum(step.counts_W)[:-1]
    return reference.describe(
        ReferenceAnswer.MICRO_BATCHES if missing else ReferenceAnswer.WEIGHTING,
        factor=float(median(present_N)) if missing else 1.0,
        in_loss=_is_in_loss(step),
        ratios=tuple(tuple(map(float, worker)) for worker in np.split(ratios_N, ends)),
    )


def _fit(step: _Step) -> tuple[Floats, Floats]:
    """Return the least-squares factors of all terms in the given gradient, and their errors."""
    given_PK = step.given[0]
    products_NN = np.zeros((len(step.terms),) * 2)
    towards_N = np.zeros(len(step.terms))
    for at, given_K in enumerate(given_PK):
        terms_NK = np.stack([term_PK[at] for term_PK in step.terms]).astype(np.float64)
        products_NN += terms_NK @ terms_NK.T
        towards_N += terms_NK @ given_K
    size_N = np.sqrt(np.maximum(np.diag(products_NN), np.finfo(np.float64).tiny))
    inverse_NN = np.linalg.pinv(products_NN / np.outer(size_N, size_N), rcond=1e-13)
    factors_N: Floats = inverse_NN @ (towards_N / size_N) / size_N
    rest = float(np.square(given_PK - step.sum_of(factors_N)).sum())
    per_number = rest / max(given_PK.size - len(factors_N), 1)
    errors_N: Floats = np.sqrt(np.maximum(np.diag(inverse_NN), 0.0) * per_number) / size_N
    return factors_N, errors_N


def _distance_from_sums(step: _Step) -> float:
    """Return how far the gradient is from any weighted sum; 0 where the workers' differ."""
    if len(step.given) > 1:
        return 0.0
    factors_N, _ = _fit(step)
    far = np.linalg.norm(step.given[0] - step.sum_of(factors_N))
    return float(far / max(np.linalg.norm(step.given[0]), np.finfo(np.float64).tiny))


def _simplicity(found: Verification) -> tuple[bool, int, float]:
    """Return the sort key of an answer: the one with the fewest different weights is best."""
    kinds = {round(ratio / _EQUAL) for ratios in found.ratios for ratio in ratios}
    return found.answer is ReferenceAnswer.WEIGHTING, len(kinds) + len(found.odd), found.error


def _gathered(parts_W: Sequence[Floats32], copies: int) -> list[Floats]:
    """Return the gradient of each worker; if they hold shards, the one of all.

    A parameter whose gradient one worker alone has is that worker's to update.
    """
    wide_W = [part_PK.astype(np.float64) for part_PK in parts_W]
    if copies >= len(parts_W):
        of_one_P = np.count_nonzero([part_PK.any(axis=1) for part_PK in wide_W], axis=0) == 1
        for own_PK in wide_W if of_one_P.any() else ():
            own_PK[of_one_P] = sum(part_PK[of_one_P] for part_PK in parts_W)
        return wide_W
    return [sum(wide_W, start=np.zeros(wide_W[0].shape)) / copies]


def _norms(values_PK: NDArray[np.floating]) -> Floats:
    norms_P: Floats = np.sqrt(np.square(values_PK, dtype=np.float64).sum(axis=1))
    return norms_P


def _ratios(given_PK: NDArray[np.floating], reference_PK: NDArray[np.floating]) -> Floats:
    """Return the least-squares factor of each parameter's reference; NaN if that is 0."""
    reference_PK = reference_PK.astype(np.float64)
    squares_P = np.square(reference_PK).sum(axis=1)
    products_P = (given_PK * reference_PK).sum(axis=1)
    return np.where(squares_P > 0, products_P / np.where(squares_P > 0, squares_P, 1.0), np.nan)


def _over(values: Floats, sizes: Floats) -> Floats:
    """Return ratios; 0 / 0 is 0, and x / 0 is infinity."""
    safe = np.where(sizes > 0, sizes, 1.0)
    return np.where(sizes > 0, values / safe, np.where(values > 0, np.inf, 0.0))


def missing_by_worker(ratios: Sequence[Sequence[float]]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each worker that lacks micro-batches, and their numbers.

    Example:
        >>> list(missing_by_worker([[0.0, 0.0, 1.0], [1.0, 1.0, 1.0]]))
        [(0, (0, 1))]
    """
    for rank, of_worker in enumerate(ratios):
        absent = tuple(micro for micro, ratio in enumerate(of_worker) if not ratio)
        if absent:
            yield rank, absent
