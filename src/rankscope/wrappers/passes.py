"""The forward passes of a step, which of them train, and when a backward pass begins and ends."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributions import Distribution

from rankscope.private import require
from rankscope.wrappers.tap import Guarded
from rankscope.wrappers.untraced import untraced

_HAS_HOOKS = hasattr(Tensor, "_backward_hooks")
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


@dataclass(slots=True)
class _Pass:
    returned: bool = False
    visible: bool = False  # gradients can be seen to arrive at what it returned
    trained: bool = False
    graphless: bool = False  # it returned tensors without a graph, and ran no backward pass
    backward: int = -1  # the last one that has reached it

    @property
    def idle(self) -> bool:
        return not self.trained and (self.visible or not self.returned)

    def train(self) -> None:
        self.trained = True


class ForwardPasses:
    """Records which forward passes take part in a step.

    Not all do: one may raise, the training may drop a batch whose loss it does not like, catch
    an exception of the loss function inside the backward pass, or want other gradients than those
    of the parameters, as for adversarial examples.

    ``reached`` is called inside a backward pass that reaches the model's output; its argument is to
    be called once the pass accumulates gradients of parameters.
    """

    def __init__(self, reached: Callable[[Callable[[], None]], None], guarded: Guarded) -> None:
        self._reached = reached
        self._guarded = guarded
        self._passes: list[_Pass] = []
        self.running = False  # a forward pass; or it has raised

    @property
    def current(self) -> int:
        """Number of the pass that began last, from 0 in each step; -1 before the first."""
        return len(self._passes) - 1

    @property
    def recomputed(self) -> bool:
        """Whether a backward pass that has reached a forward pass runs here, and may run it again.

        A reentrant checkpoint builds its graph for the first time then, so nothing noticed it.
        """
        backward = torch._C._current_graph_task_id()
        return backward != -1 and any(this.backward == backward for this in self._passes)

    def begin(self, *, reached: bool = False) -> None:
        """Begin a forward pass, or add one that a training backward pass has ``reached``."""
        self._passes.append(_Pass(returned=reached, trained=reached))
        self.running |= not reached

    def end(self, output: object) -> None:
        """End the forward pass, which has returned ``output``."""
        self.running = False
        this = self._passes[-1]
        this.returned = True
        tensors = tensors_in(output)
        graphless = torch.is_grad_enabled() and not any(t.requires_grad for t in tensors)
        graphless = bool(tensors) and graphless and not this.trained
        this.graphless = graphless and not hides_tensors(output)
        for tensor in tensors:
            if tensor.grad_fn is not None:  # a hook on a parameter would stay there
                this.visible = True
                hook_gradient(tensor, partial(self._on_gradient, this))

    def train(self) -> None:
        """Note that the last forward pass trains, though nothing that it returned shows it."""
        if self._passes:
            self._passes[-1].trained = True

    def set_aside(self) -> None:
        """Note that the gradients of the passes so far were used for something else."""
        for this in self._passes:
            this.trained = False

    @property
    def graphless(self) -> frozenset[int]:
        """Numbers of the passes whose output no loss can come from."""
        return frozenset(number for number, this in enumerate(self._passes) if this.graphless)

    def take_idle(self) -> frozenset[int]:
        """Return the numbers of the passes that took no part in the step, and begin a new step."""
        idle = frozenset(number for number, this in enumerate(self._passes) if this.idle)
        self._passes.clear()
        return idle

    @untraced
    def _on_gradient(self, this: _Pass, gradient: Tensor | None) -> None:
        backward = torch._C._current_graph_task_id()
        if this.backward != backward:  # it may reach several outputs
            this.backward = backward
            self._guarded(self._reached, this.train)


def in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor | None], None]) -> None:
    """Do what ``register_hook`` of a tensor with a ``grad_fn`` does, but for making a handle.

    The hook gets None where a node that does not fill in zeros passes on no gradient.
    """
    tensor_: Any = tensor
    known = type(tensor) is Tensor and _HAS_HOOKS
    if not known or not hasattr(tensor_.grad_fn, "_register_hook_dict"):
        tensor_.register_hook(hook)
        return
    if tensor_._backward_hooks is None:
        tensor_._backward_hooks = OrderedDict()
        tensor_.grad_fn._register_hook_dict(tensor)
    tensor_._backward_hooks[object()] = hook  # handles have numbers


def tensors_in(value: object, depth: int = 4, breadth: int = 256) -> list[Tensor]:
    """Return the tensors in nested sequences, mappings, dataclasses and distributions.

    As far as is cheap.
    """
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for part in islice(_parts(value), breadth) if depth else ():
        if type(part) is Tensor:
            found.append(part)
        elif type(part) not in _PLAIN:
            found += tensors_in(part, depth - 1, breadth)
    return found


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (dict, Mapping)):
        return value.values()
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Distribution):  # its parameters, such as loc and scale
        return vars(value).values()
    return ()


def hides_tensors(value: object) -> str:
    """Return the class of an object in nested outputs that has tensors out of sight; else empty."""
    for part in (value, *_parts(value)):
        held = getattr(part, "__dict__", None)
        if not isinstance(held, dict) or isinstance(part, (Tensor, Mapping)) or _parts(part):
            continue
        if any(tensor.grad_fn is not None for tensor in tensors_in(dict(held))):
            return type(part).__name__
    return ""


class BackwardEnd:
    """Notices backward passes from inside hooks that run in them.

    A callback that is queued in a running backward pass runs at its end, and not at all when the
    pass raises. One that is queued by such a callback runs after all others: after DDP and FSDP2
    have finished the reduction, before the training gets the gradient to clip it.

    Reentrant activation checkpointing runs passes of its own inside the outer one. They count as
    part of it if the outer pass was noticed first: as soon as it reaches the model's output.
    """

    def __init__(
        self,
        began: Callable[[], None],  # called when a backward pass is noticed
        ended: Callable[[], None],  # called at its end, after its reduction
        guarded: Guarded,
        ending: Callable[[], None] | None = None,  # when all gradients are there, before that
    ) -> None:
        self._began = began
        self._ended = ended
        self._ending = ending
        self._guarded = guarded
        self._running: object = None
        require("backward")

    @property
    def running(self) -> bool:
        """Whether a backward pass that was noticed has not ended: it runs, or it raised."""
        return self._running is not None

    def begin(self) -> None:
        """Expect a new pass; forget one that raised."""
        self._running = None

    def notice(self) -> None:
        """Note, from inside a hook, that a backward pass runs."""
        if self._running is not None:
            return
        this = self._running = object()
        Variable._execution_engine.queue_callback(partial(self._near_end, this))
        self._began()

    @untraced
    def _near_end(self, this: object) -> None:
        if this is self._running and self._ending is not None:
            self._guarded(self._ending)
        Variable._execution_engine.queue_callback(partial(self._end, this))

    @untraced
    def _end(self, this: object) -> None:
        if this is self._running:
            self._guarded(self._ended)
            self._running = None  # last: Ctrl-C in between leaves an aborted pass
