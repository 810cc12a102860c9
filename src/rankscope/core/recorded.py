"""What a run's tables hold of a step: the view that detectors get, live and offline alike.

A live step holds more than its record does: sketches, cosines in double precision, the one
micro-batch of a step without accumulation. A detector that used those could not be asked again
later. So :func:`as_recorded` reduces a step to its record before any detector sees it.
"""

from dataclasses import replace

import numpy as np

from rankscope.core.arrays import Floats
from rankscope.core.direction import from_upper_triangle, upper_triangle
from rankscope.core.step import GatheredStep, StepReport

MAX_PAIRED_WORKERS = 64
"""Workers up to which the cosines of all pairs are recorded: 2,016 pairs, 8 kB a step."""


def as_recorded(report: StepReport) -> StepReport:
    """Return a step with the bits that come back from its record; without effect on such a step.

    Without sketches and inner products; cosines rounded to float32, up to 64 workers; micro-batches
    only where some worker had two or more, and their norms only if some were measured; groups only
    if there are two or more.
    """
    gathered = report.gathered
    groups, micro = _has_groups(gathered), has_micro_batches(gathered)
    return replace(
        report,
        gathered=_gathered(gathered, groups=groups, micro=micro),
        cosines_WW=_rounded(report.cosines_WW),
        group_cosine_rest_WG=_unless_unknown(report.group_cosine_rest_WG) if groups else None,
    )


def has_micro_batches(step: GatheredStep) -> bool:
    """Return whether some worker had two or more micro-batches."""
    return max(map(len, step.micro_losses), default=0) >= 2


def _gathered(step: GatheredStep, *, groups: bool, micro: bool) -> GatheredStep:
    return replace(
        step,
        sketches_WK=None,
        group_sketches_WGK=None,
        gram_WW=None,
        reduced_copies=1,
        consensus=None,
        groups_in_turn=None,
        trace=None,
        groups=step.groups if groups else (),
        group_norms_WG=step.group_norms_WG if groups else None,
        residuals_WG=_unless_unknown(step.residuals_WG) if groups else None,
        total_residuals_W=None,
        reduced_products_W=None,
        micro_losses=step.micro_losses if micro else (),
        micro_weights=step.micro_weights if micro else (),
        micro_norms=known_micro_norms(step) if micro else (),
        micro_scales=_unless_all_unknown(step.micro_scales) if micro else (),
    )


def _has_groups(step: GatheredStep) -> bool:
    return step.group_norms_WG is not None and len(step.groups) >= 2


def known_micro_norms(step: GatheredStep) -> tuple[Floats, ...]:
    """Return the norms beside the micro-batches' losses; empty when none is known."""
    if not has_micro_batches(step):
        return ()
    norms = step.micro_norms
    beside = [len(worker) for worker in norms] == [len(worker) for worker in step.micro_losses]
    return _unless_all_unknown(norms) if beside else ()


def _unless_all_unknown(values: tuple[Floats, ...]) -> tuple[Floats, ...]:
    return values if values and not np.isnan(np.concatenate(values)).all() else ()


def _rounded(cosines_WW: Floats | None) -> Floats | None:
    if cosines_WW is None or not 2 <= len(cosines_WW) <= MAX_PAIRED_WORKERS:
        return None
    return from_upper_triangle(upper_triangle(cosines_WW).astype(np.float32), len(cosines_WW))


def _unless_unknown(values: Floats | None) -> Floats | None:
    return None if values is None or np.isnan(values).all() else values
