"""Where DeepSpeed keeps gradients: local ones during backward passes, reduced ones after."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from rankscope.capture.sketch import Measured, Sketcher
from rankscope.capture.taps.parts import GradientParts
from rankscope.capture.taps.tap import Guarded
from rankscope.capture.totals import GradientTotals
from rankscope.errors import UnsupportedError


class LocalReader(Protocol):
    """Measures the local gradient of a step, as backward passes come and go.

    Attributes:
        on: Whether the backward passes that follow are measured.
        carried_over: As in :class:`~rankscope.capture.taps.tap.LocalGradient`.
    """

    on: bool
    carried_over: Tensor | None

    @property
    def valid(self) -> bool:
        """Whether what was measured is the local gradient of a whole step."""

    @property
    def estimated(self) -> bool:
        """Whether its squared norms are estimates."""

    def begin_backward(self, *, first: bool) -> None:
        """Note that a backward pass begins, the first of its step or a later one."""

    def before_reduction(self) -> None:
        """Note that a backward pass has ended and that its reduction, if any, has not begun."""

    def end_backward(self) -> None:
        """Note that a backward pass has ended, and with it the reduction, if any."""

    def result(self) -> tuple[GradientTotals, Tensor | None]:
        """Return the step's totals and the squared norms of its micro-batches, if known."""

    def reset(self) -> None:
        """Start another step."""

    def remove(self) -> None:
        """Take all hooks out of the model."""


def choose_reader(
    engine: Any, parameters: dict[str, Tensor], sketcher: Sketcher, guarded: Guarded
) -> LocalReader:
    """Return what reads an engine's local gradients.

    Raises:
        UnsupportedError: Sketches are needed, and there are none.
    """
    optimizer, divisor = engine.optimizer, engine.gradient_accumulation_steps()
    if engine.zero_optimization_stage() <= 1 and not getattr(optimizer, "overlap_comm", False):
        return _AccumulatedReader(parameters, _accumulated(optimizer), sketcher)
    if not sketcher.sketches and divisor > 1:
        raise UnsupportedError(
            "the scalars tier expected a step of one micro-batch under ZeRO 2 and 3 (and 1 with "
            f"overlap_comm), got {divisor}: only sketches tell the norm of their sum; use "
            "tier='sketch'"
        )
    return _PartsReader(parameters, sketcher, guarded, begun=_step_has_begun(engine))


def _step_has_begun(engine: Any) -> bool:
    """Return whether a backward pass of the current step has already been."""
    if not engine.managed_gradient_accumulation():
        return bool(engine._unmanaged_backward_count)
    last_was_boundary = engine._is_gradient_accumulation_boundary  # None: the engine counts
    if last_was_boundary is not None:
        return not last_was_boundary
    return bool(engine.micro_steps % engine.gradient_accumulation_steps())


class _AccumulatedReader:
    """Reads the accumulated gradient at the end of each backward pass, before it is reduced."""

    valid, estimated = True, False

    def __init__(
        self,
        parameters: dict[str, Tensor],
        gradient_of: Callable[[Tensor], Tensor | None],
        sketcher: Sketcher,
    ) -> None:
        self.on = False
        self.carried_over: Tensor | None = None
        self._parameters = parameters
        self._gradient_of = gradient_of
        self._sketcher = sketcher
        self._totals = sketcher.new_totals()
        self._is_read = False
        self._micro_squared_norms: list[Tensor] = []
        self._sketch_before: Tensor | None = None

    def begin_backward(self, *, first: bool) -> None:
        if first:
            old = [gradient for _, gradient in self._gradients()]
            self.carried_over = min(old, key=Tensor.numel).any() if old else None

    def before_reduction(self) -> None:
        self._is_read = True
        self._totals.reset()
        gradients = [(name, gradient, 0) for name, gradient in self._gradients()]
        self._sketcher.measure_many(gradients, self._totals)
        if self._sketcher.sketches:
            self._tell_micro_batch()

    def end_backward(self) -> None:
        if not self._is_read:  # nothing was reduced, as inside no_sync
            self.before_reduction()
        self._is_read = False

    def result(self) -> tuple[GradientTotals, Tensor | None]:
        several = len(self._micro_squared_norms) > 1
        return self._totals.clone(), torch.stack(self._micro_squared_norms) if several else None

    def reset(self) -> None:
        self._is_read = False
        self._micro_squared_norms.clear()
        self._sketch_before = self.carried_over = None

    def remove(self) -> None:
        self.on = False

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            gradient = self._gradient_of(parameter)
            if gradient is not None:
                yield name, gradient

    def _tell_micro_batch(self) -> None:
        """Tell a micro-batch's own norm from sketches that grow with each of them."""
        sketch = self._totals.sketches.sum(0)
        if self._sketch_before is None:
            self._micro_squared_norms.append(self._totals.squared_norms.sum())
        else:
            own = (sketch - self._sketch_before).double()
            self._micro_squared_norms.append(own.square().sum())
        self._sketch_before = sketch


class _PartsReader:
    """Reads each micro-batch's gradient as it passes, from tensor hooks."""

    carried_over: Tensor | None = None  # nothing that was there before passes the hooks

    def __init__(
        self, parameters: dict[str, Tensor], sketcher: Sketcher, guarded: Guarded, *, begun: bool
    ) -> None:
        self.on = False
        self._guarded = guarded
        self._parts = GradientParts(sketcher)
        self._adds_up = sketcher.sketches
        self._num_backwards = 0
        self._begun = begun  # before this reader was there: the step's first parts are missing
        self._handles: list[RemovableHandle] = [
            parameter.register_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]
            for name, parameter in parameters.items()
        ]

    @property
    def valid(self) -> bool:
        return not self._begun and (self._adds_up or self._parts.count == 1)

    @property
    def estimated(self) -> bool:
        return self._parts.count > 1

    def begin_backward(self, *, first: bool) -> None:
        pass

    def before_reduction(self) -> None:
        pass

    def end_backward(self) -> None:
        self._parts.close()
        self._num_backwards += 1

    def result(self) -> tuple[GradientTotals, Tensor | None]:
        one_each = self._num_backwards == self._parts.count
        micro = self._parts.part_squared_norms() if self.estimated and one_each else None
        return self._parts.totals(), micro

    def reset(self) -> None:
        self._parts.reset()
        self._num_backwards = 0
        self._begun = False

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        if self.on:
            self._guarded(partial(self._parts.measure, name, gradient))


def _accumulated(optimizer: Any) -> Callable[[Tensor], Tensor | None]:
    """Return where a parameter's accumulated gradient is, before the reduction and after."""
    if getattr(optimizer, "use_grad_accum_attribute", False):  # ZeRO 1, sums in another dtype
        return lambda parameter: getattr(parameter, "grad_accum", None)
    if hasattr(optimizer, "fp32_groups_gradients"):  # bf16 parameters, float32 sums
        return lambda parameter: getattr(parameter, "_hp_grad", None)
    return lambda parameter: parameter.grad


class ReducedReader:
    """Finds what a rank holds of the reduced gradient, after the reduction and before clipping.

    Args:
        engine: A DeepSpeed engine.
        parameters: Its parameters by name.

    Attributes:
        replicated: Whether every rank holds all of it, or its shard.
        available: Whether it is on the device, and still a gradient.
    """

    def __init__(self, engine: Any, parameters: Mapping[str, Tensor]) -> None:
        self._optimizer = optimizer = engine.optimizer
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.replicated = not hasattr(optimizer, "averaged_gradients")
        offloads = ("cpu_offload", "offload_optimizer")
        offloaded = any(getattr(optimizer, name, False) for name in offloads)
        muon = "muon" in type(engine.basic_optimizer).__name__.lower()
        self.available = not offloaded and (self.replicated or not muon)

    def shards(self) -> Iterator[Measured]:
        """Yield what this rank holds, without communication."""
        if self.replicated:
            yield from self._whole()
        elif hasattr(self._optimizer, "fp16_groups"):
            yield from self._shards_of_stage_3()
        else:
            yield from self._shards_of_stages_1_and_2()

    def _whole(self) -> Iterator[Measured]:
        gradient_of = _accumulated(self._optimizer)
        for name, parameter in self._parameters.items():
            gradient = gradient_of(parameter)
            if gradient is not None:
                yield name, gradient, 0

    def _shards_of_stages_1_and_2(self) -> Iterator[Measured]:
        optimizer = self._optimizer
        for group, averaged in optimizer.averaged_gradients.items():
            rank = dist.get_rank(optimizer.real_dp_process_group[group])
            starts = optimizer.grad_start_offset[group][rank]
            held = (shard for shard in averaged or () if not hasattr(shard, "_zero_padding"))
            for parameter, shard in zip(optimizer.params_in_partition[group], held, strict=False):
                name = self._names.get(id(parameter))
                if name is not None:
                    yield name, shard, starts[optimizer.get_param_id(parameter)]

    def _shards_of_stage_3(self) -> Iterator[Measured]:
        optimizer = self._optimizer
        for group, averaged in optimizer.averaged_gradients.items():
            for parameter, padded in zip(
                optimizer.fp16_groups[group], averaged or (), strict=False
            ):
                name = self._names.get(id(parameter))
                start = parameter.partition_numel() * dist.get_rank(parameter.ds_process_group)
                shard = padded.flatten()[: max(parameter.ds_numel - start, 0)]
                if name is not None and shard.numel():
                    yield name, shard, start
