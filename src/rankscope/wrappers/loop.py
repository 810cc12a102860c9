"""The local gradient of a model without wrapper, whose training reduces gradients itself.

No reduction begins inside the backward pass, but for one that hooks of the training's start there.
So after a backward pass ``.grad`` holds the local gradient, summed over the step's passes: it is
read together at the end of each pass (:mod:`rankscope.wrappers.ddp_reading`). A parameter that has
hooks of the training's is read in a hook that runs before these. Where such hooks move every
gradient into a buffer of the training's own, and drop ``.grad``, passes are read one by one and
added up.

Where the optimizer holds copies of the parameters, the loop may take each micro-batch's gradient
away and add it up elsewhere. Passes are added up then, too: the step goes on for as many of them as
an update has taken.

The step ends with the optimizer's call, and ``.grad`` is taken for the reduced gradient then. The
comparison of workers shows whether it is a mean, a sum or something else, or still each worker's
own since the optimizer reduces. Where each parameter is in the optimizer of one rank, the gradients
of the rank's own are read: any other may hold what a reduction to its owner has left. A parameter
that no known optimizer holds is left out: when its gradient is used is unknown.

Stages of a pipeline that hold copies of one weight sum its gradients over ranks beside the workers.
Calls of ``all_reduce`` are watched in the first step, and in later ones where it had such sums: the
reduced gradient is what lay there before. Where nothing had reduced it by then, it is left out.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rankscope.errors import UnsupportedError
from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.calls import Relay
from rankscope.wrappers.ddp_reading import measure_reduced
from rankscope.wrappers.hooked import HookedTap, PassEvent, PassPhase
from rankscope.wrappers.parts import GradientParts
from rankscope.wrappers.passes import in_backward
from rankscope.wrappers.ranks import local_of, ranks_of
from rankscope.wrappers.tap import LocalGradient, TapPlan
from rankscope.wrappers.wrapped import Wrapped, WrapperKind, check_one_device, trained_in

_ALL_REDUCE = Relay(dist, "all_reduce")


@dataclass(slots=True)
class _Step:
    """The state of the step that runs; there is a new one for each."""

    begun: bool = False  # a backward pass that is measured has begun
    settled: bool = False  # the optimizer was called after one
    read: set[str] = field(default_factory=set)  # parameters whose reduced gradient was read
    lacks_some: bool = False  # a reduced gradient was not there any more
    spoiled: bool = False  # the measurements are not those of the step's local gradient
    carried_over: Tensor | None = None  # see LocalGradient
    left: tuple[Tensor, int] | None = None  # by the last pass: a gradient's parameter and version
    num_passes: int = 0  # backward passes that have ended
    taken: bool = False  # the training takes the gradient of each pass away


@dataclass(frozen=True, slots=True)
class _Held:
    """A gradient, as a parameter has it."""

    grad: Tensor


class LoopTap(HookedTap):
    """A :class:`~rankscope.wrappers.tap.GradientTap` for a bare module.

    What follows the reduction is called before the optimizer.
    """

    def __init__(
        self,
        wrapped: Wrapped,
        plan: TapPlan,
    ) -> None:
        parameters = wrapped.parameters
        workers = ranks_of(wrapped.group)
        held = wrapped.held
        in_shares = wrapped.in_shares
        super().__init__(parameters, plan)
        # every rank is taken to hold the reduced gradient, or each has a share
        self.reduced_copies = 1 if in_shares else len(workers)
        self._of_copies = held is not None and not held and not in_shares
        known = held is not None and not self._of_copies
        others = frozenset(parameters.keys() - (held or ())) if known else frozenset[str]()
        self._fewest_passes = 0  # that an update of copies took
        self._num_waiting = 0  # passes since the last update
        self._of_others = others if in_shares else frozenset[str]()
        self._never = frozenset[str]() if in_shares else others
        self.leave_out(())
        self._looked_for_others = False
        self._step = _Step()
        self._parts = GradientParts(plan.sketcher)
        self._workers = frozenset(workers)
        self._summed = wrapped.summed
        self._reduced_here: set[str] = set()  # over workers, in this step
        self._before_sums: dict[str, Any] = {}  # what has the gradients, as parameters do
        self._memory: Mapping[int, str] | None = None
        has_others = dist.get_world_size() > len(workers)
        self._stop = _ALL_REDUCE.subscribe(before=self._see_sum) if has_others else None

    def begin_forward(self, *, measure: bool, bypassed: bool = False) -> None:
        """Announce a forward pass in training whose backward pass will follow."""
        if not self._looked_for_others and not in_backward():
            self._looked_for_others = True
            self._reading.never_late = self._hooks.go_first()
        self._choose_hooks()
        self._await_pass()
        self._measure = measure

    def see_optimizer(self, optimizer: Any) -> None:
        """Read the reduced gradient that an optimizer gets, if it follows a backward pass."""
        step = self._step
        if not step.num_passes or self._backward.running:
            return
        if not step.settled:
            step.settled = True
            if self._stop is not None and not self._summed:
                self._stop()
                self._stop = None
            if self._of_copies:
                waiting = self._num_waiting
                self._fewest_passes = min(self._fewest_passes or waiting, waiting)
                self._num_waiting = 0
            self._move(PassEvent.OPTIMIZER)
            self._see_reduced()
        if self._measure and self._reduced is not None:
            self._read_reduced(optimizer, self._reduced)

    def _read_reduced(self, optimizer: Any, into: GradientTotals) -> None:
        """Read what this optimizer gets; a gradient scaler may unscale others' later."""
        groups = getattr(optimizer, "param_groups", ())
        held = {id(parameter) for group in groups for parameter in group["params"]}
        own = {n: p for n, p in self._parameters.items() if id(p) in held} or self._parameters
        step = self._step
        due = {n: self._before_sums.get(n, p) for n, p in own.items() if n not in step.read}
        if due:
            step.lacks_some |= not measure_reduced(
                due,
                self._sketcher,
                self._reads,
                self._calls.names,
                into=into,
                left_out=self._of_others.union(self._left_out),
                more=bool(step.read),
            )
            step.read.update(due)

    @property
    def _knows_reduced(self) -> bool:
        """Whether the reduced gradient of this step was read, all of it."""
        step = self._step
        left_out = self._of_others.union(self._left_out)
        return not step.lacks_some and step.read.union(left_out).issuperset(self._calls.names)

    @property
    def complete(self) -> bool:
        """Whether the optimizer was called after a backward pass, or its gradient thrown away.

        A gradient scaler that sees an infinity calls no optimizer; the training throws the
        gradient away, and the next forward pass begins another step. On an accelerator, only one
        that is taken away is known to be, not one that is zeroed in place.
        """
        if self._phase is not PassPhase.IDLE or not self._step.num_passes:
            return False
        whole = self._step.num_passes >= self._fewest_passes
        return self._step.settled or (whole and self._is_thrown_away())

    def notice_backward(self, trained: Callable[[], None]) -> None:
        """Note that the running backward pass has reached the model's output."""
        self._keep_taken()
        super().notice_backward(trained)

    def remove(self) -> None:
        """Take all hooks out of the model."""
        if self._stop is not None:
            self._stop()
        super().remove()

    def _see_sum(self, *args: Any, **kwargs: Any) -> None:
        """Note a sum over ranks beside the workers, if it is of a gradient."""
        tensor = kwargs.get("tensor", args[0] if args else None)
        group = kwargs.get("group", args[2] if len(args) > 2 else None)
        self._guarded(partial(self._note_sum, tensor, group))

    def _note_sum(self, tensor: Any, group: Any) -> None:
        group = dist.group.WORLD if group is None else group
        if not isinstance(tensor, Tensor):
            return
        name = self._names_by_memory().get(local_of(tensor).data_ptr())
        if name is None:
            return
        if self._workers.issuperset(ranks_of(group)):
            self._reduced_here.add(name)
            return
        self._summed.add(name)
        if name in self._reduced_here:
            self._before_sums[name] = _Held(tensor.clone())
        else:
            self._never |= {name}
            self._step.spoiled = True

    def _names_by_memory(self) -> Mapping[int, str]:
        """Return the parameters by where their gradients lie since the last backward pass."""
        if self._memory is None:
            self._memory = {
                local_of(p.grad).data_ptr(): name
                for name, p in self._parameters.items()
                if p.grad is not None and p.grad.numel()
            }
        return self._memory

    def leave_out(self, names: Collection[str]) -> None:
        """Measure the step that begins without some parameters."""
        super().leave_out(self._never.union(names) if self._never else names)

    def _gradient(self) -> LocalGradient | None:
        step = self._step
        if not self._calls.whole or step.spoiled:
            return None
        reduced = self._reduced if self._knows_reduced else None
        if step.num_passes == 1:
            return LocalGradient(self._reading.totals, reduced, None, step.carried_over)
        parts = self._parts
        if not step.taken:
            return LocalGradient(
                self._reading.totals,
                reduced,
                self._micro.squared_norms(),
                step.carried_over,
                accumulator_changes=self._accumulator.collect(),
            )
        if not parts.adds_up:
            return None
        micro = parts.part_squared_norms(step.num_passes)
        return LocalGradient(parts.totals(), reduced, micro, step.carried_over, norm_estimated=True)

    def _start_again(self) -> None:
        self._parts.reset()
        self._reduced_here.clear()
        self._before_sums.clear()
        self._memory = None
        super()._start_again()
        self._step = _Step()

    def _keep_taken(self) -> None:
        """Keep the last pass's measurements where its gradient is taken away, as for copies."""
        step = self._step
        if self._of_copies and step.num_passes and not step.taken and self._is_thrown_away():
            step.taken = True
            step.spoiled |= step.num_passes > 1
            self._accumulator.reset()
            if self._measure and not step.spoiled:
                self._parts.add(self._reading.totals)

    def _is_thrown_away(self) -> bool:
        if self._step.left is None:
            return False
        parameter, version = self._step.left
        gradient = parameter.grad
        if gradient is None:
            return True
        readable = gradient.is_cpu and not gradient.is_sparse and gradient._version != version
        return readable and not bool(gradient.any())

    def _take(self, name: str, gradient: Tensor | None, *, last: bool) -> None:
        if last:
            self._reading.take(name, gradient)

    def _begin_pass(self, first: str) -> None:
        self._keep_taken()
        step = self._step
        step.spoiled |= step.settled  # it adds to the gradient that the optimizer has used
        self._unnoticed = not self._noticed
        step.spoiled |= self._unnoticed and not self._hooks.all
        self._reading.begin_pass(first, measure=self._measure, synchronises=False)
        if self._measure and not step.begun:
            step.begun = True
            step.carried_over = self._carried_over(first)

    def _on_ending(self) -> None:
        """Read the local gradients at the end of a backward pass."""
        if self._phase is PassPhase.READING:
            self._read_pass()

    def _on_end(self) -> None:
        """Close a backward pass."""
        if not self._is_training():
            return
        step = self._step
        unexpected = self._calls.end_pass(self._reading.read_late)
        step.spoiled |= unexpected or self._reading.spoiled
        self._reading.take_refs()
        step.num_passes += 1
        self._memory = None
        self._num_waiting += 1
        parameters = (self._parameters[name] for name in self._calls.names)
        step.left = next(((p, p.grad._version) for p in parameters if p.grad is not None), None)
        step.taken |= step.left is None and step.num_passes == 1
        goes_on = self._measure and not step.spoiled
        if goes_on and step.taken:
            self._parts.add(self._reading.totals)
        goes_on &= not step.taken
        self._accumulator.end_pass(
            self._accumulator.reading(self._calls.names) if goes_on else None
        )
        if self._measure:
            self._micro.add(self._reading.totals, last=False)


LOOP = WrapperKind(
    "loop",
    "loop reduces over a group",
    LoopTap,
    by_loop=True,
    updates_at_once=False,
    begins_in_parts=True,
)
"""A model without wrapper, whose training reduces gradients itself."""


def find_loop(model: nn.Module, group: dist.ProcessGroup) -> Wrapped:
    """Return a model without wrapper, whose workers are the ranks of a group."""
    if group.size() < 2:
        raise UnsupportedError(
            f"watch() expected several workers, got {type(model).__name__} without wrapper in a "
            "group of one rank, where there is nothing to compare; start the job with more ranks"
        )
    parameters = trained_in(model)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UnsupportedError(
            "watch() expected whole parameters on every rank of a model without wrapper, got "
            "DTensor; wrap the model by fully_shard"
        )
    check_one_device(parameters)
    device = next(iter(parameters.values()), torch.zeros(())).device
    return Wrapped(LOOP, model, parameters, group, device, inside=model)
