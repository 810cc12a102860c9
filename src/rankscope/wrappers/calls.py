"""Calls listeners around functions of torch and DeepSpeed that have no public hook."""

import inspect
import weakref
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from rankscope.errors import UnsupportedError
from rankscope.private import Patch

Listener = Callable[..., None]
"""A bound method; gets the arguments of the call."""


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
    """Calls listeners before and after each call of a function; patches it while there are any.

    Args:
        owner: The module, class or object that holds the function.
        name: Its name there.
        untraced: Whether ``torch.compile`` is to run it as it is.
    """

    def __init__(self, owner: Any, name: str, *, untraced: bool = False) -> None:
        self._owner = owner
        self._name = name
        self._untraced = untraced
        self._patch: Patch | None = None
        self._entering = 0  # subscriptions that are about to begin
        self._before: list[weakref.WeakMethod[Listener]] = []
        self._after: list[weakref.WeakMethod[Listener]] = []

    @property
    def exists(self) -> bool:
        """Whether the owner has the function."""
        return hasattr(self._owner, self._name)

    def subscribe(
        self, *, before: Listener | None = None, after: Listener | None = None
    ) -> Callable[[], object]:
        """Call bound methods of one object around each call; the object is not kept alive.

        When another tool has replaced the function meanwhile, its replacement stays.

        Args:
            before: Called before each call.
            after: Called after each call that has not raised.

        Returns:
            A function that ends the subscription; a second call does nothing. The subscription
            also ends with the object.
        """
        self._entering += 1  # a garbage collection may end the last subscription at any moment
        patch = self._patch
        if patch is None or not patch.in_place:
            self._before = []
            self._after = []
            patch = self._patch = Patch(self._owner, self._name, self._relay)
        lists = self._before, self._after
        added = [
            (listeners, weakref.WeakMethod(listener))
            for listeners, listener in zip(lists, (before, after), strict=True)
            if listener is not None
        ]
        for listeners, reference in added:
            listeners.append(reference)
        self._entering -= 1

        def stop() -> None:
            for listeners, reference in added:
                if reference in listeners:
                    listeners.remove(reference)
            if not any(lists) and not self._entering:
                patch.remove()

        if not isinstance(self._owner, type | ModuleType):
            return stop  # an object's functions go with it
        return weakref.finalize((before or after).__self__, stop)  # type: ignore[union-attr]

    def _relay(self, original: Any) -> Any:
        relay = _relaying(original, self._before, self._after)
        return torch.compiler.disable(relay) if self._untraced else wraps(original)(relay)  # type: ignore[no-untyped-call]


def _relaying(
    original: Any,
    before: "list[weakref.WeakMethod[Listener]]",
    after: "list[weakref.WeakMethod[Listener]]",
) -> Any:
    def relay(*args: Any, **kwargs: Any) -> Any:
        for reference in tuple(before):
            _notify(reference, args, kwargs)
        result = original(*args, **kwargs)
        for reference in tuple(after):
            _notify(reference, args, kwargs)
        return result

    return relay


def _notify(
    reference: "weakref.WeakMethod[Listener]", args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    listener = reference()
    if listener is not None:
        listener(*args, **kwargs)
