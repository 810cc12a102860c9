"""The norm of all gradients over a mesh after clipping: the same in every clipped step.

A model that is cut over another axis than that of the workers has one norm: the root of all
squares, where what ranks along the axis hold alike counts once. Where another combination of the
ranks' squares is the same in many steps and that norm is not, the training clips by the
combination. A norm that is not clipped is never the same in two steps.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from rankscope.gradients.host import Numbers, copy_numbers
from rankscope.wrappers.clipping import rounding_of
from rankscope.wrappers.fsdp2_mesh import placements_of
from rankscope.wrappers.fsdp2_model import ManagedParameter

CLIPPED = 8
"""Steps with the same combination of norms that prove that it is clipped by."""

_KEPT = 64
_RUN = "run "
_VARIES = 10.0  # over rounding, so that a norm is not the one that is clipped by
_ALIKE = 1e-3  # relative difference of squares that ranks hold alike


class Squares(NamedTuple):
    """One rank's squares of its gradients' elements, summed, in a step.

    Attributes:
        run: The lowest rank of its data-parallel group in the job.
        num_ranks: Ranks of the mesh.
        sums: By the axes over which parameters are held alike, joined by commas. Copies inside
            the group count once in the sum over its ranks.
        rounding: Relative error of a norm after clipping.
    """

    run: int
    num_ranks: int
    sums: dict[str, float]
    rounding: float


class SquareMeter:
    """Sums up the squares of a rank's gradients, with one read of its shards.

    Args:
        parameters: All parameters.
        axes: The axes over which FSDP2 does not average.
        ranks: All ranks of the mesh.
    """

    def __init__(
        self, parameters: Sequence[ManagedParameter], axes: Sequence[str], ranks: Sequence[int]
    ) -> None:
        self._parameters = parameters
        self._run = min(parameters[0].group.ranks)
        self._num_ranks = len(ranks)
        self._rounding = rounding_of([parameter.tensor for parameter in parameters])
        names: dict[str, int] = {}
        self._place: list[int] = []
        self._share: list[float] = []
        for parameter in parameters:
            placements = placements_of(parameter)
            alike = ",".join(axis for axis in axes if placements.get(axis, True))
            self._place.append(names.setdefault(alike, len(names)))
            self._share.append(1 / _copies(parameter, axes))
        self._names = tuple(names)

    @torch.no_grad()
    def read(self) -> "Reading | None":
        """Begin to read the norms of all gradients; None without gradients."""
        norms: list[torch.Tensor] = []
        mix = np.zeros((len(self._names), len(self._parameters)))
        for place, share, parameter in zip(self._place, self._share, self._parameters, strict=True):
            gradient = parameter.tensor.grad
            if gradient is not None:
                mix[place, len(norms)] = share
                own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                norms.append(torch.linalg.vector_norm(own).double())
        if not norms:
            return None
        return Reading(copy_numbers(torch.stack(norms), torch.float64), mix[:, : len(norms)])

    def squares(self, reading: "Reading") -> Squares:
        """Wait for the device; return the sums with their names."""
        sums_C = reading.mix_CP @ np.square(reading.norms_P.numpy())
        sums = dict(zip(self._names, sums_C.tolist(), strict=True))
        return Squares(self._run, self._num_ranks, sums, self._rounding)


class Reading(NamedTuple):
    """Norms of gradients ``[P]``, perhaps on the device, and how their squares are added up."""

    norms_P: Numbers
    mix_CP: NDArray[np.float64]


def _copies(parameter: ManagedParameter, axes: Sequence[str]) -> int:
    """Return how many ranks of its data-parallel group hold a copy of what this rank holds."""
    tensor = parameter.tensor
    if not isinstance(tensor, DTensor) or not tensor.device_mesh.mesh_dim_names:
        return 1
    sizes = zip(tensor.device_mesh.mesh_dim_names, tensor.device_mesh.shape, strict=True)
    alike = placements_of(parameter)
    return math.prod(size for name, size in sizes if name not in axes and alike[name])


@dataclass(frozen=True, slots=True)
class WrongNorm:
    """A norm by which a training clips, and which is not that of all gradients.

    Attributes:
        axis: The axis along which each rank counts what all of them hold; empty if ``alone``.
        alone: Whether only the ranks of one data-parallel group count in it.
        norm: Its value.
        spread: Relative spread of the norm of all gradients after clipping.
        steps: Number of steps.
    """

    axis: str
    alone: bool
    norm: float
    spread: float
    steps: int


class NormOverMesh:
    """Follows the norm of all gradients after clipping, and the combinations in its place."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, Squares]] = {}
        self._norms: deque[dict[str, float]] = deque(maxlen=_KEPT)

    def take(
        self, rank: int, step: int, squares: Squares, lines: Mapping[str, tuple[int, ...]]
    ) -> WrongNorm | None:
        """Process a rank's squares of a step; return what is wrong once all ranks are there.

        Args:
            rank: The rank in the job.
            step: The step.
            squares: Its squares.
            lines: The ranks along each axis through this rank.
        """
        there = self._steps.setdefault(step, {})
        there[rank] = squares
        if len(there) < squares.num_ranks:
            if len(self._steps) > _KEPT:
                del self._steps[min(self._steps)]
            return None
        del self._steps[step]
        sizes = {axis: len(line) for axis, line in lines.items()}
        norms = _combinations(there, sizes)
        if norms is None:
            return None
        self._norms.append(norms)
        return self._judge(max(each.rounding for each in there.values()))

    def _judge(self, rounding: float) -> WrongNorm | None:
        whole_T = np.array([norms[""] for norms in self._norms])
        runs = [name for name in self._norms[-1] if name.startswith(_RUN)]
        parts_RT = [np.array([norms.get(run, math.nan) for norms in self._norms]) for run in runs]
        clipped_RT = [_where_largest(part_T, rounding) for part_T in parts_RT]
        own_T = np.logical_and.reduce(clipped_RT)
        a_part = max(part_T[-1] for part_T in parts_RT) < whole_T[-1] * (1 - _VARIES * rounding)
        if a_part and own_T.sum() >= CLIPPED:
            norm = float(parts_RT[0].max())
            return WrongNorm("", True, norm, _spread(whole_T[own_T]), int(own_T.sum()))
        for axis in (name for name in self._norms[-1] if name not in ("", *runs)):
            norms_T = np.array([norms[axis] for norms in self._norms])
            clipped_T = _where_largest(norms_T, rounding)
            spread = _spread(whole_T[clipped_T])
            if clipped_T.sum() >= CLIPPED and spread > _VARIES * rounding:
                return WrongNorm(axis, False, float(norms_T.max()), spread, int(clipped_T.sum()))
        return None


def _where_largest(norms_T: NDArray[Any], rounding: float) -> NDArray[np.bool_]:
    """Return in which steps a norm has its largest value."""
    largest_T: NDArray[np.bool_] = norms_T >= norms_T.max() * (1 - 2 * rounding)
    return largest_T


def _combinations(
    there: Mapping[int, Squares], sizes: Mapping[str, int]
) -> dict[str, float] | None:
    """Return norms of a step by name; None where they are not known.

    They are the norm of all gradients by an empty name, the norm in which what is alike along an
    axis counts once for each rank by the axis, and that of each data-parallel group by its number.
    """
    totals: dict[str, float] = {}
    runs: dict[int, float] = {}
    for squares in there.values():
        for alike, square in squares.sums.items():
            totals[alike] = totals.get(alike, 0.0) + square
        runs[squares.run] = runs.get(squares.run, 0.0) + sum(squares.sums.values())
    found = {"": 0.0, **dict.fromkeys(sizes, 0.0)}
    for alike, total in totals.items():
        over = alike.split(",") if alike else []
        once = total / math.prod(sizes[axis] for axis in over)
        for name in found:
            found[name] += once * (sizes[name] if name in over else 1)
    found |= {f"{_RUN}{number}": square for number, square in runs.items()}
    if not all(0 < square < math.inf for square in found.values()) or not _are_copies(there):
        return None
    return {name: math.sqrt(square) for name, square in found.items()}


def _are_copies(there: Mapping[int, Squares]) -> bool:
    """Return whether data-parallel groups agree on what all of them should hold alike."""
    alike: dict[str, dict[int, float]] = {}
    for squares in there.values():
        for name, square in squares.sums.items():
            if name:
                by_run = alike.setdefault(name, {})
                by_run[squares.run] = by_run.get(squares.run, 0.0) + square
    return all(_spread(np.array(list(by_run.values()))) <= _ALIKE for by_run in alike.values())


def _spread(values: NDArray[Any]) -> float:
    return float(np.ptp(values) / values.max())
