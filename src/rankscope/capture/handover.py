"""A measured gradient on its way from the device to the host."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankscope.agent.message import StepMessage
from rankscope.capture.fold import fold
from rankscope.capture.host import HostCopy
from rankscope.capture.tap import LocalGradient
from rankscope.core.arrays import Floats
from rankscope.core.audit import AuditPart
from rankscope.core.measured import NUMBERS, SKETCHES, sizes_of
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
        self._numbers = _Vectors(_numbers(measured))
        sketches = {}
        if sketch_width:
            sketches["total"] = _narrowed(totals.sketches.sum(0, keepdim=True), sketch_width)
        if group_width:
            sketches["groups"] = fold(_by_group(totals.sketches, counts), group_width)
        if audit_width:
            sketches["local"] = _narrowed(totals.sketches, audit_width)
        if audit_width and reduced is not None:
            sketches["reduced"] = _narrowed(reduced.sketches, audit_width)
        self._sketches = _Vectors({name: part.view(-1) for name, part in sketches.items()})
        self._norm_estimated = measured.norm_estimated
        self._gram = None if gram is None else HostCopy(gram)

    def fill(self, message: StepMessage) -> None:
        """Wait for the copy, and put it into a message."""
        numbers, sketches = self._numbers.read(), self._sketches.read()
        message.numbers = np.concatenate([numbers[n] for n in NUMBERS if n in numbers])
        parts = {name: len(vector) for name, vector in sketches.items()}
        if sketches:
            message.sketches = np.concatenate([sketches[n] for n in SKETCHES if n in sketches])
        lengths = {name: len(vector) for name, vector in numbers.items()}
        message.sizes = np.array(
            sizes_of(lengths, parts, norm_estimated=self._norm_estimated), np.int64
        )
        if self._gram is not None:
            message.gram = np.asarray(self._gram.numpy(), np.float64)

    def read(self) -> HandedOver:
        """Wait for the copy and return it."""
        numbers, sketches = self._numbers.read(), self._sketches.read()
        squares_R = numbers["squares"]
        reduced_squares_R = numbers.get("reduced_squares")
        if reduced_squares_R is None:
            reduced_squares_R = np.full(self._shape[0], np.nan)
        nothing = np.empty(0, np.float32)
        gram = np.empty(0) if self._gram is None else np.asarray(self._gram.numpy(), np.float64)
        audit = None
        if "local" in sketches:
            reduced = sketches.get("reduced", np.full(len(sketches["local"]), np.nan, np.float32))
            audit = AuditPart(
                sketches["local"].reshape(self._shape),
                reduced.reshape(self._shape),
                reduced_squares_R,
            )
        return HandedOver(
            MeasuredGradient(
                group_norms_G=np.sqrt(np.add.reduceat(squares_R, self._firsts_G)),
                sketch_K=sketches.get("total", nothing),
                group_sketches_GK=sketches.get("groups", nothing).reshape(len(self._firsts_G), -1),
                gram=gram,
                audit=audit,
                reduced_product=float(numbers["product"][0]) if "product" in numbers else math.nan,
            ),
            {
                "grad_norm": math.sqrt(squares_R.sum()),
                "grad_norm_estimated": self._norm_estimated,
                "grad_max": float(numbers["largest"][0]),
                "grad_nonfinite": float(numbers["nonfinite"][0]),
                "reduced_norm": math.sqrt(reduced_squares_R.sum()),
                "grad_carried_over": float(numbers["carried"][0]) if "carried" in numbers else 0.0,
            },
            np.sqrt(numbers.get("micro", np.empty(0))),
        )


class _Vectors:
    """Named vectors of one type on their way to the host, in one copy.

    Args:
        vectors: On one device; what happens to them later has no effect.
    """

    def __init__(self, vectors: Mapping[str, Tensor]) -> None:
        self._sizes = {name: len(vector) for name, vector in vectors.items()}
        self._copy = HostCopy(torch.cat(list(vectors.values())), own=True) if vectors else None

    def read(self) -> dict[str, NDArray[Any]]:
        """Wait for the copy and return them."""
        together = np.empty(0) if self._copy is None else self._copy.numpy()
        vectors, first = {}, 0
        for name, size in self._sizes.items():
            vectors[name] = together[first : first + size]
            first += size
        return vectors


def _by_group(sketches: Tensor, counts: Sequence[int]) -> Tensor:
    """Add up neighbouring rows: as many as each group has."""
    if len(sketches) == len(counts):
        return sketches
    return torch.stack([rows.sum(0) for rows in torch.split(sketches, list(counts))])


def _narrowed(sketches: Tensor, width: int) -> Tensor:
    """Return narrow sketches of rows."""
    return sketches if sketches.shape[1] == width else fold(sketches, width)


def _numbers(measured: LocalGradient) -> dict[str, Tensor]:
    """Return what is known, in float64: squared norms of rows and of micro-batches, and numbers.

    The numbers are the largest magnitude, the non-finite count, whether it was carried over, and
    the inner product with the reduced gradient.
    """
    totals = measured.totals
    numbers = {
        "squares": totals.squared_norms,
        "largest": totals.largest.amax(0, keepdim=True).double(),
        "nonfinite": totals.nonfinite.sum(0, keepdim=True).double(),
    }
    if measured.reduced is not None:
        numbers["reduced_squares"] = measured.reduced.squared_norms
    if measured.carried_over is not None:
        numbers["carried"] = measured.carried_over.reshape(1).double()
    if measured.reduced_product is not None:
        numbers["product"] = measured.reduced_product.reshape(1)
    if measured.micro_squared_norms is not None:
        numbers["micro"] = measured.micro_squared_norms
    return numbers
