"""A measured gradient on its way from the device to the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rankscope.capture.fold import fold
from rankscope.capture.host import HostCopy
from rankscope.capture.tap import LocalGradient
from rankscope.core.arrays import Floats
from rankscope.core.audit import AuditPart
from rankscope.core.sections import Sections
from rankscope.core.step import MeasuredGradient


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
    """Starts the copy of what was measured; two vectors, small whatever the model's size.

    Args:
        measured: The gradient's totals, on their device.
        sketch_width: Numbers to send of the total's sketch, at most its width; or 0.
        group_width: Numbers to send of each group's sketch.
        sections: The rows of the totals, where the reduction is audited; None: one per group.
        audit_width: Numbers in each section's sketch for the audit; 0 without.
        gram: This worker's part of the exact inner products ``[W(W+1)/2]``, in the exact tier.
    """

    def __init__(
        self,
        measured: LocalGradient,
        *,
        sketch_width: int,
        group_width: int,
        sections: Sections | None = None,
        audit_width: int = 0,
        gram: Tensor | None = None,
    ) -> None:
        totals, reduced = measured.totals, measured.reduced
        num_rows = len(totals.squared_norms)
        counts = (1,) * num_rows if sections is None else sections.counts
        self._firsts_G = np.cumsum((0, *counts[:-1]))
        self._shape = (num_rows, audit_width)
        self._is_read = bool(audit_width and reduced is not None)
        self._numbers = HostCopy(_numbers(measured))
        sketches = [_narrowed(totals.sketches.sum(0), sketch_width)] if sketch_width else []
        if group_width:
            sketches.append(fold(_by_group(totals.sketches, counts), group_width).flatten())
        if audit_width:
            sketches.append(_all_narrowed(totals.sketches, audit_width))
        if self._is_read and reduced is not None:
            sketches.append(_all_narrowed(reduced.sketches, audit_width))
        self._sizes = (sketch_width, len(counts) * group_width, num_rows * audit_width)
        self._sketches = HostCopy(torch.cat(sketches)) if sketches else None
        self._norm_estimated = measured.norm_estimated
        self._gram = None if gram is None else HostCopy(gram)

    def read(self) -> HandedOver:
        """Wait for the copy and return it."""
        numbers = np.asarray(self._numbers.numpy(), np.float64)
        num_rows = self._shape[0]
        squares_R, reduced_squares_R = numbers[: 2 * num_rows].reshape(2, num_rows)
        rest = numbers[2 * num_rows :]
        largest, nonfinite, carried_over, product = rest[:4]
        sketches = np.empty(0, np.float32)
        if self._sketches is not None:
            sketches = np.asarray(self._sketches.numpy(), np.float32)
        sketch_K, groups, local, reduced = np.split(sketches, np.cumsum(self._sizes))
        gram = np.empty(0) if self._gram is None else np.asarray(self._gram.numpy(), np.float64)
        audit = None
        if local.size:
            unread = np.full(self._shape, np.nan, np.float32)
            audit = AuditPart(
                local.reshape(self._shape),
                reduced.reshape(self._shape) if self._is_read else unread,
                reduced_squares_R,
            )
        return HandedOver(
            MeasuredGradient(
                group_norms_G=np.sqrt(np.add.reduceat(squares_R, self._firsts_G)),
                sketch_K=sketch_K,
                group_sketches_GK=groups.reshape(len(self._firsts_G), -1),
                gram=gram,
                audit=audit,
                reduced_product=float(product),
            ),
            {
                "grad_norm": float(np.sqrt(squares_R.sum())),
                "grad_norm_estimated": self._norm_estimated,
                "grad_max": float(largest),
                "grad_nonfinite": float(nonfinite),
                "reduced_norm": float(np.sqrt(reduced_squares_R.sum())),
                "grad_carried_over": float(carried_over),
            },
            np.sqrt(rest[4:]),
        )


def _by_group(sketches: Tensor, counts: Sequence[int]) -> Tensor:
    """Add up neighbouring rows: as many as each group has."""
    if len(sketches) == len(counts):
        return sketches
    return torch.stack([rows.sum(0) for rows in torch.split(sketches, list(counts))])


def _narrowed(sketch: Tensor, width: int) -> Tensor:
    return _all_narrowed(sketch[None], width)


def _all_narrowed(sketches: Tensor, width: int) -> Tensor:
    """Return narrow sketches of rows, one after the other."""
    return (sketches if sketches.shape[1] == width else fold(sketches, width)).flatten()


def _numbers(measured: LocalGradient) -> Tensor:
    """Return float64: squared norms of rows, local and reduced ``[2 R]``, then four numbers.

    Those are the largest magnitude, the non-finite count, whether it was carried over, and the
    inner product with the reduced gradient; behind them are the squared norms of micro-batches.
    """
    totals, reduced, micro = measured.totals, measured.reduced, measured.micro_squared_norms
    unknown = torch.full_like(totals.squared_norms, float("nan"))
    carried, product = measured.carried_over, measured.reduced_product
    parts = [
        totals.squared_norms,
        unknown if reduced is None else reduced.squared_norms,
        totals.largest.max().reshape(1).double(),
        totals.nonfinite.sum().reshape(1).double(),
        torch.zeros_like(unknown[:1]) if carried is None else carried.reshape(1).double(),
        unknown[:1] if product is None else product.reshape(1),
        unknown[:0] if micro is None else micro,
    ]
    return torch.cat(parts)
