"""A model in a DeepSpeed engine, for a reference step.

The gradient that the engine has reduced is compared, before its own step clips it. Under ZeRO 3 a
plain copy with whole parameters runs, which all workers gather.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.bus.groups import Groups
from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.cost import check_room
from rankscope.evidence.reference.reference import WholeModel
from rankscope.evidence.reference.unsharded import plain_copy
from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.deepspeed_reading import ReducedReader
from rankscope.wrappers.reduced_types import reduced_types


class EngineModel(WholeModel):
    """A model in a DeepSpeed engine."""

    def __init__(self, engine: Any, num_workers: int) -> None:
        super().__init__(engine.module, num_workers)
        self._engine = engine
        parameters: dict[str, Tensor] = dict(zip(self.names, self._parameters, strict=True))
        groups = Groups(self.names, {name: at for at, name in enumerate(self.names)})
        types = reduced_types(engine, parameters, groups)
        self.types = tuple(types[name] for name in self.names)
        self._sharded = engine.zero_optimization_stage() == 3
        self._shards = ReducedReader(engine, parameters)
        self.copies = num_workers if self._shards.replicated else 1

    def check(self) -> None:
        """Check that a worker can run the model alone, and that gradients can be read."""
        super().check()
        if not self._shards.available:
            raise CanaryDeclined(
                "the reduced gradient has left the device, or is an update already"
            )
        if float(loss_scale(self._engine)) != 1:
            raise CanaryDeclined("the engine scales its loss, as it does in fp16")

        if self._sharded:
            every = [p for p in self._engine.module.parameters() if hasattr(p, "ds_numel")]
            needed = 3 * sum(p.ds_numel * p.element_size() for p in every)
            check_room(needed, self._engine.device, "the whole model and its gradient")

    @contextmanager
    def plain(self) -> Iterator[tuple[nn.Module, Sequence[Tensor]]]:
        """Yield the model itself or, under ZeRO 3, a plain copy with whole parameters."""
        if not self._sharded:
            with super().plain() as given:
                yield given
            return
        every = list(self._engine.module.parameters())
        zero: Any = sys.modules["deepspeed"].zero
        with zero.GatheredParameters(every):
            whole = {
                id(p): nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
                for p in every
            }
        trained = [whole[id(parameter)] for parameter in self._parameters]
        yield plain_copy(self._engine.module, dict(whole)), trained

    def digests(self) -> dict[str, int]:
        """Return digests of all parameters; under ZeRO 3 nothing, since workers hold parts."""
        return {} if self._sharded else super().digests()

    def measure(self, sketcher: Sketcher, into: GradientTotals) -> None:
        """Measure this worker's part of the reduced gradient."""
        sketcher.measure_many(list(self._shards.shards()), into)


def loss_scale(engine: Any) -> Tensor:
    """Return DeepSpeed's factor on a loss, without the division by accumulation steps."""
    with torch.enable_grad():
        one = torch.ones((), device=engine.device, dtype=torch.float32, requires_grad=True)
        loss = one.clone()
        if hasattr(engine.optimizer, "scale_if_loss"):
            loss = engine.optimizer.scale_if_loss(loss)
        elif engine.torch_autocast_z0_gradscaler:
            loss = engine.torch_autocast_z0_gradscaler.scale(loss)
    return loss.detach()
