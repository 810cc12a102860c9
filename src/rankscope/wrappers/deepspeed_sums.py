"""A DeepSpeed engine's sum of gradients between two backward passes of a step, and its audit.

- **Stages 0 and 1** keep each worker's own sum where the gradient is that is reduced.
- **Stage 2** reduces each micro-batch, and adds this rank's part to ``all_grad_tensors``; to
  ``averaged_gradients`` at once where sums have a wider type. After a pass that the engine takes
  for the step's last, ``averaged_gradients`` has it all, and unless sums have a wider type, the
  next pass begins a sum of its own.
- **Stage 3** does so in ``averaged_gradients``. It overwrites them as long as ``micro_step_id`` is
  0, as after ``optimizer.zero_grad``.

So the sum before a pass need not be the sum after the last one. It is unknown where sums lie on
another device, and inside ``coalesce_grad_reduction``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from rankscope.gradients.sketch import Sketcher
from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.accumulator import AccumulatorAudit
from rankscope.wrappers.deepspeed_reading import ReducedReader, accumulated_gradient

_Sums = Iterator[tuple[str, Tensor]]


class SumsAudit:
    """Compares the sum before each backward pass of a step with that after the last one."""

    def __init__(
        self,
        engine: Any,
        parameters: Mapping[str, Tensor],
        sketcher: Sketcher,
        shards: ReducedReader,
    ) -> None:
        self._engine = engine
        self._optimizer = engine.optimizer
        self._parameters = parameters
        self._sketcher = sketcher
        self._shards = shards
        self._stage = engine.zero_optimization_stage()
        self._gradient_of = accumulated_gradient(engine.optimizer)
        self._left = self._scratch = sketcher.new_totals()
        self._audit = AccumulatorAudit(parameters, sketcher)

    def begin_pass(self) -> None:
        """Measure the sum to which a backward pass will add, as soon as it begins."""
        here = self._stage < 3 or bool(self._optimizer.averaged_gradients)  # else moved away
        self._audit.begin_pass(self._left, measure=here, begun=False)

    def end_pass(self, whole: GradientTotals | None, *, begins_anew: bool) -> None:
        """Note that a backward pass has ended.

        Args:
            whole: Totals of the sum, where it was measured whole.
            begins_anew: Whether the next pass begins another sum.
        """
        known = not begins_anew and (whole is not None or any(self._sums(left=True)))
        self._left = self._scratch if whole is None else whole
        if known and whole is None:
            self._left.reset()
            self._sketcher.measure_norms(self._sums(left=True), self._left)
        self._audit.end_pass(self._read_found if known else None)

    def collect(self) -> Tensor | None:
        """Return the step's changes: see ``collect`` of :class:`AccumulatorAudit`."""
        return self._audit.collect()

    def reset(self) -> None:
        """Begin a step."""
        self._audit.reset()

    def _read_found(self, into: GradientTotals) -> None:
        self._sketcher.measure_norms(self._sums(left=False), into)

    def _sums(self, *, left: bool) -> _Sums:
        """Yield the sum after the last pass, or else the sum to which the next one will add."""
        if self._stage < 2:
            yield from self._own()
        elif self._engine.inside_no_sync_ctxt:
            return
        elif self._stage == 2:
            yield from ((n, shard) for n, shard, _ in self._shards.averaged(added_to=not left))
            yield from self._shards.waiting()
        elif left or self._optimizer.micro_step_id:
            yield from ((name, shard) for name, shard, _ in self._shards.shards())

    def _own(self) -> _Sums:
        for name, parameter in self._parameters.items():
            gradient = self._gradient_of(parameter)
            if gradient is not None:
                yield name, gradient
