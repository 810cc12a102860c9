"""One worker's share of a reference step, and its bytes on the wire.

Legend of shapes: W workers, M micro-batches of one worker, P parameters, k numbers in a sketch.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from rankscope.bus.shares import Packable
from rankscope.evidence.reference.slopes import Slopes
from rankscope.stats.arrays import Floats, Floats32

WIDTHS = (251, 127, 61, 31)
"""Widths of sketches, primes; the first one whose sketches may be sent is used."""

MOST_BYTES = 12 << 20
"""The most bytes of one worker's share."""

MOST_BYTES_OF_ALL = 256 << 20
"""The most bytes of all workers' shares."""

_NO_TERMS: Any = partial(np.empty, (0, 0, 1), np.float32)
_NO_NORMS: Any = partial(np.empty, (0, 0))
_NO_ROWS: Any = partial(np.empty, (0, 1), np.float32)
_NOTHING: Any = partial(np.empty, 0)


def width_for(num_parameters: int, num_micro: int, num_workers: int) -> int:
    """Return the width of a step's sketches; 0 if none may be sent.

    Example:
        >>> width_for(num_parameters=200, num_micro=4, num_workers=8)
        251
        >>> width_for(num_parameters=1000, num_micro=64, num_workers=8)
        31
    """
    rows = max(num_parameters * (num_micro + 2), 1)
    most = min(MOST_BYTES, MOST_BYTES_OF_ALL // num_workers)
    return next((width for width in WIDTHS if 4 * width * rows <= most), 0)


@dataclass(frozen=True, slots=True)
class ReferenceShare(Packable):
    """One worker's part of a reference step: sketches of gradients.

    If ranks along another axis share the parameters, one of the two computations of the last
    micro-batch rounds otherwise, and ``replicas_PK`` are sums over these ranks for parameters that
    each of them holds whole, 0 for the rest; ``[0, k]`` without such an axis.
    """

    names: tuple[str, ...] = ()
    types: tuple[str, ...] = ()  # their types ``[P]``, such as ``float32``
    elements_P: Floats = field(default_factory=_NOTHING)  # of each whole parameter
    terms_MPK: Floats32 = field(default_factory=_NO_TERMS)  # of each micro-batch, computed again
    norms_MP: Floats = field(default_factory=_NO_NORMS)  # their norms, not estimated
    given_PK: Floats32 = field(default_factory=_NO_ROWS)  # of ``.grad`` at the optimizer's call
    reduced_PK: Floats32 = field(default_factory=_NO_ROWS)  # when reduced; ``[0, k]`` if unknown
    unsteady_P: Floats = field(default_factory=_NOTHING)  # norm between two of the last one
    replicas_PK: Floats32 = field(default_factory=_NO_ROWS)  # sums of ``given_PK`` over the axis
    copies: int = 1  # workers that hold each element; if fewer than W, shards add up
    summed_workers: float = 1.0  # 1 for a mean, W for a sum
    axis: str = ""  # along which ranks share the parameters; empty without
    clips: bool = False  # torch clipped gradients in the step, before the optimizer's call
    clips_value: bool = False  # each element of theirs
    declined: str = ""  # the reason why all of this is missing; empty if it is not
    slopes: Slopes | None = None  # which all ranks have measured instead; None without
    digests: Mapping[str, int] = field(default_factory=dict)  # where workers hold all parameters
    roots_M: tuple[float, ...] = ()  # what backward was called on; empty if unknown
    loss_outside: bool = False  # the model returns no loss: the gradients of its outputs are kept
    loss_slopes: Slopes | None = None  # of a loss outside of the model that exchanges tensors
    loss_unchecked: str = ""  # why such a loss was not run again; empty if it was, or is no such

    def without(self, names: Container[str]) -> "ReferenceShare":
        """Return the share without some parameters; with all of them, if it has no other."""
        kept = [number for number, name in enumerate(self.names) if name not in names]
        if len(kept) in (0, len(self.names)):
            return self
        return replace(
            self,
            names=tuple(self.names[number] for number in kept),
            types=tuple(self.types[number] for number in kept),
            elements_P=self.elements_P[kept],
            terms_MPK=self.terms_MPK[:, kept],
            norms_MP=self.norms_MP[:, kept],
            given_PK=self.given_PK[kept],
            reduced_PK=self.reduced_PK[kept] if len(self.reduced_PK) else self.reduced_PK,
            unsteady_P=self.unsteady_P[kept],
            replicas_PK=self.replicas_PK[kept] if len(self.replicas_PK) else self.replicas_PK,
        )

    @property
    def fits(self) -> bool:
        """Whether the shapes of the arrays fit each other."""
        if self.loss_slopes is not None and not self.loss_slopes.fits:
            return False
        if self.slopes is not None:
            return self.slopes.fits
        if self.declined:
            return True
        if self.terms_MPK.ndim != 3 or not len(self.terms_MPK):
            return False
        count, num_parameters, width = self.terms_MPK.shape
        return (
            self.copies >= 1
            and num_parameters == len(self.names) == len(self.types) == len(self.unsteady_P)
            and self.elements_P.shape == (num_parameters,)
            and self.norms_MP.shape == (count, num_parameters)
            and self.given_PK.shape == (num_parameters, width)
            and self.reduced_PK.shape in ((num_parameters, width), (0, width))
            and self.replicas_PK.shape in ((num_parameters, width), (0, width))
        )
