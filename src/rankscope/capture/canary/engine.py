"""A model in a DeepSpeed engine, as a reference step takes it: ZeRO 0 to 2.

What is compared is what the engine has reduced, before its own step clips it.
"""

from typing import Any

from torch import Tensor

from rankscope.capture.canary.batch import CanaryDeclined
from rankscope.capture.canary.reference import WholeModel
from rankscope.capture.sketch import Sketcher
from rankscope.capture.taps.deepspeed import loss_scale
from rankscope.capture.taps.deepspeed_reading import ReducedReader
from rankscope.capture.taps.reduced_types import reduced_types
from rankscope.capture.totals import GradientTotals
from rankscope.core.groups import Groups


class EngineModel(WholeModel):
    """A model in a DeepSpeed engine.

    Args:
        engine: The engine.
        num_workers: W.
    """

    def __init__(self, engine: Any, num_workers: int) -> None:
        super().__init__(engine.module, num_workers)
        self._engine = engine
        parameters: dict[str, Tensor] = dict(zip(self.names, self._parameters, strict=True))
        groups = Groups(self.names, {name: at for at, name in enumerate(self.names)})
        types = reduced_types(engine, parameters, groups)
        self.types = tuple(types[name] for name in self.names)
        self._shards = ReducedReader(engine, parameters)
        self.copies = num_workers if self._shards.replicated else 1

    def check(self) -> None:
        """Check that a worker can run the model alone, and that gradients can be read.

        Raises:
            CanaryDeclined: It cannot, or they cannot.
        """
        super().check()
        if not self._shards.available:
            raise CanaryDeclined(
                "the reduced gradient has left the device, or is an update already"
            )
        if float(loss_scale(self._engine)) != 1:
            raise CanaryDeclined("the engine scales its loss, as it does in fp16")

    def measure(self, sketcher: Sketcher, into: GradientTotals) -> None:
        """Measure this worker's part of what was reduced."""
        sketcher.measure_many(list(self._shards.shards()), into)
