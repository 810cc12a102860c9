"""Parameters that ranks hold alike along an axis of a device mesh over which nothing is averaged.

Along a tensor-, context- or expert-parallel axis, some parameters are cut, others are replicated.
Only equal gradients keep replicas equal: if each rank computes a part of the gradient, the parts
have to be summed. A missing sum raises no error, and averaging over the data-parallel axis does not
repair it.

Legend of shapes: N parameters, k numbers in a sketch, T ranks along an axis.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.packing import PackedError, pack_arrays, unpack_arrays
from rankscope.bus.replicas import minority_ranks
from rankscope.stats.arrays import Floats, Floats32, Ints
from rankscope.stats.rounding import tolerance_of

_ARRAYS: Mapping[str, type[np.generic]] = {
    "over_NA": np.uint8,
    "digests_2N": np.int64,
    "norms_2N": np.float64,
    "sketches_2NK": np.float32,
}
_HELD = 1
_PLACED = 2


@dataclass(frozen=True, slots=True)
class AxisPart:
    """One rank's readings, in one step, of parameters that other ranks hold as well. A axes."""

    rank: int
    axes: Mapping[str, tuple[int, ...]]  # ranks of the job along each, this one among them
    layout: int  # digest of the names, shapes and placements of all of its parameters
    cut: tuple[str, ...]  # axes over which some of them are cut
    names: tuple[str, ...]
    types: tuple[str, ...]  # coarsest type in which each one's gradient is computed ``[N]``
    over_NA: NDArray[np.uint8]  # 0 cut over an axis, 1 whole on each rank, 2 stated by placement
    digests_2N: Ints  # of parameters before the step, and of gradients when applied
    norms_2N: Floats  # L2 norms of the same; NaN where there is none
    sketches_2NK: Floats32  # linear sketches of the same
    shared: tuple[str, ...] | None = None  # along pipeline stages: weights that they surely share

    def pack(self) -> bytes:
        """Return its bytes: JSON, and arrays behind it."""
        header = {
            "rank": self.rank,
            "axes": {name: list(ranks) for name, ranks in self.axes.items()},
            "layout": self.layout,
            "cut": list(self.cut),
            "shared": None if self.shared is None else list(self.shared),
            "names": list(self.names),
            "types": list(self.types),
        }
        arrays = [np.asarray(getattr(self, name), dtype) for name, dtype in _ARRAYS.items()]
        return pack_arrays(header, arrays)

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> "AxisPart":
        """Read a part; its arrays are views of ``content``."""
        header, arrays = unpack_arrays(content)
        if [array.dtype for array in arrays] != [np.dtype(dtype) for dtype in _ARRAYS.values()]:
            raise PackedError("expected the arrays of a part of a mesh")
        try:
            found = dict(zip(_ARRAYS, arrays, strict=True))
            part = cls(
                int(header["rank"]),
                {str(name): tuple(map(int, ranks)) for name, ranks in header["axes"].items()},
                int(header["layout"]),
                tuple(map(str, header["cut"])),
                tuple(map(str, header["names"])),
                tuple(map(str, header["types"])),
                shared=None if header["shared"] is None else tuple(map(str, header["shared"])),
                **found,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PackedError(f"these bytes hold no part of a mesh ({error})") from error
        count = len(part.names)
        fits = (
            len(part.types) == count
            and part.over_NA.shape == (count, len(part.axes))
            and part.digests_2N.shape == part.norms_2N.shape == (2, count)
            and part.sketches_2NK.ndim == 3
            and part.sketches_2NK.shape[:2] == (2, count)
        )
        if not fits:
            raise PackedError("these bytes hold a part of a mesh whose arrays do not fit together")
        return part


@dataclass(frozen=True, slots=True)
class Replicated:
    """One parameter on the ranks along an axis."""

    name: str
    ranks: tuple[int, ...]  # the ranks of the job along the axis ``[T]``
    placed: bool  # its placement is replicated; else it is a plain tensor
    cuts: bool  # the axis cuts other parameters, so that the ranks share one model
    parameter: float  # distance of the ranks' values before the step, relative to its norm
    gradient: float  # the same of the gradient at the optimizer's call; NaN if unknown
    odd: tuple[int, ...]  # the ranks that differ from most; all where no majority agrees
    tolerance: float  # distance that rounding may explain
    held: bool = True  # the ranks hold some elements: a shard of a small one may be empty
    same: bool = True  # the ranks' values before the step are the same in all bits
    digest: int = 0  # of the first rank's values
    factor: float = math.nan  # farthest rank's gradient over the first's; NaN if no multiple

    @property
    def parameter_differs(self) -> bool:
        """Whether its values differ by more than rounding explains."""
        return self.parameter > self.tolerance

    @property
    def gradient_differs(self) -> bool:
        """Whether its gradients differ by more than rounding explains."""
        return self.gradient > self.tolerance


def compare_along(axis: str, parts_T: Sequence[AxisPart]) -> list[Replicated]:
    """Return the parameters that are not cut over an axis, compared between its ranks ``[T]``.

    None if the ranks' models differ, as those of pipeline stages do.
    """
    first = parts_T[0]
    if any(part.layout != first.layout or part.names != first.names for part in parts_T):
        return []
    column = list(first.axes).index(axis)
    cuts = axis in first.cut
    return [
        _compare(name, number, parts_T, placed=first.over_NA[number, column] == _PLACED, cuts=cuts)
        for number, name in enumerate(first.names)
        if first.over_NA[number, column]
    ]


def _compare(
    name: str, number: int, parts_T: Sequence[AxisPart], *, placed: bool, cuts: bool
) -> Replicated:
    apart: list[float] = []
    factor = math.nan
    tolerance = max(tolerance_of(part.types[number]) for part in parts_T)
    differing: tuple[int, ...] = ()
    held = False
    for what in (0, 1):
        norms_T = np.array([part.norms_2N[what, number] for part in parts_T])
        digests_T = [int(part.digests_2N[what, number]) for part in parts_T]
        sketches_TK = np.array([part.sketches_2NK[what, number] for part in parts_T], np.float64)
        apart.append(_apart(digests_T, norms_T, sketches_TK))
        held |= bool((norms_T != 0).any())
        differing = minority_ranks(digests_T) or differing  # of the gradient, where it differs
        factor = _factor(sketches_TK, tolerance)
    values = [int(part.digests_2N[0, number]) for part in parts_T]
    return Replicated(
        name=name,
        ranks=tuple(part.rank for part in parts_T),
        placed=placed,
        cuts=cuts,
        parameter=apart[0],
        gradient=apart[1],
        odd=tuple(parts_T[at].rank for at in differing),
        tolerance=tolerance,
        held=held,
        same=len(set(values)) == 1,
        digest=values[0],
        factor=factor,
    )


def _apart(digests_T: Sequence[int], norms_T: Floats, sketches_TK: Floats) -> float:
    """Return the largest distance from the first rank's, relative to the largest norm.

    Infinite where some rank has none; NaN where no rank has one, or some are not finite.
    """
    missing_T = np.isnan(norms_T)
    if missing_T.any() or not np.isfinite(norms_T).all():
        return math.inf if 0 < missing_T.sum() < len(norms_T) else math.nan
    if len(set(digests_T)) == 1 or not norms_T.max():
        return 0.0
    distances_T = np.linalg.norm(sketches_TK - sketches_TK[0], axis=1)
    return float(distances_T.max() / norms_T.max())


def _factor(sketches_TK: Floats, tolerance: float) -> float:
    """Return the farthest rank's value over the first one's; NaN if it is no multiple of it."""
    first_K = sketches_TK[0]
    square = float(first_K @ first_K)
    far_K = sketches_TK[int(np.linalg.norm(sketches_TK - first_K, axis=1).argmax())]
    if not (0 < square < math.inf and np.isfinite(far_K).all()):
        return math.nan
    factor = float(first_K @ far_K) / square
    rest = float(np.linalg.norm(far_K - factor * first_K))
    return factor if rest <= tolerance * float(np.linalg.norm(far_K)) else math.nan


def over_axes(placements: Mapping[str, bool], axes: Sequence[str]) -> list[int]:
    """Return a parameter's row of ``over_NA``; ``placements`` states by axis if it is replicated.

    Example:
        >>> over_axes({"tp": False, "cp": True}, ["tp", "cp", "ep"])
        [0, 2, 1]
    """
    words = {True: _PLACED, False: 0, None: _HELD}
    return [words[placements.get(axis)] for axis in axes]
