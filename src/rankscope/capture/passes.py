"""The forward passes of a step, and which of them a backward pass trains on."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import islice

from torch import Tensor

from rankscope.capture.tap import Guarded


@dataclass(slots=True)
class _Pass:
    returned: bool = False
    visible: bool = False  # gradients can be seen to arrive at what it returned
    trained: bool = False

    @property
    def idle(self) -> bool:
        return not self.returned or (self.visible and not self.trained)

    def train(self) -> None:
        self.trained = True


class ForwardPasses:
    """Knows which forward passes take part in a step.

    Not all do: one may raise, the training may drop a batch whose loss it does not like, catch
    what a loss function raises inside the backward pass, or want other gradients than those of the
    parameters, as for adversarial examples.

    Args:
        reached: Called inside a backward pass that reaches what the model returned, with what to
            call once it accumulates gradients of parameters.
        guarded: Keeps exceptions out of the backward pass.
    """

    def __init__(self, reached: Callable[[Callable[[], None]], None], guarded: Guarded) -> None:
        self._reached = reached
        self._guarded = guarded
        self._passes: list[_Pass] = []

    @property
    def current(self) -> int:
        """Number of the pass that began last, from 0 in each step; -1 before the first."""
        return len(self._passes) - 1

    def begin(self, *, reached: bool = False) -> None:
        """A forward pass begins; or one that a training backward pass has ``reached`` is known."""
        self._passes.append(_Pass(returned=reached, trained=reached))

    def end(self, output: object) -> None:
        """The forward pass has returned ``output``."""
        this = self._passes[-1]
        this.returned = True
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # a hook on a parameter would stay there
                this.visible = True
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    partial(self._on_gradient, this)
                )

    def take_idle(self) -> frozenset[int]:
        """Return the numbers of the passes that took no part in the step, and begin a new step."""
        idle = frozenset(number for number, this in enumerate(self._passes) if this.idle)
        self._passes.clear()
        return idle

    def _on_gradient(self, this: _Pass, gradient: Tensor) -> None:
        self._guarded(partial(self._reached, this.train))


def tensors_in(value: object, depth: int = 4, breadth: int = 256) -> Iterator[Tensor]:
    """Yield the tensors in nested sequences, mappings and dataclasses, as far as is cheap."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        for part in islice(_parts(value), breadth):
            yield from tensors_in(part, depth - 1, breadth)


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return ()
