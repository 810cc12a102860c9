"""The local gradient under ``DistributedDataParallel``, read before DDP copies it to a bucket.

The tap is a post-accumulate hook per parameter. Unlike a communication hook it leaves DDP's own
path alone, which keeps every bit of the training as it was (a communication hook changes bits at
W = 3: DDP then divides at another place). It sees the accumulated local gradient with bucket
views, ``no_sync``, static graphs, unused parameters, compiled models and any communication hook.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from rankscope.capture.backward import BackwardEnd
from rankscope.capture.sketch import Sketcher
from rankscope.capture.tap import Guarded, LocalGradient, ReadReduced
from rankscope.capture.totals import GradientTotals


_MAX_SEPARATE = 16


class DDPTap:
    """A :class:`~rankscope.capture.tap.GradientTap` for DDP.

    Args:
        model: The wrapped model.
        parameters: The parameters that require a gradient, by the names that the sketcher knows.
        sketcher: Measures the gradients.
        guarded: Keeps the monitor's exceptions out of the backward pass.
        reduced: What to read of the reduced gradient.
        shadowed: Called after each synchronising step that this rank only shadows, since it has
            run out of data inside ``model.join()``.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: dict[str, Tensor],
        sketcher: Sketcher,
        guarded: Guarded,
        *,
        reduced: ReadReduced,
        shadowed: Callable[[], None],
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._sketcher = sketcher
        self._guarded = guarded
        self._read_reduced = reduced
        self._backward = BackwardEnd(self._on_end, guarded)
        self._totals = sketcher.new_totals()
        self._reduced = None if reduced is ReadReduced.OFF else sketcher.new_totals()
        self._micro = _MicroBatches()
        self._separate: dict[str, GradientTotals] = {}
        self._fired: set[str] = set()  # in this backward pass
        self._fired_before: set[str] = set()  # in earlier ones of the step
        self._num_expected = len(parameters)
        self._nested = False
        self._carried_over: Tensor | None = None
        self._fresh = self._begun = self._ended = self._spoiled = False
        self._measure = self._synchronises = False
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name))
            for name, parameter in parameters.items()
        ]
        self._shadow = _ShadowSteps(model, shadowed)

    @property
    def reduced_copies(self) -> int:
        """Every rank holds the whole reduced gradient."""
        return self._model.process_group.size()

    def begin_forward(self, *, measure: bool) -> None:
        """Announce a forward pass in training. DDP decides here whether backward synchronises."""
        self._backward.begin()
        self._fresh = True
        self._ended = False
        self._synchronises = self._model.require_backward_grad_sync
        # Norms do not add up over micro-batches, so without sketches the last one says it all.
        self._measure = measure and (self._synchronises or self._sketcher.sketches)

    @property
    def complete(self) -> bool:
        """Whether a synchronising backward pass has ended since the last :meth:`collect`."""
        return self._synchronises and not self._fresh and not self._backward.running

    @property
    def aborted(self) -> bool:
        """Whether a backward pass began since then and never ended: it raised."""
        return self._backward.running

    def collect(self) -> LocalGradient | None:
        """Return what was measured, and start again; None when nothing valid was measured."""
        # A parameter that only earlier micro-batches used was not read in the last one.
        whole = self._ended and self._fired_before <= self._fired
        gradient = None
        if self.complete and self._measure and whole and not self._spoiled:
            gradient = LocalGradient(
                self._totals.clone(),
                None if self._reduced is None else self._reduced.clone(),
                self._micro.squared_norms(),
                self._carried_over,
            )
        self._num_expected = len(self._fired)
        self._start_again()
        return gradient

    def remove(self) -> None:
        """Take all hooks out of the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._shadow.remove()

    def _start_again(self) -> None:
        self._backward.begin()
        self._micro.reset()
        self._carried_over = None
        self._fired.clear()
        self._fired_before.clear()
        self._begun = self._ended = self._spoiled = self._synchronises = False

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        self._guarded(partial(self._see, name, parameter))

    def _see(self, name: str, parameter: Tensor) -> None:
        if self._fresh:
            self._fresh = False
            self._begin_backward(name)
        self._backward.notice()
        again = name in self._fired
        self._fired.add(name)
        if self._measure and parameter.grad is not None:
            self._read(name, parameter.grad, again=again)

    def _begin_backward(self, name: str) -> None:
        self._fired_before |= self._fired
        self._fired.clear()
        if not self._measure:
            return
        self._totals.reset()
        for totals in self._separate.values():
            totals.reset()
        if not self._begun:
            self._begun = True
            self._carried_over = self._look_for_old_gradient(name)

    def _look_for_old_gradient(self, first: str) -> Tensor | None:
        """Return whether another parameter holds a gradient that was not zeroed, if any does."""
        old = [
            parameter.grad
            for name, parameter in self._parameters.items()
            if name != first and parameter.grad is not None
        ]
        return min(old, key=Tensor.numel).any() if old else None

    def _read(self, name: str, gradient: Tensor, *, again: bool) -> None:
        into = self._separate.get(name)
        if again and into is None:
            # Reentrant checkpointing of a shared parameter fires several times and the last
            # gradient holds the total. This step's total is lost; from now on this parameter
            # has totals of its own, which can be overwritten.
            if len(self._separate) < _MAX_SEPARATE:
                self._separate[name] = self._sketcher.new_totals()
            self._spoiled = True
            return
        if into is not None:
            into.reset()
        self._sketcher.measure(name, gradient, into or self._totals)

    def _on_end(self) -> None:
        """Close a backward pass, after the reduction if it has one."""
        if self._backward.nested and not self._nested:
            self._nested = self._spoiled = True  # an inner pass was taken for the whole, once
        if self._nested and len(self._fired) < self._num_expected:
            return  # the outer pass goes on
        self._ended = True
        if not self._measure:
            return
        for totals in self._separate.values():
            self._totals.add(totals)
        self._micro.add(self._totals, last=self._synchronises)
        if self._synchronises and self._reduced is not None:
            self._measure_reduced(self._reduced)

    def _measure_reduced(self, into: GradientTotals) -> None:
        into.reset()
        sketch = self._read_reduced is ReadReduced.SKETCH
        measure = self._sketcher.measure if sketch else self._sketcher.measure_norm
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                measure(name, parameter.grad, into)


class _MicroBatches:
    """The squared norms of single micro-batches, told from sums that grow with each of them."""

    def __init__(self) -> None:
        self._before: Tensor | None = None
        self._squared_norms: list[Tensor] = []

    def reset(self) -> None:
        self._before = None
        self._squared_norms.clear()

    def add(self, totals: GradientTotals, *, last: bool) -> None:
        """Take the totals of the gradient accumulated so far."""
        if last and self._before is None:
            return  # a single micro-batch
        sketch = totals.sketches.sum(0)
        if self._before is None:
            self._squared_norms.append(totals.squared_norms.sum())
        else:
            self._squared_norms.append((sketch - self._before).double().square().sum())
        self._before = sketch

    def squared_norms(self) -> Tensor | None:
        return torch.stack(self._squared_norms) if self._squared_norms else None


class _ShadowSteps:
    """Notices the steps that a rank shadows in ``join()``: its hooks do not fire in them."""

    _METHOD = "_match_all_reduce_for_bwd_pass"

    def __init__(self, model: DistributedDataParallel, shadowed: Callable[[], None]) -> None:
        self._model = model
        original = getattr(model, self._METHOD, None)
        if original is None:
            return

        def match_and_tell() -> None:
            original()
            shadowed()

        object.__setattr__(model, self._METHOD, match_and_tell)

    def remove(self) -> None:
        self._model.__dict__.pop(self._METHOD, None)
