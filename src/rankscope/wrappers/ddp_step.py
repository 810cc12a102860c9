"""The state of a step under DDP, its calls of hooks and of DDP's own methods.

An attribute of the model would be copied along with it; so listeners go on methods of its class.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.calls import Relay

_BROADCAST = Relay(DistributedDataParallel, "_sync_buffers", untraced=True)
_SHADOWED = Relay(DistributedDataParallel, "_match_all_reduce_for_bwd_pass")


@dataclass(slots=True)
class StepState:
    """The state of the step that runs; there is a new one for each.

    Attributes:
        begun: A backward pass that is due has begun.
        carried_over: See :class:`~rankscope.wrappers.tap.LocalGradient`.
        through_ddp: A forward pass went through DDP.
        synchronises: The last forward pass is one whose backward pass reduces.
        settled: The reduction is over.
        reduced_known: The reduced gradient was read.
        reduced_product: Its inner product with the local one.
        earlier: This worker's part of gradients that were reduced in the step, and then added to.
        spoiled: The measurements are not those of the step's local gradient.
    """

    begun: bool = False
    carried_over: Tensor | None = None
    through_ddp: bool = False
    synchronises: bool = False
    settled: bool = False
    reduced_known: bool = False
    reduced_product: Tensor | None = None
    earlier: GradientTotals | None = None
    spoiled: bool = False


class HookCalls:
    """Which parameters' hooks are called in the backward passes of a step, and how often.

    Reentrant checkpointing of a shared parameter calls its hook once per use, and the last call
    sees the whole gradient. A pass that is not measured shows their number.
    """

    def __init__(self) -> None:
        self._expected: dict[str, int] = {}  # where it is not 1
        self._counts: Counter[str] = Counter()  # in this pass
        self._before: set[str] = set()  # in earlier passes of the step

    @property
    def names(self) -> KeysView[str]:
        """The parameters whose hooks were called in the last pass."""
        return self._counts.keys()

    @property
    def whole(self) -> bool:
        """Whether the last pass saw every parameter that the step's earlier passes saw.

        A parameter that only earlier micro-batches used was not read in the last one.
        """
        return self._before <= self._counts.keys()

    def reset(self) -> None:
        """Begin a step."""
        self._counts.clear()
        self._before.clear()

    def begin_pass(self) -> None:
        """Begin a backward pass."""
        self._before |= self._counts.keys()
        self._counts.clear()

    def last_of(self, name: str) -> bool:
        """Count a call; return whether it sees the whole gradient."""
        self._counts[name] += 1
        return self._counts[name] == self._expected.get(name, 1)

    def add(self, names: Iterable[str]) -> None:
        """Count many calls."""
        self._counts.update(names)

    def see_without(self, names: Iterable[str]) -> None:
        """Count one call in the pass for each of these parameters, and none for others."""
        self._counts.clear()
        self._counts.update(names)

    def end_pass(self, late: Collection[str] = ()) -> bool:
        """End a backward pass; return whether a parameter was not called as often as expected.

        Args:
            late: Parameters whose number of calls does not matter: not read in their hooks.
        """
        several = {name: count for name, count in self._counts.items() if count > 1}
        absent = {n: count for n, count in self._expected.items() if n not in self._counts}
        expected, self._expected = self._expected, absent | several
        if expected == self._expected:
            return False
        differ = expected.items() ^ self._expected.items()
        return any(name not in late for name, _ in differ)


class GradientHooks:
    """A hook on each parameter's gradient, or on a few of them.

    Args:
        parameters: The parameters, by name.
        on_gradient: Called with a name and its parameter, once a gradient has been accumulated.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], on_gradient: Callable[[str, Tensor], None]
    ) -> None:
        self._parameters = parameters
        self._on_gradient = on_gradient
        self._handles: dict[str, RemovableHandle] = {}
        self.all = True
        """Whether no parameter is without its hook."""
        self._kept: Collection[str] = ()
        self.keep(tuple(parameters))

    def keep(self, names: Collection[str]) -> None:
        """Have hooks on these parameters alone from now on."""
        if names is self._kept:
            return
        self._kept = names
        wanted = set(names)
        for name in self._handles.keys() - wanted:
            self._handles.pop(name).remove()
        for name in [name for name in names if name not in self._handles]:
            hook = partial(self._on_gradient, name)
            parameter: Any = self._parameters[name]
            self._handles[name] = parameter.register_post_accumulate_grad_hook(hook)
        self.all = len(wanted) == len(self._parameters)

    def go_first(self) -> Collection[str]:
        """Run before all other such hooks; return the names of the parameters that have some."""
        crowded = []
        for name, handle in self._handles.items():
            hooks = getattr(self._parameters[name], "_post_accumulate_grad_hooks", None)
            if isinstance(hooks, dict) and len(hooks) > 1 and handle.id in hooks:
                others = [number for number in hooks if number != handle.id]
                for number in others:  # torch calls them in the order of insertion
                    hooks[number] = hooks.pop(number)
                crowded.append(name)
        return crowded

    def remove(self) -> None:
        """Take all hooks out."""
        self.keep(())


class BusyClock:
    """Times a worker's own work under DDP between two reductions, before it waits for the others.

    Wall time per step is the same on all workers, since all wait for the slowest. They differ in
    the time from the end of one reduction to the last local gradient before the next one.

    The host's clock shows it on the CPU alone: an accelerator works asynchronously. Where DDP
    broadcasts buffers before a forward pass, the time of that broadcast is left out, since workers
    wait there for rank 0.
    """

    def __init__(self, model: DistributedDataParallel, device: torch.device) -> None:
        self._model = ref(model)
        self._on_host = device.type == "cpu" and _BROADCAST.exists
        self._free_at: float | None = None  # when the last reduction had ended
        self._ready_at = math.nan
        self._broadcast_at = 0.0
        self._broadcasting = 0.0
        self._seconds: float | None = None
        self._stop: Callable[[], object] = lambda: None
        if _BROADCAST.exists:
            begin = self._begin_broadcast
            end = self._end_broadcast
            self._stop = _BROADCAST.subscribe(before=begin, after=end)

    @property
    def seconds(self) -> float:
        """How long this worker was busy in the step that has just been reduced; NaN if unknown."""
        return math.nan if self._seconds is None else self._seconds

    def see_gradient(self) -> None:
        """Note that a local gradient is ready; the last call before the reduction counts."""
        self._ready_at = time.perf_counter()

    def see_reduced(self) -> None:
        """Note that a reduction has ended: of every worker's gradient, at about one time."""
        free_at, self._free_at = self._free_at, time.perf_counter()
        before = self._seconds or 0.0  # of other reductions in this step
        if free_at is None or not self._on_host or self._waits_elsewhere():
            self._seconds = math.nan
        else:
            self._seconds = before + self._ready_at - free_at - self._broadcasting
        self._broadcasting = 0.0

    def begin_step(self, *, reduced: bool) -> None:
        """Begin another step; without a reduction, its time since the last one is not known."""
        self._seconds = None
        if not reduced:
            self._free_at = None

    def remove(self) -> None:
        """Stop timing broadcasts; a second call does nothing."""
        self._stop()

    def _begin_broadcast(self, model: object) -> None:
        self._broadcast_at = time.perf_counter()

    def _end_broadcast(self, model: object) -> None:
        if model is self._model():
            self._broadcasting += time.perf_counter() - self._broadcast_at

    def _waits_elsewhere(self) -> bool:
        """Return whether DDP may have waited for other workers inside the backward pass.

        A communication hook may wait for one bucket before it starts the next, as that of
        ``fixed_order`` does. From a ``join()`` on, the first gradient waits until all workers have
        begun their forward pass.
        """
        model = self._model()
        join = getattr(model, "_join_config", None)
        return bool(getattr(model, "_comm_hooks", True) or getattr(join, "enable", False))


class ShadowSteps:
    """Notices the steps that a rank only shadows, since it has run out of data in ``model.join()``.

    Its hooks do not fire in them: DDP calls the reduction itself. The only place that all of these
    steps pass is a method of DDP's class.

    Args:
        model: The wrapped model.
        shadowed: Called after each of them.
    """

    def __init__(self, model: DistributedDataParallel, shadowed: Callable[[], None]) -> None:
        self._model = model
        self._shadowed = shadowed
        self._stop: Callable[[], object] = lambda: None
        if _SHADOWED.exists:
            self._stop = _SHADOWED.subscribe(after=self._see)

    def remove(self) -> None:
        """Stop listening; a second call does nothing."""
        self._stop()

    def _see(self, model: object) -> None:
        if model is self._model:
            self._shadowed()
