"""Sees calls of ``backward`` without being on the stack; torch is not imported for it."""

from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from rankscope.private import Patch, available, callers
from rankscope.wrappers.untraced import untraced

_MOST_NODES = 1000


class CallerHook:
    """A function that first passes the frame of its caller to ``see``, which must not raise.

    Python gets its ``__call__``, which is the function, and calls that: so it is never on the stack
    itself.
    """

    def __init__(self, function: Callable[..., Any], see: Callable[[FrameType], None]) -> None:
        self.function = function
        self._see = see
        untraced(vars(CallerHook)["__call__"].fget)

    @property
    def __call__(self) -> Callable[..., Any]:
        """The function; its reader is about to call it."""
        self._see(next(callers()))
        return self.function


class BackwardCalls:
    """Calls ``see`` at every call of ``torch.autograd``'s ``backward`` from now on.

    It gets the frame of ``backward``, whose local variable ``tensors`` holds the roots; it must not
    raise.
    """

    def __init__(self, autograd: Any, see: Callable[[FrameType], None]) -> None:
        self._autograd = autograd
        self._see = see
        self._patch: Patch | None = None
        if available("roots"):
            self._patch = Patch(autograd, "_make_grads", lambda f: CallerHook(f, self._look))

    def _look(self, caller: FrameType) -> None:
        ours = caller.f_globals is vars(self._autograd)
        if ours and caller.f_code.co_name == "backward":
            self._see(caller)

    def remove(self) -> None:
        """Stop, and leave torch as it was."""
        if self._patch is not None:
            self._patch.remove()


def reaches(roots: Iterable[Any], is_wanted: Callable[[Any], bool]) -> bool:
    """Return whether a backward pass from roots reaches a wanted node among the first 1,000."""
    waiting: deque[Any] = deque(root.grad_fn for root in roots)
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        if is_wanted(node):
            return True
        seen.add(node)
        waiting.extend(before for before, _ in node.next_functions)
    return False
