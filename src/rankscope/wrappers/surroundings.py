"""Leaves the contexts of the training's call for as long as our work takes.

An activation checkpoint counts the tensors that a graph saves, offloading moves them, a dispatch
mode sees (or keeps, or replaces) all computations. None of these contexts may see our work, and
none may change it. So our work runs outside of them, and then all are restored.

Some contexts cannot be left: a recomputation, a captured graph, a trace, a transform. A forward
pass there is none of the training's.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import starmap
from typing import Any

import torch
from torch.nn.modules import module as modules

from rankscope.private import find, lacking
from rankscope.wrappers.passes import in_backward

_top_hooks: Any = find("torch._C._autograd._top_saved_tensors_default_hooks")
_profiled: Any = find("torch._C._autograd._profiler_enabled")
_set_recorded: Any = find("torch._C._autograd._enable_record_function")
_Range: Any = find("torch._C._profiler._RecordFunctionFast")
_InferenceMode: Any = find("torch._C._InferenceMode")
_num_dispatch: Any = find("torch._C._len_torch_dispatch_stack")
_num_function: Any = find("torch._C._len_torch_function_stack")
_transformed: Any = find("torch._C._are_functorch_transforms_active")
_tracing_state: Any = find("torch._C._get_tracing_state")
_mode_of_kind: Any = find("torch._C._get_dispatch_mode")
_Kind: Any = find("torch._C._TorchDispatchModeKey")
_forward_ad: Any = find("torch.autograd.forward_ad")
_DeviceContext: Any = find("torch.utils._device.DeviceContext")
_CAN_LEAVE = not lacking("canary")
_TRACES = ("FAKE", "FUNCTIONAL", "PROXY")

_ON_ALL_MODULES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def surrounded() -> bool:
    """Return whether any context would see our work, or change it."""
    return _CAN_LEAVE and (
        _top_hooks(True) is not None
        or _num_dispatch() > 0
        or _num_function() > 0
        or torch.is_inference_mode_enabled()
        or _profiled()
    )


def traced() -> bool:
    """Return whether the present computation is none of the training's.

    It is traced, transformed or captured, to be run later, elsewhere or otherwise.
    """
    if not _CAN_LEAVE:
        return False
    return (
        _transformed()
        or _tracing_state() is not None
        or (_num_dispatch() > 0 and any(_mode_of_kind(getattr(_Kind, k)) for k in _TRACES))
        or _captured()
    )


def _captured() -> bool:
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def why_wait() -> str:
    """Return why no model may be run for us now, though the training runs it; empty if it may."""
    if in_backward():
        return "a checkpoint runs the forward pass inside a backward pass"
    if getattr(_forward_ad, "_current_level", -1) >= 0:
        return "the forward pass runs under forward-mode differentiation"
    return ""


def has_left_contexts() -> bool:
    """Return whether our present work runs outside of contexts of the training."""
    return _here.left is not None


def has_left_modes() -> bool:
    """Return whether our present work has left dispatch modes, which will be restored."""
    return _here.left is not None and bool(_here.left.dispatch_modes.entries)


def outside(work: Callable[..., None], *args: Any) -> None:
    """Run work outside of all contexts of the training's call."""
    if not surrounded() or _here.left is not None:
        work(*args)
        return
    left = _LeftContexts()
    try:
        try:
            left.leave()
            work(*args)
        finally:
            left.put_back()
    finally:
        left.put_back()  # the rest of it where Ctrl-C came before the first call
        for later in left.later:
            later()


def once_back(work: Callable[[], None]) -> None:
    """Run work when the contexts that our present work has left are restored, or now."""
    if _here.left is None:
        work()
    else:
        _here.left.later.append(work)


@contextmanager
def around_model() -> Iterator[None]:
    """Run a model for us as the training runs it: with gradients, and on its default device.

    Autograd's anomaly mode, which is the whole process's, is left, and so are hooks on all modules.
    """
    device = None if _here.left is None else _here.left.device
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    hooks = {name: getattr(modules, name) for name in _ON_ALL_MODULES}
    pushed = False
    try:
        torch.set_anomaly_enabled(False)
        for name in hooks:
            setattr(modules, name, OrderedDict())
        if device is not None:
            pushed = True
            torch._C._push_on_torch_function_stack(device)
        with torch.enable_grad():
            yield
    finally:
        if pushed and _num_function():
            torch._C._pop_torch_function_stack()
        for name, before in hooks.items():
            setattr(modules, name, before)
        torch.set_anomaly_enabled(*anomaly)


class _Here(threading.local):
    left: "_LeftContexts | None" = None


_here = _Here()

_Entry = tuple[Any, ...]


class _Stack:
    """A stack of the thread's: taken off, and put back in order.

    C code counts the entries on their way, so that no Ctrl-C can come in between.
    """

    def __init__(
        self,
        top: Callable[[], _Entry | None],  # returns the top entry, as arguments of ``push``
        pop: Callable[..., object],  # a function of C
        push: Callable[..., object],  # likewise
        which: _Entry = (),  # the argument of ``pop``
    ) -> None:
        self._top = top
        self._pop = pop
        self._push = push
        self._which = which
        self._found: list[_Entry] = []
        self._popped: list[object] = []
        self._pushed: list[object] = []

    @property
    def entries(self) -> list[_Entry]:
        """The entries that were taken off, from the top down."""
        return self._found[: len(self._popped)]

    def leave(self) -> None:
        """Take all off."""
        while (top := self._top()) is not None:
            self._found.append(top)
            self._popped.extend(starmap(self._pop, (self._which,)))

    def put_back(self) -> None:
        """Put the remaining entries back."""
        while len(self._pushed) < len(self._popped):
            entry = self._found[len(self._popped) - 1 - len(self._pushed)]
            self._pushed.extend(starmap(self._push, (entry,)))


class _LeftContexts:
    """The contexts that :func:`outside` has left; ``device`` is the default one, if one is set."""

    def __init__(self) -> None:
        core = torch._C
        self.dispatch_modes = _Stack(
            lambda: _top_mode(_num_dispatch, core._get_dispatch_stack_at),
            core._pop_torch_dispatch_stack,
            core._push_on_torch_dispatch_stack,
            (None,),
        )
        self._function_modes = _Stack(
            lambda: _top_mode(_num_function, core._get_function_stack_at),
            core._pop_torch_function_stack,
            core._push_on_torch_function_stack,
        )
        self._saved_tensors = _Stack(
            lambda: _top_hooks(True),
            core._autograd._pop_saved_tensors_default_hooks,
            core._autograd._push_saved_tensors_default_hooks,
        )
        self._stacks = self.dispatch_modes, self._function_modes, self._saved_tensors
        self._forbidden = core._autograd._saved_tensors_hooks_get_disabled_error_message()
        self._inference: Any = None
        self._range: Any = None
        self.device: Any = None
        self.later: list[Callable[[], None]] = []

    def leave(self) -> None:
        """Leave the contexts; a profiler sees one range."""
        _here.left = self
        if _profiled():
            self._range = _Range("rankscope")
            self._range.__enter__()
            _set_recorded(False)
        for stack in self._stacks:
            stack.leave()
        modes = [mode for (mode,) in self._function_modes.entries]
        self.device = next((mode for mode in modes if isinstance(mode, _DeviceContext)), None)
        if torch.is_inference_mode_enabled():
            self._inference = _InferenceMode(False)
            self._inference.__enter__()

    def put_back(self) -> None:
        """Restore the contexts; those that were restored already stay as they are."""
        try:
            self._put_back()
        except Exception:
            raise
        except BaseException:  # Ctrl-C in the middle of it
            self._put_back()
            raise

    def _put_back(self) -> None:
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
            self._inference = None
        autograd = torch._C._autograd
        if self._forbidden is not None and self._saved_tensors.entries:  # further ones
            autograd._saved_tensors_hooks_enable()
        for stack in self._stacks:
            stack.put_back()
        if self._forbidden is not None:
            autograd._saved_tensors_hooks_disable(self._forbidden, fail_if_non_empty=False)
        if self._range is not None:
            _set_recorded(True)
            self._range.__exit__(None, None, None)
            self._range = None
        _here.left = None


def _top_mode(count: Callable[[], int], at: Callable[[int], Any]) -> _Entry | None:
    height = count()
    return (at(height - 1),) if height else None
