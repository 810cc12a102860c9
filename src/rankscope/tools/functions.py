"""Functions that users name on the command line as MODULE:FUNCTION."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankscope.errors import UsageError


def split_name(option: str, name: str) -> tuple[str, str]:
    """Split the ``MODULE:FUNCTION`` of an option; raise UsageError if it has another form."""
    module, colon, function = name.partition(":")
    if not (colon and module and function) or ":" in function:
        raise UsageError(
            f"{option} expected MODULE:FUNCTION, got {name!r}; write for example train:build_model"
        )
    return module, function


def find_function(option: str, name: str) -> Callable[..., Any]:
    """Import a module and return its function; UsageError without one that can be called."""
    module, function = split_name(option, name)
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"{option} {name}: there is no module {module!r} here; run from the folder that holds "
            "it, or install it"
        ) from error
    for part in function.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UsageError(
            f"{option} {name}: module {module!r} has no function {function!r}; check the name"
        )
    function_found: Callable[..., Any] = found
    return function_found
