"""The loss of a script whose model does not return it: the tensor on which ``backward`` is called.

A gradient scaler's factor is taken out again, one over the number of micro-batches as well, and any
constant before a mean; a sum that is divided by a number is a mean, if the result is multiplied by
this number again. Other factors stay: they may make a mean of a sum, or undo the mean over workers.
The latter is so where a loss compares the rows of several ranks, and autograd has those of this
rank alone. For a sum over label tokens the scope gets their number, and the sum's divisor; for a
mean over label tokens their number.
"""

import logging
import math
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rankscope.bus.steps import LEAST_SCALER
from rankscope.stats.tokens import IGNORED_LABEL
from rankscope.wrappers.backward_calls import BackwardCalls, reaches
from rankscope.wrappers.calls import ModuleHook
from rankscope.wrappers.labels import is_spread, labels_in
from rankscope.wrappers.loss_form import (
    PASSING,
    averaged_tokens,
    divisor_of,
    gathered_from,
    is_hooked,
    is_mean,
    is_mean_node,
    summed_tokens,
)
from rankscope.wrappers.passes import in_backward, tensors_in
from rankscope.wrappers.surroundings import outside
from rankscope.wrappers.tap import Guarded, guarded

_log = logging.getLogger("rankscope")

_PIPELINING = "torch.distributed.pipelining"
_NUMBERS = (torch.int64, torch.float64)  # in which autograd keeps Python's numbers


class TrainingPasses(Protocol):
    """The forward passes of a training: a scope."""

    @property
    def training(self) -> bool:
        """Whether the present forward pass counts."""

    @property
    def repeating(self) -> bool:
        """Whether the present forward pass is the scope's own."""

    @property
    def present_step(self) -> int:
        """The number of the step that is under way."""


class Unscaled(NamedTuple):
    """The loss behind the root of a backward pass, a scalar, and the ``factor`` on it.

    The factor is None without one, or when ``loss`` does not have it. ``constant`` is the part of
    it that may belong to the loss: all but a gradient scaler's; None behind a mean, NaN where only
    the backward pass shows it. ``summed`` is the number of label tokens in the sum, and its divisor
    (None where the loss is no such sum); ``tokens`` is their number in the mean (None where it is
    no mean).
    """

    loss: Tensor
    factor: Tensor | float | None = None
    constant: Tensor | float | None = None
    summed: tuple[Tensor | float, Tensor | float] | None = None
    tokens: Tensor | float | None = None


class BackwardLoss:
    """Passes on the losses on which ``backward`` is called, where they depend on a scope's model.

    That is on an output of its last forward pass, or on its parameters, as the training calls a
    method in its place, or another part of the model, or the forward pass itself calls
    ``backward``. ``give`` takes them as :meth:`rankscope.Scope.loss` does. The forward pass of the
    first of ``models``, its parts, begins a micro-batch.

    Where a backward pass calls ``backward`` again, on what a hook or a checkpoint has computed, the
    loss is the root of the outer call, also where autograd sees no model behind that.
    """

    def __init__(
        self, scope: TrainingPasses, models: Sequence[nn.Module], give: Callable[..., None]
    ) -> None:
        self._scope = scope
        self._give = give
        self._model = models[0]
        self._outputs: dict[Any, Tensor | None] = {}
        self._labels: Tensor | None = None  # given to the last forward pass
        self._parameters = frozenset(id(p) for model in models for p in model.parameters())
        self._outer: Unscaled | None = None  # of a backward pass that has not reached the model
        self._step = -1
        self._works = True
        self._guarded: Guarded = self._safely
        self._hook: ModuleHook | None = None
        self._calls: BackwardCalls | None = None

    @guarded
    def install(self) -> None:
        """See every call of ``backward`` from now on; where that fails, none."""
        self._calls = BackwardCalls(torch.autograd, self._see)
        self._hook = ModuleHook(self._model, self._before_forward, self._after_forward)

    def remove(self) -> None:
        """Stop, and leave torch as it was."""
        self._works = False
        self._outputs.clear()
        self._outer = None
        if self._hook is not None:
            self._hook.remove()
        if self._calls is not None:
            self._calls.remove()

    @guarded
    def _before_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        if not self._scope.training or self._scope.repeating:  # the scope's own hook ran before
            return
        step = self._scope.present_step
        if step != self._step or _PIPELINING not in sys.modules:
            self._outputs.clear()  # a pipeline's schedule has several micro-batches under way
        self._step = step

    @guarded
    def _after_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not self._scope.training or self._scope.repeating:
            return
        outside(self._note_outputs, output, kwargs)

    def _note_outputs(self, output: Any, kwargs: Any) -> None:
        self._labels = labels_in(kwargs, shifted=False)[0]
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                self._outputs[tensor.grad_fn] = tensor if tensor.dim() == 0 else None

    def _see(self, caller: FrameType) -> None:
        """Read the roots of a backward pass that is about to begin."""
        if not self._scope.repeating:
            self._safely(outside, self._read_roots, caller)

    def _read_roots(self, caller: FrameType) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a loss may be of the training's own class
            self._take(caller.f_locals["tensors"])

    def _safely(self, work: Callable[..., None], *args: Any) -> None:
        """Call a function; if it fails, see no more losses."""
        if not self._works:
            return
        try:
            work(*args)
        except Exception as error:
            self.remove()
            _log.warning(
                "rankscope sees no more losses outside of the model; training goes on. %s: %s",
                type(error).__name__,
                error,
                exc_info=error,
            )

    def _take(self, roots: tuple[Any, ...]) -> None:
        if in_backward():
            self._take_outer(roots)
            return
        self._outer = None
        losses = [root for root in roots if not is_spread(root) and root.numel() == 1]
        if len(losses) < len(roots):
            return
        reached = any(reaches([loss], self._is_of_model) for loss in losses)
        if len(losses) > 1:
            if reached:
                self._give(torch.stack([loss.detach().sum() for loss in losses]).sum())
            return
        found = unscaled(losses[0], self._outputs, self._labels)
        if reached:
            self._give_found(found)
        else:
            self._outer = found._replace(loss=found.loss.detach())

    def _take_outer(self, roots: tuple[Any, ...]) -> None:
        """Give the loss of the pass under way, once a pass inside it reaches the model."""
        if self._outer is not None and reaches(roots, self._is_of_model):
            self._give_found(self._outer, begun=True)
            self._outer = None

    def _give_found(self, found: Unscaled, **more: Any) -> None:
        self._give(
            found.loss,
            found.tokens,
            factor=found.factor,
            constant=found.constant,
            summed=found.summed,
            **more,
        )

    def _is_of_model(self, node: Any) -> bool:
        """Return whether a node of the graph is an output's, or adds up a parameter's gradient."""
        return node in self._outputs or id(getattr(node, "variable", None)) in self._parameters


def unscaled(
    root: Tensor, outputs: dict[Any, Tensor | None], labels: Tensor | None = None
) -> Unscaled:
    """Return the loss behind the scalar on which ``backward`` is called.

    ``outputs`` are the model's scalar outputs by their node of the graph; None for other outputs.
    ``labels`` were given to the model.
    """
    constant = 1.0
    multiplied: list[float] = []
    scaler = []
    of_sum = False
    node: Any = root.grad_fn
    while node is not None:
        output = outputs.get(node)
        if output is not None:
            return Unscaled(output, constant=None if is_mean(output) else math.nan)
        step = _constant(node)
        if step is None:
            break
        factor, before = step
        if isinstance(factor, Tensor):
            scaler.append(factor)
        elif (
            factor < 1
            and not is_mean_node(before)
            and any(each != 1 and math.isclose(factor * each, 1) for each in multiplied)
        ):
            of_sum = True  # a mean times its number
            break
        else:
            constant *= factor
            multiplied.append(factor)
        node = before
    whole = math.prod(scaler, start=constant) if scaler or constant != 1 else None
    larger = [each for each in multiplied if each > 1]
    if larger and not set(larger).isdisjoint(gathered_from(root, outputs)):
        return Unscaled(root, math.prod(scaler, start=1.0) if scaler else None)
    if of_sum:
        return Unscaled(root, math.prod(scaler, start=constant))
    if is_mean_node(node):
        return Unscaled(root, whole, tokens=averaged_tokens(node))
    own = math.prod(map(_without_scaler, scaler), start=constant)
    return Unscaled(root, whole, own, _summed(node, outputs, labels))


def _without_scaler(factor: Tensor) -> Tensor:
    """Return a factor of a tensor's, 1 in place of a gradient scaler's: powers of two, or large."""
    factor = factor.detach()
    is_power = (torch.frexp(factor.double()).mantissa == 0.5) & (factor >= 1)
    return torch.where(is_power | (factor >= LEAST_SCALER), 1.0, factor)


def _summed(
    node: Any, outputs: dict[Any, Tensor | None], labels: Tensor | None
) -> tuple[Tensor | float, Tensor | float] | None:
    """Return the number of label tokens that a loss sums over, and the sum's divisor, or None."""
    divisor = divisor_of(node)
    whole = 1.0 if divisor is None else divisor.detach()
    node = node if divisor is None else node.next_functions[0][0]
    while (step := None if node is None else _constant(node)) and not isinstance(step[0], Tensor):
        factor, node = step
        whole = whole / factor if factor else math.nan
    count = None if node is None else summed_tokens(node)
    if count is None and labels is not None:
        count = _given_labels(node, outputs, labels)
    return None if count is None else (count, whole)


def _given_labels(node: Any, outputs: dict[Any, Tensor | None], labels: Tensor) -> Tensor | None:
    """Return how many labels a sum over an output of the model's own has, a loss per label."""
    if not type(node).__name__.startswith("SumBackward0") or labels.is_floating_point():
        return None
    sizes = tuple(node._saved_self_sym_sizes)
    if not sizes or sizes[:-1] != labels.shape[:-1]:
        return None
    first = labels.shape[-1] - sizes[-1]
    before, place = node.next_functions[0]
    while before is not None and before not in outputs:
        through = type(before).__name__.startswith(("NegBackward", "_DDPSink"))
        before, place = before.next_functions[place] if through else (None, 0)
    if before is None or first not in (0, 1):
        return None
    return (labels.detach()[..., first:] != IGNORED_LABEL).sum()


def _constant(node: Any) -> tuple[Tensor | float, Any] | None:
    """Return an operator's factor on a loss, and the node before it; None without a factor."""
    name = type(node).__name__
    before = [function for function, _ in node.next_functions]
    if name.startswith(PASSING):
        return 1.0, before[0]
    if any(is_hooked(node, saved) for saved in ("_saved_other", "_saved_self")):
        return None
    if name.startswith("DivBackward") and before[1:] == [None]:
        number = _number(node._saved_other)
        return (1 / number, before[0]) if number else None
    if name.startswith("MulBackward") and before.count(None) == 1:
        first = before[0] is not None
        saved = node._saved_other if first else node._saved_self
        if saved is None or saved.numel() != 1:
            return None
        number = _number(saved)
        return (saved.detach() if number is None else number), before[0 if first else 1]
    return None


def _number(saved: Tensor) -> float | None:
    """Return the number in a saved tensor, if it is one of Python's."""
    plain = saved.dim() == 0 and saved.device.type == "cpu" and saved.dtype in _NUMBERS
    return float(saved) if plain else None


_log = logging.getLogger("rankscope")
