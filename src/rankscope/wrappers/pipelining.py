"""Calls of torch's pipeline schedules, each of which reduces a stage's gradients by hand.

With ``scale_grads=True``, the default, a call then divides ``.grad`` by its micro-batches, together
with what earlier calls have left there.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from rankscope.errors import UnsupportedError
from rankscope.wrappers.calls import Relay
from rankscope.wrappers.tap import Guarded, guarded

_PACKAGE = "torch.distributed.pipelining"
_RELAYS: dict[type, Relay] = {}


class ScheduleCalls:
    """The calls of schedules for one stage since the last :meth:`collect`."""

    def __init__(
        self,
        module: nn.Module,  # of the stage, inside its wrapper
        guarded: Guarded,
        count_passes: Callable[[], int],  # returns the forward passes of the step so far
        after_call: Sequence[Callable[[], object]],  # called after each call
    ) -> None:
        self._after_call = after_call
        self._module = module
        self._guarded = guarded
        self._count_passes = count_passes
        self._calls: list[tuple[int, float]] = []  # forward passes by then, and the divisor
        relay = _relay()
        self.stop = (lambda: None) if relay is None else relay.subscribe(after=self._see)

    @property
    def found(self) -> bool:
        """Whether there was one."""
        return bool(self._calls)

    def collect(self) -> float:
        """Return by what the gradients were multiplied after the passes, and start again.

        The mean over all forward passes: 1/M after one call with M micro-batches. NaN without one.
        """
        calls = self._calls
        self._calls = []
        if not calls:
            return math.nan
        total = 0.0
        scale = 1.0
        begins = [0, *(passes for passes, _ in calls)]
        for begin, (end, divisor) in zip(reversed(begins[:-1]), reversed(calls), strict=True):
            scale /= divisor
            total += (end - begin) * scale
        return total / max(begins[-1], 1)

    @guarded
    def _see(self, stage: Any, grad_scale_factor: float, *rest: Any, **more: Any) -> None:
        module = stage.submod
        if self._module in (module, getattr(module, "module", None)):
            self._calls.append((self._count_passes(), float(grad_scale_factor)))
            for call in self._after_call:
                call()


class JoinedStages(nn.Module):
    """The stages of a pipeline on one rank as one model, whose parts keep their names."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self._stages = tuple(stages)
        known: dict[str, nn.Parameter] = {}
        for name, parameter in self.named_parameters():
            if known.setdefault(name, parameter) is not parameter:
                raise UnsupportedError(
                    f"two stages of a pipeline on one rank have different parameters named {name}"
                )

    def named_parameters(self, *args: Any, **more: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all stages."""
        return itertools.chain.from_iterable(
            each.named_parameters(*args, **more) for each in self._stages
        )

    def named_buffers(self, *args: Any, **more: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of all stages; of copies in several, the first one."""
        found: dict[str, Tensor] = {}
        for each in self._stages:
            for name, buffer in each.named_buffers(*args, **more):
                found.setdefault(name, buffer)
        return iter(found.items())

    def named_modules(self, *args: Any, **more: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of all stages."""
        return itertools.chain.from_iterable(
            each.named_modules(*args, **more) for each in self._stages
        )


def _relay() -> Relay | None:
    """Return the relay of the end of a schedule's call; None where torch has no such function."""
    stage = getattr(sys.modules.get(_PACKAGE), "PipelineStage", object)
    name = "perform_reduce_grad"
    owner = next((kind for kind in stage.__mro__ if name in vars(kind)), None)
    if owner is None:
        return None
    return _RELAYS.setdefault(owner, Relay(owner, name))
