"""The user's declarations: how much is compared, and the plan of the run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from enum import StrEnum
from numbers import Integral, Real
from typing import Any

from rankscope.errors import UsageError


class Tier(StrEnum):
    """What ``watch`` measures of the gradients' directions.

    P parameters, W workers, G groups, k sketch width.
    """

    SCALARS = "scalars"
    """Norms of local and reduced gradients. One read of each, a few numbers per worker and group.
    Exact: norms, the mean cosine weighted by the norms and, under DDP without bucket views, each
    worker's cosine with the sum of all others, for one more read of both. No pairs, no groups."""
    SKETCH = "sketch"
    """Norms, and a sketch of k floats per worker and 251 per group. One read of the gradient.
    Norms are exact; every pair's cosine errs by about (1 − cos²)/√k, a group's by the same with
    251."""


LOSS_WEIGHTINGS = ("token", "worker")
RANDOM = ("same", "different")


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run; everything is optional.

    ::

        Plan.of({"loss_weighting": "token", "learning_rate": [1e-4, 2e-4, 2e-4], "seed": 42})

    Attributes:
        loss_weighting: ``"token"``: every label token of the global batch counts alike;
            ``"worker"``: every worker's mean loss counts alike. None: unspecified.
        learning_rate: Of the optimizer's first parameter group: a number, or one for each call
            of ``optimizer.step``, the last of which holds on. None: unspecified.
        random: Whether the workers are meant to draw the ``"same"`` random numbers in their
            forward passes and data loaders, or ``"different"`` ones. None means different.
        local_buffers: Whether each worker is meant to keep buffers of its own, such as the running
            statistics of batch normalisation.
        repeats: Whether samples are repeated on purpose: between workers, or within an epoch.
        seed: With which every rank's sampler is meant to shuffle; it is compared where the
            training's data loader is given. None: unspecified.
        samples: How many samples the data set has: an epoch is meant to draw them all. None:
            unspecified.
        local_steps: Optimizer steps from one average of the workers' parameters to the next, in
            local SGD, DiLoCo and their like: between averages parameters are meant to differ. None:
            every step's gradients are reduced.
        replicated: Whether all parameters are meant to be equal on all workers, including those
            that the wrapper is configured not to reduce.
        max_norm: The norm to which the gradients of all parameters together are meant to be
            clipped. None: the calls of torch's ``clip_grad_norm_`` count.
        independent: Whether groups of ranks that never meet in a reduction are trainings of their
            own, such as those of an ensemble or a sweep.
    """

    loss_weighting: str | None = None
    learning_rate: float | tuple[float, ...] | None = None
    random: str | None = None
    repeats: bool = False
    local_buffers: bool = False
    seed: int | None = None
    samples: int | None = None
    local_steps: int | None = None
    replicated: bool = False
    max_norm: float | None = None
    independent: bool = False

    @classmethod
    def of(cls, given: "Plan | Mapping[str, Any] | None") -> "Plan":
        """Return the plan that a user gave, or that :meth:`to_json` returned.

        Raises:
            UsageError: An entry has no such name, or a value that cannot be meant.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        if not isinstance(given, Mapping):
            raise UsageError(f"plan expected a dict, got {type(given).__name__}")
        known = list(cls.__slots__)
        unknown = [name for name in given if name not in known]
        if unknown:
            near = get_close_matches(unknown[0], known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"plan has entries {', '.join(known)}; got {unknown[0]!r}{hint}")
        return cls(**{name: _CHECKS[name](name, value) for name, value in given.items()})

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        entries = asdict(self)
        if isinstance(self.learning_rate, tuple):
            entries["learning_rate"] = list(self.learning_rate)
        return entries


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"plan's {name} must be True or False, got {value!r}")
    return value


def _whole(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"plan's {name} must be a whole number, got {value!r}")
    return int(value)


def _positive(name: str, value: Any) -> int | None:
    number = _whole(name, value)
    if number is not None and number < 1:
        raise UsageError(f"plan's {name} must be at least 1, got {number}")
    return number


def _norm(name: str, value: Any) -> float | None:
    if value is not None and not (_is_rate(value) and float(value)):
        raise UsageError(f"plan's {name} must be a number above 0, got {value!r}")
    return None if value is None else float(value)


def _choice(name: str, value: Any) -> str | None:
    known = {"loss_weighting": LOSS_WEIGHTINGS, "random": RANDOM}[name]
    if value is not None and value not in known:
        choices = " or ".join(map(repr, known))
        raise UsageError(f"plan's {name} must be {choices}, got {value!r}")
    return None if value is None else str(value)


def _rates(name: str, given: Any) -> float | tuple[float, ...] | None:
    if given is None:
        return None
    several = isinstance(given, Sequence) and not isinstance(given, str)
    rates = list(given) if several else [given]
    wrong = [rate for rate in rates if not _is_rate(rate)]
    if wrong or not rates:
        got = repr(wrong[0]) if wrong else "an empty list"
        raise UsageError(
            f"plan's {name} must be a number of at least 0, or a list with one for each "
            f"call of optimizer.step, got {got}"
        )
    return tuple(map(float, rates)) if several else float(given)


def _is_rate(rate: object) -> bool:
    if isinstance(rate, bool) or not isinstance(rate, Real):
        return False
    return math.isfinite(rate) and float(rate) >= 0


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "loss_weighting": _choice,
    "learning_rate": _rates,
    "random": _choice,
    "repeats": _flag,
    "local_buffers": _flag,
    "seed": _whole,
    "samples": _positive,
    "local_steps": _positive,
    "replicated": _flag,
    "max_norm": _norm,
    "independent": _flag,
}
