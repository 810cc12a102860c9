"""Listens to functions of torch and DeepSpeed, where they offer no public place to look."""

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
"""A bound method; gets what a function was called with."""


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
        owner: The module, class or object that holds the function.
        name: Its name there.
        untraced: Whether ``torch.compile`` is to run it as it is.
    """

    def __init__(self, owner: Any, name: str, *, untraced: bool = False) -> None:
        self._owner = owner
        self._name = name
        self._untraced = untraced
        self._patch: Patch | None = None
        self._before: list[weakref.WeakMethod[Listener]] = []
        self._after: list[weakref.WeakMethod[Listener]] = []

    @property
    def exists(self) -> bool:
        """Whether the owner has the function."""
        return hasattr(self._owner, self._name)

    def tell(
        self, *, before: Listener | None = None, after: Listener | None = None
    ) -> Callable[[], object]:
        """Tell bound methods of one object of the calls; it is not kept alive.

        When another tool has replaced the function meanwhile, its replacement stays.

        Args:
            before: Told before each call.
            after: Told after each call that has not raised.

        Returns:
            What ends that; a second call does nothing. With their object it ends by itself.
        """
        patch = self._patch
        if patch is None or not patch.in_place:
            self._before = []
            self._after = []
            patch = self._patch = Patch(self._owner, self._name, self._relay)
        lists = self._before, self._after
        told = [
            (listeners, weakref.WeakMethod(listener))
            for listeners, listener in zip(lists, (before, after), strict=True)
            if listener is not None
        ]
        for listeners, reference in told:
            listeners.append(reference)

        def stop() -> None:
            for listeners, reference in told:
                if reference in listeners:
                    listeners.remove(reference)
            if not any(lists):
                patch.remove()

        if not isinstance(self._owner, type | ModuleType):
            return stop  # an object's functions go with it
        return weakref.finalize((before or after).__self__, stop)  # type: ignore[union-attr]

    def _relay(self, original: Any) -> Any:
        relay = _relaying(original, self._before, self._after)
        return torch.compiler.disable(relay) if self._untraced else wraps(original)(relay)  # type: ignore[no-untyped-call]


def _relaying(
    original: Any,
    told_before: "list[weakref.WeakMethod[Listener]]",
    told_after: "list[weakref.WeakMethod[Listener]]",
) -> Any:
    def relay(*args: Any, **kwargs: Any) -> Any:
        for reference in tuple(told_before):
            _tell(reference, args, kwargs)
        result = original(*args, **kwargs)
        for reference in tuple(told_after):
            _tell(reference, args, kwargs)
        return result

    return relay


def _tell(
    reference: "weakref.WeakMethod[Listener]", args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    listener = reference()
    if listener is not None:
        listener(*args, **kwargs)
