"""Calls listeners around functions of torch and DeepSpeed that have no public hook."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import nn

from rankscope.private import Patch, find
from rankscope.wrappers.untraced import transparent, untraced

Listener = Callable[..., None]
"""A bound method; gets the arguments of the call."""


class Relay:
    """Calls listeners before and after each call of a function; patches it while there are any."""

    def __init__(
        self,
        owner: Any,  # module, class or object that holds the function
        name: str,
        *,
        untraced: bool = False,  # torch.compile is to run it as it is
    ) -> None:
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
        """Call bound methods of one object around each call that does not raise.

        The returned function ends that; a second call does nothing. It also ends with the object,
        which is not kept alive. When another tool has replaced the function meanwhile, its
        replacement stays. Without the function, nothing is called.
        """
        if not self.exists:
            return lambda: None
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
    @transparent
    def relay(*args: Any, **kwargs: Any) -> Any:
        for reference in tuple(before):
            notify(reference, args, kwargs)
        result = original(*args, **kwargs)
        for reference in tuple(after):
            notify(reference, args, kwargs)
        return result

    return relay


@untraced
def notify(
    reference: "weakref.WeakMethod[Listener]", args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Call a listener that still lives."""
    listener = reference()
    if listener is not None:
        listener(*args, **kwargs)


_OptimizedModule: Any = find("torch._dynamo.eval_frame.OptimizedModule")
_callback: Callable[[], object] = find("torch._C._dynamo.eval_frame.get_eval_frame_callback") or (
    lambda: True
)
"""Returns the callback that traces all calls now; None if nothing traces."""


class ForeignHook:
    """A hook on an object of the training's that stays behind when that is copied.

    A copy, in memory or in a file, gets a hook that does nothing, and needs no monitor to be
    loaded. ``torch.compile`` never traces what the hook calls.
    """

    def __init__(
        self,
        hook: Callable[..., None],
        *,
        compiled: bool = False,  # call it inside of a compiled graph as well, which that breaks
    ) -> None:
        self._hook = hook
        self._untraced = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
        self._compiled = compiled

    @untraced
    def __call__(self, *args: Any) -> None:
        """Call the hook; it returns nothing, so inputs and outputs stay as they are."""
        if torch.compiler.is_compiling():
            if self._compiled:
                self._untraced(*args)
        elif _callback() is None:
            self._hook(*args)
        else:
            self._untraced(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied and stored as a method of the standard library that takes anything, returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")


class ModuleHook:
    """A pair of functions that run around each call of a module, until it is removed.

    They do not run where the call is a part of a larger compiled graph, or inside of the compiled
    call of another module that has such a pair.
    """

    def __init__(
        self,
        module: nn.Module,  # what the training calls; only a weak reference is kept
        before: Callable[..., None],  # takes it, or the compiled one around it, args and kwargs
        after: Callable[..., None],  # takes the same, and the output
    ) -> None:
        self.before = before
        self.after = after
        self._calls = _calls_of(module) or _Calls(module)
        self._calls.add(self)

    def remove(self) -> None:
        """Call the functions no more; without any, torch and the module are as they were."""
        self._calls.remove(self)


class _Calls:
    """The calls of one module, and the pairs that run around them, the first one first."""

    def __init__(self, module: nn.Module) -> None:
        self.pairs: list[ModuleHook] = []
        self.module = weakref.ref(module)
        self._begins = ForeignHook(self._begin)
        self._ends = ForeignHook(self._end)
        self._hooks: list[Any] = []
        self._in_place: Patch | None = None
        _CALLS[id(module)] = self

    def add(self, pair: ModuleHook) -> None:
        """Run a pair from now on."""
        self.pairs.append(pair)
        if len(self.pairs) == 1:
            self.hook()
            self.follow_compile()
            _patch_torch()

    def remove(self, pair: ModuleHook) -> None:
        """Run a pair no more; without any, torch and the module are as they were."""
        if pair not in self.pairs:
            return
        self.pairs.remove(pair)
        if self.pairs:
            return
        self.unhook()
        if self._in_place is not None:
            self._in_place.remove()
        for key in [key for key, calls in _CALLS.items() if calls is self]:
            del _CALLS[key]
        if not _CALLS:
            _restore_torch()

    def hook(self) -> None:
        """Hook the module's own calls."""
        module = self.module()
        if module is not None and self.pairs:
            self._hooks = [
                module.register_forward_pre_hook(self._begins, with_kwargs=True),
                module.register_forward_hook(self._ends, with_kwargs=True),
            ]

    def unhook(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def follow_compile(self) -> None:
        """Run the pairs around the module's compiled call, if it was compiled in place."""
        module = self.module()
        if getattr(module, "_compiled_call_impl", None) is not None:
            self._in_place = Patch(module, "_compiled_call_impl", self._around)

    @transparent
    def run(self, module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a compiled call, with the pairs around it."""
        if _Here.in_compiled or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        self._begin(module, args, kwargs)
        with _without_hooks():
            output = call(*args, **kwargs)
        self._end(module, args, kwargs, output)
        return output

    def _around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        @transparent
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.run(self.module(), compiled, args, kwargs)

        return call

    @untraced
    def _begin(self, module: Any, args: Any, kwargs: Any) -> None:
        for pair in tuple(self.pairs):
            pair.before(module, args, kwargs)

    @untraced
    def _end(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        for pair in tuple(self.pairs):
            pair.after(module, args, kwargs, output)


_CALLS: "weakref.WeakValueDictionary[int, _Calls]" = weakref.WeakValueDictionary()
"""Those of each module, by its identity; the module's own hooks keep them."""

_patches: list[Patch] = []


@untraced
def _calls_of(module: nn.Module) -> _Calls | None:
    calls = _CALLS.get(id(module))
    return calls if calls is not None and calls.module() is module else None


class _Here:
    in_compiled = False  # whether a compiled call runs, and all our hooks are off


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """Take our hooks off all modules for a compiled call: torch may be about to trace them."""
    hooked = list(_CALLS.values())
    _Here.in_compiled = True
    for calls in hooked:
        calls.unhook()
    try:
        yield
    finally:
        for calls in hooked:
            calls.hook()
        _Here.in_compiled = False


def _patch_torch() -> None:
    """Follow modules that are compiled in place, and of calls of modules that are compiled."""
    if not _patches:
        _patches.append(Patch(nn.Module, "compile", _hearing))
        if _OptimizedModule is not None:
            _patches.append(Patch(_OptimizedModule, "__call__", _calling))


def _restore_torch() -> None:
    for patch in _patches:
        patch.remove()
    _patches.clear()


def _hearing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: A001
        original(self, *args, **kwargs)
        calls = _calls_of(self)
        if calls is not None:
            calls.follow_compile()

    return compile


def _calling(original: Callable[..., Any]) -> Callable[..., Any]:
    @transparent
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls = _calls_of(self._modules["_orig_mod"])
        if calls is None:
            return original(self, *args, **kwargs)
        return calls.run(self, functools.partial(original, self), args, kwargs)

    return call
