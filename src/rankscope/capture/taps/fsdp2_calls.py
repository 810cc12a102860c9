"""Listens to some functions inside of FSDP2.

FSDP2 offers no public place where the local gradient can be read in every layout: the public
``set_custom_reduce_scatter`` is never called with a shard size of 1, replaces the user's own, and
shows padded gradients, in fp16 already divided. A few private functions serve all layouts:

* ``FSDPState._register_root_post_backward_final_callback``, when a backward pass reaches FSDP2;
* ``foreach_reduce``, once for each group of parameters that is about to be reduced;
* ``FSDPState._root_post_backward_final_callback``, at the end of a backward pass that does not
  raise: when it returns, the current stream waits for all reductions of the pass;
* ``FSDPState._end_backward_iteration``, in torch 2.15 and newer: it is there that the stream waits,
  which a training may put off (``set_manual_backward_finalization``), as pipeline schedules do.
"""

import inspect
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state

from rankscope.errors import UnsupportedError

Listener = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""Gets the positional and the named arguments of a call."""


def expect(owner: Any, *names: str) -> None:
    """Check that an object of FSDP2 has the attributes that the monitor uses.

    Raises:
        UnsupportedError: It lacks one.
    """
    for name in names:
        if not hasattr(owner, name):
            named = owner if inspect.isclass(owner) or inspect.ismodule(owner) else type(owner)
            raise UnsupportedError(
                f"watching FSDP2 expected {named.__name__}.{name} in torch, which torch "
                f"{torch.__version__} lacks; use another release of torch or of rankscope"
            )


class Relay:
    """Tells listeners of the calls of a function; in its place while there are any.

    Args:
        owner: The module or class that holds the function.
        name: Its name there.
        before: Whether listeners are told before the call or after it.
    """

    def __init__(self, owner: Any, name: str, *, before: bool) -> None:
        self._owner = owner
        self._name = name
        self._before = before
        self._installed: Any = None
        self._listeners: list[weakref.WeakMethod[Listener]] = []

    @property
    def exists(self) -> bool:
        """Whether this torch has the function."""
        return hasattr(self._owner, self._name)

    def check(self) -> None:
        """Check that the function exists.

        Raises:
            UnsupportedError: It does not.
        """
        expect(self._owner, self._name)

    def add(self, listener: "weakref.WeakMethod[Listener]") -> Callable[[], None]:
        """Tell a bound method of the calls; return what ends that, to be called once.

        When another tool has replaced the function meanwhile, its replacement stays.
        """
        original = getattr(self._owner, self._name)
        if original is not self._installed:
            self._listeners = []
            self._installed = _relaying(original, self._listeners, before=self._before)
            setattr(self._owner, self._name, self._installed)
        installed, listeners = self._installed, self._listeners
        listeners.append(listener)

        def remove() -> None:
            listeners.remove(listener)
            if not listeners and getattr(self._owner, self._name) is installed:
                setattr(self._owner, self._name, installed.__wrapped__)

        return remove


def _relaying(
    original: Any, listeners: "list[weakref.WeakMethod[Listener]]", *, before: bool
) -> Any:
    def tell(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for reference in tuple(listeners):
            listener = reference()
            if listener is not None:
                listener(args, kwargs)

    @wraps(original)
    def relay(*args: Any, **kwargs: Any) -> Any:
        if before:
            tell(args, kwargs)
        result = original(*args, **kwargs)
        if not before:
            tell(args, kwargs)
        return result

    return relay


_BEGIN = Relay(_fsdp_state.FSDPState, "_register_root_post_backward_final_callback", before=False)
_REDUCE = Relay(_fsdp_param_group, "foreach_reduce", before=True)
_END = Relay(_fsdp_state.FSDPState, "_root_post_backward_final_callback", before=False)
_FINALIZE = Relay(_fsdp_state.FSDPState, "_end_backward_iteration", before=False)


def listen(
    *,
    backward_begins: Listener,
    before_reduce: Listener,
    backward_ends: Listener,
    finalized: Listener,
) -> Callable[[], None]:
    """Tell bound methods of all backward passes and reductions in this process.

    It does not keep their object alive. While nobody listens, torch's own functions are in place.

    Args:
        backward_begins: Told of a state of FSDP2 that a backward pass has reached.
        before_reduce: Told of a reduction that is about to start.
        backward_ends: Told of a state of FSDP2 whose backward pass has ended.
        finalized: Told of a state of FSDP2 whose reductions the stream has been made to wait for;
            of one that does so at the end of its backward pass, before ``backward_ends``.

    Returns:
        A function that ends the listening, to be called once.

    Raises:
        UnsupportedError: This torch lacks one of the functions.
    """
    wanted = [(_BEGIN, backward_begins), (_REDUCE, before_reduce), (_END, backward_ends)]
    for relay, _ in wanted:
        relay.check()
    if _FINALIZE.exists:  # since torch 2.15
        wanted.append((_FINALIZE, finalized))
    stops = [relay.add(weakref.WeakMethod(listener)) for relay, listener in wanted]

    def stop() -> None:
        for stop_one in stops:
            stop_one()

    return stop
