"""Launches Triton kernels, many times a step, without Triton's own search for the kernel.

Triton looks at every argument and option of a launch to find the compiled kernel that fits: some
35 microseconds on the host. Here the key of a launch holds only the properties for which Triton
specialises: the constants, and of each argument its type, whether 16 divides it, and whether it is
1. Where launches fail, plain torch takes over.
"""

import functools
import logging
from typing import Any

from torch import Tensor

_INT32 = 1 << 31

_log = logging.getLogger("rankscope")


class Launcher:
    """Launches a kernel of ``triton.jit``; like launches find the compiled kernel at once."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._known: dict[tuple[object, ...], tuple[Any, tuple[Any, ...]]] = {}
        self._looks = True  # whether Triton's compiled kernel can be launched

    def __call__(
        self,
        programs: int,
        *arguments: Any,
        options: dict[str, Any] | None = None,
        **constants: Any,
    ) -> None:
        """Launch so many programs on the current stream of the current device.

        The arguments are tensors on that device, a first one at least, and integers. Constants come
        last, in the kernel's order; ``options`` are those of the compilation.
        """
        key = (arguments[0].device, *constants.values(), *map(_special, arguments))
        known = self._known.get(key)
        if known is not None:
            compiled, values = known
            try:
                compiled[programs, 1, 1](*arguments, *values)
            except (TypeError, AttributeError, KeyError):  # another Triton: nothing was launched
                self._looks = False
                self._known.clear()
            else:
                return
        compiled = self._kernel[(programs,)](*arguments, **constants, **(options or {}))
        if self._looks and hasattr(compiled, "__getitem__"):  # not in the interpreter
            self._known[key] = compiled, tuple(constants.values())


def _special(argument: Any) -> object:
    """Return the properties of an argument for which a kernel is compiled anew."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument == 1, argument % 16 == 0, -_INT32 <= argument < _INT32


launcher = functools.cache(Launcher)
"""Returns the launcher of a kernel."""


def log_fallback(what: str, error: Exception, level: int = logging.DEBUG) -> None:
    """Log that plain torch does the work, since a faster way has failed; training goes on."""
    reason = str(error).strip().split("\n")[0]
    _log.log(level, "%s in plain torch: %s", what, reason)


class Launching:
    """Whether a kernel is still used; after a failure plain torch does its work for good.

    Its work is named in the words of :func:`log_fallback`.
    """

    def __init__(self, what: str) -> None:
        self.possible = True
        self._what = what

    def give_up(self, error: Exception) -> None:
        """Note that it has failed: training goes on, a little slower."""
        self.possible = False
        log_fallback(self._what, error, logging.INFO)
