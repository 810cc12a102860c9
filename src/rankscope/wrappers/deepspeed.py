"""The local gradient under DeepSpeed, ZeRO stages 0 to 3.

DeepSpeed's own hooks run before any that is added after ``initialize``, and move a gradient to a
bucket, reduce or free it. Two places remain:

- **Accumulated** (stage 0; stage 1 without ``overlap_comm``): the whole local gradient is in
  memory when a backward pass has ended, until ``allreduce_gradients`` reduces it. It is read
  there, and its norm is exact.
- **In parts** (stage 1 with ``overlap_comm``; stages 2 and 3): only one micro-batch's gradient
  exists at a time. A tensor hook, which runs before it is accumulated, reads each of them. With
  more than one micro-batch, the norm of their sum is an estimate
  (:class:`~rankscope.wrappers.parts.GradientParts`).

The gradient is that of the loss divided by the accumulation steps, times the loss scale: what
the reduction averages, before DeepSpeed unscales and clips it in ``step``.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankscope.errors import UnsupportedError
from rankscope.wrappers.calls import Relay
from rankscope.wrappers.deepspeed_reading import ReducedReader, SumsAudit, choose_reader
from rankscope.wrappers.parts import measure_reduced_parts
from rankscope.wrappers.tap import GradientTap, LocalGradient, ReadReduced, TapPlan, guarded
from rankscope.wrappers.wrapped import Wrapped, WrapperKind, no_whole, trained_in

_BEGIN = "_backward_prologue"
_END = "_backward_epilogue"
_REDUCE = "allreduce_gradients"
_STEP = "_take_model_step"
_MOST_AT_FIRST = 64  # backward passes of a step, before the engine has ever stepped
_ONE_BIT = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")


def engine_class() -> type[Any] | None:
    """Return the class of DeepSpeed's engines; None where DeepSpeed is not loaded."""
    return getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)


def is_deepspeed(model: object) -> bool:
    """Return whether a model is a DeepSpeed engine."""
    engine = engine_class()
    return engine is not None and isinstance(model, engine)


def deepspeed_process_group(engine: Any) -> dist.ProcessGroup:
    """Return the ranks over which an engine averages gradients; each of them is a worker."""
    for reason, present in _obstacles(engine):
        if present:
            raise UnsupportedError(
                f"watch() expected a DeepSpeed engine with ZeRO 0 to 3, got one {reason}, which "
                "cannot be watched"
            )
    group: dist.ProcessGroup = engine.data_parallel_group
    return group


def before_engine_step(engine: Any, listener: Callable[..., None]) -> Callable[[], object]:
    """Call a bound method before each step of an engine; return a function that ends that."""
    return Relay(engine, _STEP).subscribe(before=listener)


def _obstacles(engine: Any) -> Iterator[tuple[str, bool]]:
    for name in (_BEGIN, _END, _REDUCE, _STEP):
        yield f"of another version than 0.19, without {name}", not hasattr(engine, name)
    optimizer = getattr(engine, "basic_optimizer", None)
    yield "without an optimizer", optimizer is None
    yield f"with {type(optimizer).__name__}", type(optimizer).__name__ in _ONE_BIT
    yield "with pipeline parallelism", engine.pipeline_parallelism
    yield "with mixture-of-experts layers", engine.has_moe_layers
    yield "with model parallelism", engine.mp_world_size > 1 or engine.autotp_size() > 1
    yield "with sequence parallelism", engine.sequence_parallel_size > 1
    yield "with DeepCompile", engine.is_deepcompile_enabled()
    yield "with ZenFlow", engine.zenflow
    yield "with SuperOffload", engine.super_offload()


class _Pass(Enum):
    """A backward pass: from NONE to RUNNING to ENDING, and back; one that raises stays."""

    NONE = auto()
    RUNNING = auto()
    ENDING = auto()  # the engine may reduce


class _Step(Enum):
    """How far a step has come: from OPEN to LAST to STEPPED, until it is collected."""

    OPEN = auto()
    LAST = auto()  # a backward pass has ended that the engine takes for the last
    STEPPED = auto()


class DeepSpeedTap(GradientTap):
    """Reads gradients of a DeepSpeed engine.

    ZeRO waits for the other workers in the backward pass or in the optimizer. The reduction takes a
    mean, and the engine's own step decides which update it applies. The reduced gradient is not
    read where it has been moved off the device (ZeRO-Offload) or is an update already (Muon).
    """

    def __init__(
        self,
        wrapped: Wrapped,
        plan: TapPlan,
    ) -> None:
        engine = wrapped.wrapper
        parameters = wrapped.parameters
        super().__init__(plan)
        sketcher = plan.sketcher
        self._engine = engine
        self._local = choose_reader(engine, parameters, sketcher, plan.guarded)
        self._shards = ReducedReader(engine, parameters)
        replicated = self._shards.replicated
        self.reduced_copies = deepspeed_process_group(engine).size() if replicated else 1
        self._sums = SumsAudit(engine, parameters, sketcher, self._shards)
        if not self._shards.available:
            self._reads = ReadReduced.OFF
        self._reduced = sketcher.new_totals()
        self._awaits_backward = False  # a forward pass was announced
        self._pass = _Pass.NONE
        self._step = _Step.OPEN
        self._num_backwards = self._most_backwards = 0
        self._stops = [
            Relay(engine, _BEGIN).subscribe(before=self._begin_backward),
            Relay(engine, _REDUCE).subscribe(before=self._before_reduction),
            Relay(engine, _STEP).subscribe(before=self._before_step),
            Relay(engine, _END).subscribe(before=self._begin_end, after=self._end_backward),
        ]

    def begin_forward(self, *, measure: bool, bypassed: bool = False) -> None:
        """Announce a forward pass in training whose backward pass will follow."""
        self._measure = self._local.on = measure
        self._announce = None
        self._awaits_backward = True

    def see_evaluation(self, announce: Callable[[], None]) -> None:
        """Note a forward pass in evaluation mode, which the engine may be about to train on."""
        if not self._awaits_backward:
            self._announce = announce

    def notice_backward(self, trained: Callable[[], None]) -> None:
        """Call ``trained`` at once: the engine itself shows when a backward pass begins."""
        trained()

    @property
    def complete(self) -> bool:
        """Whether a step has ended since :meth:`collect`.

        The engine has stepped, or a backward pass has ended that it takes for the step's last, and
        there were as many as before any step so far. With ``gradient_accumulation_steps`` of 1,
        each of them is such a pass, also where the training accumulates all the same.
        """
        if self._step is not _Step.LAST:
            return self._step is _Step.STEPPED
        return self._num_backwards >= (self._most_backwards or _MOST_AT_FIRST)

    @property
    def aborted(self) -> bool:
        """Whether a backward pass began since then and never ended: it raised."""
        return self._pass is not _Pass.NONE

    def _gradient(self) -> LocalGradient | None:
        reduced = None if self._reads is ReadReduced.OFF else self._reduced.clone()
        return self._local.gradient(reduced, self._sums.collect())

    def _start_again(self) -> None:
        self._local.reset(begun=self._step is _Step.LAST)
        self._sums.reset()
        self._pass = _Pass.NONE
        self._step = _Step.OPEN
        self._num_backwards = 0

    def remove(self) -> None:
        """Take all hooks out of the engine."""
        self._local.remove()
        for stop in self._stops:
            stop()

    @guarded
    def _begin_backward(self, *args: Any, **kwargs: Any) -> None:
        if self._announce is not None:
            self._announce()  # it calls begin_forward
        if self._measure and self._pass is _Pass.NONE:
            is_first = self._num_backwards == 0 or self._step is not _Step.OPEN
            self._local.begin_backward(first=is_first)
            self._sums.begin_pass()
        self._pass = _Pass.RUNNING

    @guarded
    def _begin_end(self, *args: Any, **kwargs: Any) -> None:
        self._pass = _Pass.ENDING

    @guarded
    def _before_reduction(self, *args: Any, **kwargs: Any) -> None:
        if self._measure and self._pass is _Pass.ENDING:
            self._local.before_reduction()

    @guarded
    def _end_backward(self, *args: Any, **kwargs: Any) -> None:
        self._pass = _Pass.RUNNING  # no reduction comes any more
        self._awaits_backward = False
        self._num_backwards += 1
        if self._measure:
            self._local.end_backward()
        engine = self._engine
        if engine.is_gradient_accumulation_boundary() and not engine.inside_no_sync_ctxt:
            self._finish()
        if self._measure:
            begins_anew = self._step is not _Step.OPEN and self._shards.replicated
            self._sums.end_pass(self._local.sum_so_far, begins_anew=begins_anew)
        self._pass = _Pass.NONE  # last: Ctrl-C in between leaves an aborted pass

    @guarded
    def _before_step(self, *args: Any, **kwargs: Any) -> None:
        """Close a step; its backward passes may not have known which of them was the last."""
        if not self._num_backwards:
            return
        if self._step is _Step.OPEN:
            self._finish()
        self._step = _Step.STEPPED
        self._most_backwards = max(self._most_backwards, self._num_backwards)

    def _finish(self) -> None:
        if self._step is _Step.OPEN:
            self._step = _Step.LAST
        if not self._measure or self._reads is ReadReduced.OFF:
            return
        shards = list(self._shards.shards())
        measure_reduced_parts(self._sketcher, self._reads, shards, self._reduced)


DEEPSPEED = WrapperKind(
    "DeepSpeed",
    "DeepSpeed reduces over a group",
    DeepSpeedTap,
    engine=True,
    own_optimizer=False,
    updates_at_once=False,
    runs_apart=False,
    no_canary=no_whole("DeepSpeed"),
)


@dataclass(frozen=True, slots=True)
class DeepSpeedModel(Wrapped):
    """A model in a DeepSpeed engine."""

    def settings(self) -> Mapping[str, object]:
        """Return the engine's stage, accumulation and type of communication."""
        engine = self.wrapper
        return {
            "stage": int(engine.zero_optimization_stage()),
            "micro_batches": int(engine.gradient_accumulation_steps()),
            "communication_dtype": engine.communication_data_type,
        }

    def gradient_types(self) -> Mapping[str, Collection[torch.dtype]]:
        """Return by parameter its own type and the engine's ``communication_data_type``."""
        return engine_types(self.wrapper, self.parameters)


def engine_types(
    engine: Any, parameters: Mapping[str, Tensor]
) -> dict[str, Collection[torch.dtype]]:
    """Return by parameter the types in which an engine adds its gradient up and keeps it."""
    given = getattr(engine, "communication_data_type", None)
    summed = given if isinstance(given, torch.dtype) else torch.float32
    return {name: (parameter.dtype, summed) for name, parameter in parameters.items()}


def find_deepspeed(engine: Any, process_group: object = None) -> Wrapped:
    """Return a model in a DeepSpeed engine."""
    sharded = engine.zero_optimization_stage() >= 3
    return DeepSpeedModel(
        DEEPSPEED,
        engine,
        trained_in(engine.module),
        deepspeed_process_group(engine),
        engine.device,
        engine.basic_optimizer,
        sharded=sharded,
        replica=None if sharded else 0,
    )
