"""The reference step on one worker: each micro-batch's gradient, computed again by itself.

The plain module computes the gradient of each saved micro-batch
(:mod:`rankscope.evidence.reference.micro_batch`) once more, before the optimizer changes the
parameters: without the wrapper and without accumulation in ``.grad``.

Of a gradient, the norm and a sketch of each parameter are sent. Sketches are linear, so the root
adds up micro-batches and workers, in float64 and in a fixed order. A sketch holds each element of a
parameter that is no longer than it; for longer ones, it estimates the norm of a difference with a
relative error of ``sqrt(2/k)``.
"""

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.bus.groups import Groups
from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.replay import in_short
from rankscope.evidence.canary.state import NotPutBackError
from rankscope.evidence.reference.micro_batch import MicroBatch, coarser
from rankscope.evidence.reference.models import ReferenceModel, measure_gradients
from rankscope.evidence.reference.share import ReferenceShare, width_for
from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import GradientTotals

_OF_PARTS = frozenset({"to_local", "full_tensor", "redistribute", "placements", "device_mesh"})
"""Attributes of DTensors alone."""

_READS_PARTS = (
    "the forward pass takes the part of a parameter that its rank holds (as a DTensor, by "
    "to_local() for example), and a worker alone has whole parameters"
)


class ReferenceStep:
    """Measures one worker's share of a reference step."""

    def __init__(
        self, model: ReferenceModel, device: torch.device, num_workers: int, seed: int
    ) -> None:
        self._model = model
        self._device = device  # the device of its gradients
        self._num_workers = num_workers  # limits the size of a message
        self._seed = seed  # of all signs; equal on all workers
        self._sketcher: Sketcher | None = None
        self._reduced: GradientTotals | None = None

    @property
    def inner(self) -> bool:
        """Whether micro-batches are to compare more than the loss: see :class:`MicroBatch`."""
        return self._model.tensor_parallel is not None

    def see_reduced(self, num_micro: int) -> None:
        """Measure the reduced ``.grad`` of ``num_micro`` micro-batches; the last call counts."""
        sketcher = self._prepare(num_micro)
        self._reduced = self._measure_grad(sketcher)

    def check(self, num_micro: int) -> None:
        """Check that the gradient can be computed again."""
        self._model.check()
        self._prepare(num_micro)

    def compute(self, micro_batches: Sequence[MicroBatch]) -> ReferenceShare:
        """Measure ``.grad``, compute every micro-batch's gradient again, and wait for the device.

        The last one is computed twice, to measure operations that add in any order. Collective
        operations come first.
        """
        sketcher = self._prepare(sum(micro.joins is None for micro in micro_batches))
        given = self._measure_grad(sketcher)
        none = given.sketches.new_zeros(0, sketcher.width)
        shared = self._model.tensor_parallel
        replicas = (
            none if shared is None else shared.sum_replicas(self._model.names, given.sketches)
        )
        for micro in micro_batches:
            micro.gather()
        with self._model.plain() as (module, parameters):
            last = micro_batches[-1]
            rounds_in = self._type_in(module.parameters(), last)
            terms: dict[MicroBatch, GradientTotals] = {}
            for micro in micro_batches:
                term = self._gradient_of(micro, module, parameters, sketcher, rounds_in)
                if micro.joins is None:
                    terms[micro] = term
                else:
                    terms[micro.joins].add(term)
            if shared is not None and rounds_in is not None:
                shared.disturb(module.parameters(), rounds_in)
            again = self._gradient_of(last, module, parameters, sketcher, rounds_in)
        again.subtract(term)
        reduced = none if self._reduced is None else self._reduced.sketches
        roots = [micro.root for micro in micro_batches if micro.joins is None]
        return ReferenceShare(
            digests=self._model.digests(),
            roots_M=() if None in roots else tuple(map(float, roots)),  # type: ignore[arg-type]
            loss_outside=not all(micro.returns_loss for micro in micro_batches),
            names=self._model.names,
            types=self._types(rounds_in),
            elements_P=np.array([parameter.numel() for parameter in parameters], np.float64),
            copies=self._model.copies,
            summed_workers=self._model.summed_workers,
            terms_MPK=torch.stack([term.sketches for term in terms.values()]).cpu().numpy(),
            norms_MP=torch.stack([term.squared_norms for term in terms.values()])
            .sqrt()
            .cpu()
            .numpy(),
            given_PK=given.sketches.cpu().numpy(),
            reduced_PK=reduced.cpu().numpy(),
            replicas_PK=replicas.cpu().numpy(),
            axis="" if shared is None else shared.name,
            unsteady_P=again.sketches.double().norm(dim=1).cpu().numpy(),
        )

    def measure_later(self, share: ReferenceShare, names: Container[str]) -> ReferenceShare:
        """Return a share whose gradients of some parameters are those of now."""
        if self._sketcher is None:
            return share
        now_PK = self._measure_grad(self._sketcher).sketches.cpu().numpy()
        later_P = np.array([name in names for name in share.names], bool)
        at = [self._model.names.index(name) for name in share.names]
        given_PK = np.where(later_P[:, None], now_PK[at], share.given_PK)
        return replace(share, given_PK=given_PK)

    @property
    def is_scaled(self) -> bool:
        """Whether the gradient is a multiple of the reduced one that was measured last."""
        return self._reduced is not None and math.isfinite(self.changed_since_reduction())

    def changed_since_reduction(self) -> float:
        """Return the factor of all gradients since the reduction; NaN if it is not one."""
        if self._reduced is None or self._sketcher is None:
            return math.nan
        given = self._measure_grad(self._sketcher).sketches.double()
        reduced = self._reduced.sketches.double()
        factor = (given * reduced).sum() / reduced.square().sum()
        far = (given - factor * reduced).norm() / given.norm()
        return float(factor) if float(far) < 1e-3 else math.nan

    def _type_in(self, parameters: Iterable[Tensor], micro: MicroBatch) -> torch.dtype | None:
        """Return the type in which layers round; None if it is that of the training."""
        if self._model.tensor_parallel is None:
            return None
        kinds = {p.dtype for p in parameters if p.is_floating_point()}
        return reduce(coarser, kinds, micro.computed_in)

    def _types(self, rounds_in: torch.dtype | None) -> tuple[str, ...]:
        """Return the coarsest types in which each gradient was rounded ``[P]``."""
        if rounds_in is None:
            return self._model.types
        kinds = [coarser(getattr(torch, name), rounds_in) for name in self._model.types]
        return tuple(str(kind).removeprefix("torch.") for kind in kinds)

    def end(self) -> None:
        """Free the buffers of the step."""
        self._sketcher = self._reduced = None

    def _prepare(self, num_micro: int) -> Sketcher:
        """Return a sketcher of the greatest width that may be sent for so many gradients."""
        names = self._model.names
        width = width_for(len(names), num_micro, self._num_workers)
        if not width:
            raise CanaryDeclined(
                f"{len(names)} parameters, {num_micro} micro-batches and "
                f"{self._num_workers} workers would be too much to send"
            )
        if self._sketcher is None or self._sketcher.width != width:
            groups = Groups(names, {name: at for at, name in enumerate(names)})
            self._sketcher = Sketcher(self._device, groups, width, self._seed)
            self._reduced = None
        return self._sketcher

    @torch.no_grad()
    def _measure_grad(self, sketcher: Sketcher) -> GradientTotals:
        totals = sketcher.new_totals()
        self._model.measure(sketcher, totals)
        return totals

    def _gradient_of(
        self,
        micro: MicroBatch,
        module: nn.Module,
        parameters: Sequence[Tensor],
        sketcher: Sketcher,
        rounds_in: torch.dtype | None,
    ) -> GradientTotals:
        shared = self._model.tensor_parallel
        # the training's replicas differ, so its outputs do
        apart = shared is not None and shared.replicas
        try:
            found = micro.gradients(module, parameters, rounds_in=rounds_in, compared=not apart)
            found = micro.with_direct(self._model.names, parameters, found)
            found = found if shared is None else shared.parts(self._model.names, found)
            totals = sketcher.new_totals()
            measure_gradients(sketcher, self._model.names, found, totals)
        except (CanaryDeclined, NotPutBackError):
            raise
        except Exception as error:
            if isinstance(error, AttributeError) and error.name in _OF_PARTS:
                raise CanaryDeclined(_READS_PARTS) from error
            why = f"a micro-batch could not be run once more ({in_short(error)})"
            if shared is not None:
                why += (
                    f" with whole parameters: what was divided over {shared.name} by hand, such as "
                    "a number of heads, is not undone"
                )
            raise CanaryDeclined(why) from error
        return totals
