"""Where DeepSpeed keeps gradients: local ones during backward passes, reduced ones after."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from rankscope.errors import UnsupportedError
from rankscope.gradients.sketch import Measured, Sketcher
from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.accumulator import AccumulatorAudit
from rankscope.wrappers.parts import GradientParts, MicroBatches
from rankscope.wrappers.tap import Guarded, LocalGradient
from rankscope.wrappers.untraced import untraced

_Sums = Iterator[tuple[str, Tensor]]


class LocalReader(ABC):
    """Measures the local gradient of a step, as backward passes come and go."""

    on = False  # the backward passes that follow are measured
    sum_so_far: GradientTotals | None = None
    """Totals of the sum over the step's passes; None where that is not read whole."""

    def begin_backward(self, *, first: bool) -> None:  # noqa: B027 - most have nothing to do
        """Note that a backward pass begins, the first of its step or a later one."""

    def before_reduction(self) -> None:  # noqa: B027
        """Note that a backward pass has ended and that its reduction, if any, has not begun."""

    @abstractmethod
    def end_backward(self) -> None:
        """Note that a backward pass has ended, and with it the reduction, if any."""

    @abstractmethod
    def gradient(
        self, reduced: GradientTotals | None, changes: Tensor | None
    ) -> LocalGradient | None:
        """Return the step's measurements; None unless they are those of a whole step.

        ``changes`` are those of the sum between its passes.
        """

    @abstractmethod
    def reset(self, *, begun: bool = False) -> None:
        """Start another step, some of whose backward passes may be over already."""

    def remove(self) -> None:
        """Take all hooks out of the model."""
        self.on = False


def choose_reader(
    engine: Any, parameters: dict[str, Tensor], sketcher: Sketcher, guarded: Guarded
) -> LocalReader:
    """Return a reader of an engine's local gradients."""
    optimizer = engine.optimizer
    divisor = engine.gradient_accumulation_steps()
    if engine.zero_optimization_stage() <= 1 and not getattr(optimizer, "overlap_comm", False):
        return _AccumulatedReader(parameters, accumulated_gradient(optimizer), sketcher)
    if not sketcher.sketches and divisor > 1:
        raise UnsupportedError(
            "the scalars tier expected a step of one micro-batch under ZeRO 2 and 3 (and 1 with "
            f"overlap_comm), got {divisor}: only sketches show the norm of their sum; use "
            "tier='sketch'"
        )
    return _PartsReader(parameters, sketcher, guarded, begun=_step_has_begun(engine))


def _step_has_begun(engine: Any) -> bool:
    """Return whether a backward pass of the current step is over already."""
    if not engine.managed_gradient_accumulation():
        return bool(getattr(engine, "_unmanaged_backward_count", 0))
    last_was_boundary = getattr(engine, "_is_gradient_accumulation_boundary", None)
    if last_was_boundary is not None:  # else the engine counts
        return not last_was_boundary
    return bool(engine.micro_steps % engine.gradient_accumulation_steps())


class _AccumulatedReader(LocalReader):
    """Reads the accumulated gradient at the end of each backward pass, before it is reduced."""

    def __init__(
        self,
        parameters: dict[str, Tensor],
        gradient_of: Callable[[Tensor], Tensor | None],
        sketcher: Sketcher,
    ) -> None:
        self._parameters = parameters
        self._gradient_of = gradient_of
        self._sketcher = sketcher
        self.sum_so_far = self._totals = sketcher.new_totals()
        self._is_read = False
        self._micro = MicroBatches()
        self._carried_over: Tensor | None = None

    def begin_backward(self, *, first: bool) -> None:
        if first:
            old = [gradient for _, gradient in _named(self._parameters, self._gradient_of)]
            self._carried_over = min(old, key=Tensor.numel).any() if old else None

    def before_reduction(self) -> None:
        self._is_read = True
        self._totals.reset()
        gradients = _named(self._parameters, self._gradient_of)
        self._sketcher.measure_many([(name, g, 0) for name, g in gradients], self._totals)
        if self._sketcher.sketches:
            self._micro.add(self._totals, last=False)

    def end_backward(self) -> None:
        if not self._is_read:  # nothing was reduced, as inside no_sync
            self.before_reduction()
        self._is_read = False

    def gradient(self, reduced: GradientTotals | None, changes: Tensor | None) -> LocalGradient:
        micro = self._micro.squared_norms()
        return LocalGradient(
            self._totals.clone(),
            reduced,
            None if micro is None or len(micro) == 1 else micro,
            self._carried_over,
            accumulator_changes=changes,
        )

    def reset(self, *, begun: bool = False) -> None:
        self._is_read = False
        self._micro.reset()
        self._carried_over = None


class _PartsReader(LocalReader):
    """Reads each micro-batch's gradient as it passes, from tensor hooks.

    Nothing that was there before passes them, so nothing is carried over.
    """

    def __init__(
        self, parameters: dict[str, Tensor], sketcher: Sketcher, guarded: Guarded, *, begun: bool
    ) -> None:
        self._guarded = guarded
        self._parts = GradientParts(sketcher)
        self._num_backwards = 0
        self._begun = begun  # the step's first parts are missing
        self._handles: list[RemovableHandle] = [
            parameter.register_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]
            for name, parameter in parameters.items()
        ]

    def end_backward(self) -> None:
        self._parts.close()
        self._num_backwards += 1

    def gradient(
        self, reduced: GradientTotals | None, changes: Tensor | None
    ) -> LocalGradient | None:
        if self._begun or not self._parts.adds_up:
            return None
        return LocalGradient(
            self._parts.totals(),
            reduced,
            self._parts.part_squared_norms(self._num_backwards),
            norm_estimated=self._parts.estimated,
            accumulator_changes=changes,
        )

    def reset(self, *, begun: bool = False) -> None:
        self._parts.reset()
        self._num_backwards = 0
        self._begun = begun

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @untraced
    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        if self.on:
            self._guarded(self._parts.measure, name, gradient)


def accumulated_gradient(optimizer: Any) -> Callable[[Tensor], Tensor | None]:
    """Return a getter of a parameter's accumulated gradient, before the reduction and after."""
    if getattr(optimizer, "use_grad_accum_attribute", False):  # ZeRO 1, sums in another dtype
        return lambda parameter: getattr(parameter, "grad_accum", None)
    if hasattr(optimizer, "fp32_groups_gradients"):  # bf16 parameters, float32 sums
        return lambda parameter: getattr(parameter, "_hp_grad", None)
    return lambda parameter: parameter.grad


def _named(
    parameters: Mapping[str, Tensor], gradient_of: Callable[[Tensor], Tensor | None]
) -> _Sums:
    """Yield the gradients that are there, with the names of their parameters."""
    for name, parameter in parameters.items():
        gradient = gradient_of(parameter)
        if gradient is not None:
            yield name, gradient


class ReducedReader:
    """Finds a rank's part of the reduced gradient, after the reduction and before clipping."""

    def __init__(self, engine: Any, parameters: Mapping[str, Tensor]) -> None:
        self._optimizer = optimizer = engine.optimizer
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.replicated = not hasattr(optimizer, "averaged_gradients")  # each rank holds all of it
        offloads = ("cpu_offload", "offload_optimizer")
        offloaded = any(getattr(optimizer, name, False) for name in offloads)
        muon = "muon" in type(engine.basic_optimizer).__name__.lower()
        # on the device, and still a gradient
        self.available = not offloaded and (self.replicated or not muon)

    def shards(self) -> Iterator[Measured]:
        """Yield this rank's part, without communication."""
        if self.replicated:
            gradients = _named(self._parameters, accumulated_gradient(self._optimizer))
            yield from ((name, gradient, 0) for name, gradient in gradients)
        elif hasattr(self._optimizer, "fp16_groups"):
            yield from self._shards_of_stage_3()
        else:
            yield from self.averaged()

    def averaged(self, *, added_to: bool = False) -> Iterator[Measured]:
        """Yield this rank's part in stages 1 and 2, perhaps only what another pass would add to."""
        optimizer = self._optimizer
        for group, averaged in optimizer.averaged_gradients.items():
            if added_to and not hasattr(averaged, "flat_partition"):
                continue
            rank = dist.get_rank(optimizer.real_dp_process_group[group])
            starts = optimizer.grad_start_offset[group][rank]
            held = (shard for shard in averaged or () if not hasattr(shard, "_zero_padding"))
            for parameter, shard in zip(optimizer.params_in_partition[group], held, strict=False):
                name = self._names.get(id(parameter))
                if name is not None:
                    yield name, shard, starts[optimizer.get_param_id(parameter)]

    def waiting(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the sums to which stage 2 adds micro-batches; only a part of each counts."""
        for group, sums in self._optimizer.all_grad_tensors.items():
            parameters = self._optimizer.params_in_partition[group]
            for parameter, gradient in zip(parameters, sums or (), strict=False):
                name = self._names.get(id(parameter))
                if name is not None:
                    yield name, gradient

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

    def end_pass(
        self,
        whole: GradientTotals | None,  # of the sum, where it was measured whole
        *,
        begins_anew: bool,  # the next pass begins another sum
    ) -> None:
        """Note that a backward pass has ended."""
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
            yield from _named(self._parameters, self._gradient_of)
        elif self._engine.inside_no_sync_ctxt:
            return
        elif self._stage == 2:
            yield from ((n, shard) for n, shard, _ in self._shards.averaged(added_to=not left))
            yield from self._shards.waiting()
        elif left or self._optimizer.micro_step_id:
            yield from ((name, shard) for name, shard, _ in self._shards.shards())
