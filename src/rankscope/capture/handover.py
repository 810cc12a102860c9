"""A measured gradient on its way from the device to the host."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rankscope.capture.fold import fold
from rankscope.capture.host import HostCopy
from rankscope.capture.tap import LocalGradient
from rankscope.core.step import Floats, MeasuredGradient


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A worker's gradient as the host sees it.

    Attributes:
        gradient: What travels to the other workers.
        values: LOCAL signals: ``grad_norm``, ``grad_norm_estimated``, ``grad_max``,
            ``grad_nonfinite``, ``reduced_norm`` and ``grad_carried_over``.
        micro_norms: Gradient norms of the micro-batches ``[M]``, empty when unknown.
    """

    gradient: MeasuredGradient
    values: dict[str, float]
    micro_norms: Floats


class GradientHandover:
    """Starts the copy of what was measured; two small vectors, whatever the model's size.

    Args:
        measured: The gradient's totals, on their device.
        sketch_width: Numbers to send of the total's sketch, at most its width; or 0.
        group_width: Numbers to send of each group's sketch.
        reduced_width: Numbers to send of the reduced gradient's sketch, likewise.
        gram: This worker's part of the exact inner products ``[W(W+1)/2]``, in the exact tier.
    """

    def __init__(
        self,
        measured: LocalGradient,
        *,
        sketch_width: int,
        group_width: int,
        reduced_width: int,
        gram: Tensor | None = None,
    ) -> None:
        totals, reduced = measured.totals, measured.reduced
        self._num_groups = len(totals.squared_norms)
        self._sizes = (sketch_width, self._num_groups * group_width, reduced_width)
        self._numbers = HostCopy(_numbers(measured))
        sketches = [_narrowed(totals.sketches.sum(0), sketch_width)] if sketch_width else []
        if group_width:
            sketches.append(fold(totals.sketches, group_width).flatten())
        if reduced_width and reduced is not None:
            sketches.append(_narrowed(reduced.sketches.sum(0), reduced_width))
        elif reduced_width:  # it could not be read in this step; a message has room for it
            sketches.append(totals.sketches.new_full((reduced_width,), math.nan))
        self._sketches = HostCopy(torch.cat(sketches)) if sketches else None
        self._norm_estimated = measured.norm_estimated
        self._gram = None if gram is None else HostCopy(gram)

    def read(self) -> HandedOver:
        """Wait for the copy and return it."""
        numbers = np.asarray(self._numbers.numpy(), np.float64)
        squares_G, rest = numbers[: self._num_groups], numbers[self._num_groups :]
        largest, nonfinite, reduced_square, carried_over = rest[:4]
        sketches = np.empty(0, np.float32)
        if self._sketches is not None:
            sketches = np.asarray(self._sketches.numpy(), np.float32)
        sketch_K, groups, reduced_K = np.split(sketches, np.cumsum(self._sizes[:2]))
        gram = np.empty(0) if self._gram is None else np.asarray(self._gram.numpy(), np.float64)
        return HandedOver(
            MeasuredGradient(
                group_norms_G=np.sqrt(squares_G),
                sketch_K=sketch_K,
                group_sketches_GK=groups.reshape(self._num_groups, -1),
                reduced_sketch_K=reduced_K,
                gram=gram,
            ),
            {
                "grad_norm": float(np.sqrt(squares_G.sum())),
                "grad_norm_estimated": self._norm_estimated,
                "grad_max": float(largest),
                "grad_nonfinite": float(nonfinite),
                "reduced_norm": float(np.sqrt(reduced_square)),
                "grad_carried_over": float(carried_over),
            },
            np.sqrt(rest[4:]),
        )


def _narrowed(sketch: Tensor, width: int) -> Tensor:
    return sketch if len(sketch) == width else fold(sketch[None], width)[0]


def _numbers(measured: LocalGradient) -> Tensor:
    """Return float64: squared norms ``[G]``, four numbers, squared norms of micro-batches."""
    totals, reduced, micro = measured.totals, measured.reduced, measured.micro_squared_norms
    unknown = torch.full_like(totals.squared_norms[:1], float("nan"))
    carried = measured.carried_over
    parts = [
        totals.squared_norms,
        totals.largest.max().reshape(1).double(),
        totals.nonfinite.sum().reshape(1).double(),
        unknown if reduced is None else reduced.squared_norms.sum().reshape(1),
        torch.zeros_like(unknown) if carried is None else carried.reshape(1).double(),
        unknown[:0] if micro is None else micro,
    ]
    return torch.cat(parts)
