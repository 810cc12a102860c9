"""The user's functions: found by name before anything is built; a failure is one line."""

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rankscope import RankscopeError
from rankscope.errors import UsageError
from rankscope.tools.doctor.stage import Bench, CheckResult, Facts, Options, Stage, Status

_LIBRARIES = (f"{Path(sys.base_prefix)}/lib/", "site-packages", "dist-packages", "<frozen ")
MAX_MESSAGE = 160
"""Characters of an error's message."""

_BLOCKS = {"model": "model", "optimizer": "model", "loader": "loader"}
"""The stage that each function is for."""


def stages(options: Options) -> list[Stage]:
    """Return one stage per function that is named; it has no result when all is well."""
    return [_stage(option) for option in _BLOCKS if getattr(options, option)]


def not_given(topic: str, options: str = "") -> Stage:
    """Return a stage that is skipped since its options (in words) were not given."""
    options = options or f"--{topic} MODULE:FUNCTION"

    def judge(facts: Sequence[Facts]) -> list[CheckResult]:
        found = f"not asked for: give {options}"
        return [CheckResult(topic, Status.SKIPPED, found)]

    return Stage(topic, lambda bench: {}, judge, needs_group=False)


def _stage(option: str) -> Stage:
    def look(bench: Bench) -> Facts:
        name = getattr(bench.options, option)
        bench.functions[option] = find_function(f"--{option}", name)
        return {}

    return Stage(
        topic=f"{option}_function",
        look=look,
        judge=lambda facts: [],
        needs_group=False,
        blocks=(_BLOCKS[option],),
        advice="The module must be importable on every host, and importing it must not start a "
        "training: keep that under if __name__ == '__main__'.",
    )


def split_name(option: str, name: str) -> tuple[str, str]:
    """Split the ``MODULE:FUNCTION`` of an option; raise UsageError if it has another form."""
    module, colon, function = name.partition(":")
    if not (colon and module and function) or ":" in function:
        raise UsageError(
            f"{option} expected MODULE:FUNCTION, got {name!r}; write for example train:build_model"
        )
    return module, function


def find_function(option: str, name: str) -> Callable[..., Any]:
    """Import a module and return its function.

    Raises:
        UsageError: There is no such module, no such name in it, or it cannot be called.
    """
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


def in_one_line(error: BaseException) -> str:
    """Return an error and its place in one line: ``ValueError: too long (train.py:31)``."""
    lines = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    if isinstance(error, RankscopeError):
        return lines[0].strip() if lines else message
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f for f in reversed(frames) if _is_the_users(f.filename)), None)
    place = place or (frames[-1] if frames else None)
    where = f" ({Path(place.filename).name}:{place.lineno})" if place else ""
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE].rstrip()} …"
    return f"{message}{where}"


def where_it_is(frame: FrameType | None) -> str:
    """Return where a thread is: its innermost line outside of libraries, as words."""
    innermost = frame
    while frame is not None and not _is_the_users(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "an unknown place"
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


def _is_the_users(filename: str) -> bool:
    return not any(part in filename for part in _LIBRARIES) and not filename.startswith("<")
