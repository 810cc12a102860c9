"""Hooks into a script that are never on its stack; torch is not imported for them."""

import atexit
import contextlib
import functools
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing import util
from types import ModuleType
from typing import Any

from rankscope.private import Patch
from rankscope.wrappers.untraced import untraced


class AfterImport:
    """A finder that finds nothing, and calls a function by name once its module is loaded."""

    def __init__(self, wanted: dict[str, Callable[[ModuleType], None]]) -> None:
        self._wanted = dict(wanted)

    def install(self) -> None:
        """Watch imports from now on; call at once for modules that are loaded already."""
        for name in list(self._wanted):
            module = sys.modules.get(name)
            if module is not None:
                self._wanted.pop(name)(module)
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop watching imports."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec of a wanted module; None for all others."""
        act = self._wanted.pop(name, None)
        if act is None:
            return None
        others = [each for each in sys.meta_path if each is not self]
        for finder in [each for each in others if hasattr(each, "find_spec")]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _act_after(spec.loader, act)
                return spec
        return None


def _act_after(loader: Any, act: Callable[[ModuleType], None]) -> None:
    def execute_and_act(module: ModuleType) -> None:
        patch.remove()
        loader.exec_module(module)
        act(module)

    patch = Patch(loader, "exec_module", lambda _: execute_and_act)


class CallHook:
    """A ``__call__`` of a class that passes the instance to ``before`` first.

    It is a descriptor: Python gets the method from it and calls that itself. So it is never on the
    stack while the method runs.
    """

    def __init__(self, holder: Any, before: Callable[[Any], None]) -> None:
        self.holder = holder
        self._before = before
        self._own: Any = vars(holder).get("__call__")
        untraced(CallHook.__get__)
        self._patch = Patch(holder, "__call__", lambda _: self)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None:
            self._before(instance)
        if self._own is not None:
            return self._own.__get__(instance, owner)
        above: Any = super(self.holder, owner if instance is None else instance)
        return above.__call__

    def remove(self) -> None:
        """Leave the class as it was."""
        self._patch.remove()


def closing_first(scope: Any, end: Callable[..., Any]) -> Callable[..., Any]:
    """Return a framework's method that closes a scope, and then ends a training.

    The run is incomplete if an exception is being handled.
    """

    @functools.wraps(end)
    def close_and_end(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            scope.__exit__(*sys.exc_info())
        return end(*args, **kwargs)

    return close_and_end


def at_end(owner: Any, finish: Callable[[], None]) -> None:
    """Call a function of an object when the process ends."""
    atexit.register(finish)
    if multiprocessing.parent_process() is not None:  # which may end without atexit
        util.Finalize(owner, finish, exitpriority=100)
