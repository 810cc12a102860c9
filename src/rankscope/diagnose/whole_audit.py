"""The audit of the whole gradient at once, where its groups are not audited."""

from collections import deque
from collections.abc import Iterable

import numpy as np

from rankscope.core.finding import Severity
from rankscope.core.state import Stateful
from rankscope.diagnose.evidence import Evidence
from rankscope.diagnose.rules import count, name_ranks

STEPS = 16
"""Observed steps that must agree."""

ROUNDED = 1e-4
"""Relative error from which a reduction is not one in single precision."""

SPIKE = 100.0
"""Times the usual error, from which a single step is told."""

_LEAST_SPIKE = 2e-5
_TYPES = {"float16": (1.5e-4, 1.2e-3), "bfloat16": (1.2e-3, 1e-2)}


class WholeAudit(Stateful):
    """Single steps far off a run's own level, and reductions less exact than single precision.

    A whole gradient may be of any size, and with its size the residual of its sketch grows. So
    single steps are judged by the run's past.

    Args:
        num_workers: W.
    """

    SETTINGS = ("_num_workers",)

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._residuals: deque[float] = deque(maxlen=STEPS)
        self._found: dict[str, list[int]] = {}

    def observe(self, step: int, residual: float) -> Iterable[Evidence]:
        """Take one observed step's residual; NaN if it is not known."""
        if not np.isfinite(residual):
            return
        before = np.array(self._residuals)
        self._residuals.append(residual)
        usual = float(np.median(before)) if len(before) else 0.0
        limit = max(SPIKE * usual, _LEAST_SPIKE)
        if len(before) >= STEPS // 2 and residual > limit:
            against = f"usually {usual:.1g}"
            yield self._tell("reduction-spike", step, residual, limit, against)
            return
        lasting = np.array(self._residuals)
        if len(lasting) == STEPS and (lasting > ROUNDED).all():
            typical = float(np.median(lasting))
            fits = [t for t, (least, most) in _TYPES.items() if least <= typical <= most]
            key = "numerics.reduction_error" if fits else "reduction-lossy"
            yield self._tell(key, step, typical, ROUNDED, fits=" or ".join(fits))

    def _tell(
        self, key: str, step: int, residual: float, limit: float, against: str = "", fits: str = ""
    ) -> Evidence:
        sudden = key == "reduction-spike"
        begun = [step, 0] if sudden else [max(step - STEPS + 1, 0), STEPS - 1]
        first, steps = self._found.setdefault(key, begun)
        self._found[key][1] = steps + 1
        ranks = tuple(range(self._num_workers))
        return Evidence(
            cause="numerics.reduction_error",
            key=key,
            severity=Severity.ERROR if sudden else Severity.WARNING,
            ranks=ranks,
            first_step=first,
            last_step=step,
            count=steps + 1,
            fields={
                "where": "all parameters together",
                "who": name_ranks(ranks),
                "first": first,
                "residual": f"{residual:.2g}",
                "against": against,
                "steps": count(steps + 1, "audited step"),
                "fits": fits,
                "meant": "float32",
            },
            numbers={"residual": residual, "limit": limit, "steps": steps + 1, "fits": fits},
        )
