"""Acts on a module right after it was imported, whenever that is; imports nothing itself."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport:
    """A finder that finds nothing of its own, and lets others know when a module has been loaded.

    Args:
        wanted: What to call with each module, by its full name.
    """

    def __init__(self, wanted: dict[str, Callable[[ModuleType], None]]) -> None:
        self._wanted = dict(wanted)

    def install(self) -> None:
        """Watch imports from now on; modules that are there already are acted on at once."""
        for name in list(self._wanted):
            module = sys.modules.get(name)
            if module is not None:
                self._wanted.pop(name)(module)
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Watch imports no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find for a wanted module; None for all others."""
        act = self._wanted.pop(name, None)
        if act is None:
            return None
        for finder in list(sys.meta_path):
            find: Any = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = (
                find(name, path, target) if find and finder is not self else None
            )
            if spec is not None:
                if spec.loader is not None:
                    _act_after(spec.loader, act)
                return spec
        return None


def _act_after(loader: Any, act: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def execute_and_act(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        act(module)

    loader.exec_module = execute_and_act
