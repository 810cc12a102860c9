"""The context of a canary's run: as in training, but without other workers and ``.grad``."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.private import Patch, find
from rankscope.wrappers.surroundings import around_model, why_wait

_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
_modes: Any = find("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
_UNANNOUNCED = ("running_mean", "running_var")  # of batch norm, which its schema calls read-only

ACCUMULATES = (
    "a canary leaves all gradients alone, and the model adds to them by itself, in a backward pass "
    "inside its forward or backward pass (offloaded or reentrant checkpointing, reversible layers)"
)


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast of a device in which a forward pass runs."""

    dtype: torch.dtype
    enabled: bool
    cached: bool = False  # each weight is cast once, so its gradients add up in ``dtype``

    @classmethod
    def in_force(cls, device: torch.device) -> "Autocast":
        """Return the autocast that is in force now."""
        kind = device.type
        enabled = torch.is_autocast_enabled(kind)
        return cls(
            torch.get_autocast_dtype(kind), enabled, enabled and torch.is_autocast_cache_enabled()
        )

    def again(self, device: torch.device, *, cached: bool = False) -> torch.autocast:
        """Return a context with this autocast, with a cache or without."""
        return torch.autocast(
            device.type, dtype=self.dtype, enabled=self.enabled, cache_enabled=cached
        )


class OperationCallbacks(Protocol):
    """Called before the operations of a run."""

    @property
    def before_write(self) -> Callable[[Tensor], None]:
        """Takes each tensor that an operation is about to write into."""

    @property
    def before_draw(self) -> Callable[[torch.Generator], None]:
        """Takes each generator from which an operation may draw."""


SeeOperation = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None]
"""Takes an operation, its arguments by position and by name, and what it has returned."""


@contextmanager
def alone(
    device: torch.device,
    callbacks: OperationCallbacks,  # called before writes and draws
    given: Autocast | None = None,
    see: SeeOperation | None = None,  # called after each operation
    *,
    communicates: bool = False,
    what: str = "a canary runs on each worker alone, and the model's forward pass",
) -> Iterator[None]:
    """Keep the autocast in force without its cache, run eagerly, and forbid communication.

    ``given`` is another autocast to run in. It has no cache inside another one, which would keep
    the cast weights. Where all ranks run the model together, it ``communicates``.

    cuDNN does not benchmark its algorithms here: each worker would choose its own, and healthy
    workers would not agree in their bits.

    Inside, operations that communicate raise :class:`CanaryDeclined`, and so do backward passes
    that accumulate into ``.grad``. ``what`` begins the message of the former. If no model may run
    now, it is raised at once.
    """
    why_not = why_wait()
    if why_not:
        raise CanaryDeclined(why_not)
    outer = Autocast.in_force(device)
    cached = given is not None and given.cached and not outer.enabled
    autocast = (given or outer).again(device, cached=cached)
    mode = _Alone(callbacks, see, what, communicates=communicates)
    stack = ExitStack()
    with_gradients = torch.is_grad_enabled()
    try:
        try:
            for one in (autocast, _eagerly(), _without_benchmark(), around_model()):
                stack.enter_context(one)
            stack.enter_context(_without_accumulation(mode))
            stack.enter_context(mode)
            yield
        finally:
            stack.close()
    finally:
        stack.close()  # the rest, where Ctrl-C came before the first call
        torch.set_grad_enabled(with_gradients)  # Ctrl-C may come before a with statement's end


def _eagerly() -> AbstractContextManager[Any]:
    """Leave compiled code alone: another shape could make it compile anew, for later steps too."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()  # nothing is compiled, and to load the compiler would take seconds
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def _without_benchmark() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes all operations; refuses those that communicate, unless all ranks run the model."""

    supports_higher_order_operators = True

    def __init__(
        self,
        callbacks: OperationCallbacks,
        see: SeeOperation | None,
        what: str,
        *,
        communicates: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._callbacks = callbacks
        self._see = see
        self._what = what
        self._refused = () if communicates else _NAMESPACES
        self._touched: dict[Any, list[tuple[int, str]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass an operation on, unless it communicates."""
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") in self._refused:
            raise CanaryDeclined(f"{self._what} communicates with the others ({func})")
        if func not in self._touched:
            self._touched[func] = _touched_arguments(func)
        for place, name in self._touched[func]:
            value = args[place] if place < len(args) else kwargs.get(name)
            for one in value if isinstance(value, list | tuple) else (value,):
                if isinstance(one, Tensor):
                    self._callbacks.before_write(one)
                elif isinstance(one, torch.Generator):
                    self._callbacks.before_draw(one)
        result = func(*args, **kwargs)
        if self._see is not None:
            self._see(func, args, kwargs, result)
        return result


def _touched_arguments(func: Any) -> list[tuple[int, str]]:
    """Return place and name of the arguments that an operation writes into, or draws from."""
    schema = getattr(func, "_schema", None)
    return [
        (sys.maxsize if argument.kwarg_only else place, argument.name)
        for place, argument in enumerate(() if schema is None else schema.arguments)
        if argument.name in _UNANNOUNCED
        or (argument.alias_info is not None and argument.alias_info.is_write)
        or "Generator" in str(argument.type)
    ]


def _without_accumulation(mode: TorchDispatchMode) -> Patch:
    """Refuse backward passes that accumulate gradients, before they begin.

    The backward passes of this run have its mode, which autograd passes on to its threads.
    """

    def refuse(tensors: Any, gradients: Any) -> None:
        if any(each is mode for each in _modes()):
            raise CanaryDeclined(ACCUMULATES)

    return watch_roots(refuse, lambda: None)


def watch_roots(before: Callable[[Any, Any], None], after: Callable[[], None]) -> Patch:
    """Call functions around each backward pass that accumulates gradients, until it is removed.

    ``backward`` of tensors and of :mod:`torch.autograd` meet in the engine, which all threads of
    the process share. ``before`` takes the tensors on which it is called, and their gradients.
    """
    return Patch(Variable, "_execution_engine", lambda engine: _Engine(engine, before, after))


class _Engine:
    """Autograd's engine, with functions around each backward pass that accumulates."""

    def __init__(
        self, engine: Any, before: Callable[[Any, Any], None], after: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._before = before
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, tensors: Any, grad_tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass."""
        accumulates = kwargs.get("accumulate_grad", False)
        if accumulates:
            self._before(tensors, grad_tensors)
        found = self._engine.run_backward(tensors, grad_tensors, *args, **kwargs)
        if accumulates:
            self._after()
        return found
