"""Launches Triton kernels, many times a step, without Triton's own search for the kernel.

Triton looks at every argument and option of a launch to find the compiled kernel that fits: some
35 microseconds on the host. Here the key of a launch holds only the properties for which Triton
specialises: the constants, and of each argument its type, whether 16 divides it, and whether it is
1.
"""

import functools
from typing import Any

from torch import Tensor

_INT32 = 1 << 31


class Launcher:
    """Launches a kernel; like launches find the compiled kernel at once.

    Args:
        kernel: Made by ``triton.jit``. Its constants come last.
    """

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

        Args:
            programs: Their number.
            arguments: Tensors on that device, a first one at least, and integers.
            options: Of the compilation.
            constants: In the kernel's order.
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


@functools.cache
def launcher(kernel: Any) -> Launcher:
    """Return the launcher of a kernel."""
    return Launcher(kernel)
