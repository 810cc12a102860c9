"""What a canary's forward pass runs: the facts by which workers are compared where results differ.

A result follows from operations in their order with all plain arguments, from the tensors that they
read, and from settings below them. All of these are recorded in one run of a batch:

- ``operations``: each one's module and arguments, what it returned, and the line that called it.
  Those inside of hooks are left out: hooks watch, and a few of them change what they see;
- ``constants``: digests of tensors that are neither state, nor inputs, nor results;
- ``state``: digests of parameters and buffers, without running statistics;
- ``draws``: states of the generators of Python, numpy and torch after the pass, where they moved;
- ``settings``: precision, flags, versions and device;
- ``modules``: mode, class, code and plain attributes of every module, names of hooks, and values
  that its code reads. They explain why operations, or gradients, differ.

Equal texts are kept once: entries are numbers of ``texts``.
"""

import json
import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.bus.probe import Awaited
from rankscope.bus.replicas import RUNNING_STATISTICS
from rankscope.evidence.canary import READ
from rankscope.gradients.digest import digest_tensor
from rankscope.gradients.fingerprint import (
    numpy_state,
    python_state,
    torch_state,
)
from rankscope.gradients.host import HostCopy
from rankscope.gradients.names import canonical_name
from rankscope.stats.arrays import digest_of
from rankscope.wrappers.facts import library_facts, precision_words
from rankscope.wrappers.passes import tensors_in

_log = logging.getLogger("rankscope")

_MOST_OPERATIONS = 2**15
_MOST_CONSTANT_BYTES = 2**26
_MOST_FUNCTIONS = 256  # whose code is digested for one module's class
_LONGEST = 120  # of the text of an attribute
_CALLS = ("_call_impl", "inner")  # torch's functions that call ``forward``, and hooks
_OF_MODULES = nn.Module.__init__.__code__.co_filename
_OF_TORCH = _OF_MODULES.removesuffix("nn/modules/module.py")
_OF_RANKSCOPE = __file__.removesuffix("evidence/canary/program.py")
_GENERATORS = {"Python": python_state, "numpy": numpy_state, "torch": torch_state}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = (str, int, float, bool, type(None), torch.dtype)


class ProgramRecorder:
    """Records the program of one run of a batch."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._parts = {id(part): canonical_name(name) for name, part in module.named_modules()}
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._texts: dict[str, int] = {}
        self._operations: list[int] = []
        self._constants: list[int] = []
        self._constant_bytes = 0
        self._files: dict[CodeType, str] = {}
        self._digests: list[Tensor] = []
        self._before: dict[str, bytes] = {}
        self._failed = False
        self._facts: dict[str, Any] = {
            "modules": {
                canonical_name(name): self._number(describe_module(part))
                for name, part in module.named_modules()
            },
            "settings": {
                **{name: str(value) for name, value in precision_words(module, device).items()},
                **{name: str(value) for name, value in library_facts(device).items()},
                "threads": str(torch.get_num_threads()),
            },
            "state": [canonical_name(name) for name, _ in _state_of(module)],
            "frozen": [canonical_name(n) for n, p in module.named_parameters() if _is_frozen(p)],
        }
        for _, tensor in _state_of(module):
            self._digests.append(digest_tensor(tensor))
        for tensor in (*module.parameters(), *module.buffers()):
            self._know(tensor)
        self.open = False
        """Whether operations are recorded: in the forward pass alone."""

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begin with the inputs of the forward pass, after generators were seeded."""
        for tensor in tensors_in([args, kwargs]):
            self._know(tensor)
        self._before = {name: read() for name, read in _GENERATORS.items()}
        self.open = True

    def end(self) -> None:
        """End the forward pass."""
        self.open = False
        after = {name: read() for name, read in _GENERATORS.items()}
        self._facts["draws"] = {
            name: digest_of(state) for name, state in after.items() if state != self._before[name]
        }

    def see(
        self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Record an operation that has returned; an error of ours ends the record, not the run."""
        if not self.open or len(self._operations) >= 4 * _MOST_OPERATIONS:
            return
        try:
            self._record(operation, args, kwargs, result)
        except Exception as error:
            _log.debug("what a canary runs is not recorded: %r", error)
            self.open = False
            self._failed = True

    def _record(
        self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        place = self._place()
        if place is not None:
            for tensor in _tensors((*args, *kwargs.values())):
                self._note_constant(tensor)
            named = (f"{name}={_text(value)}" for name, value in kwargs.items())
            given = ", ".join((*map(_text, args), *named))
            name = str(operation).removeprefix("aten.").removesuffix(".default")
            line = (place[0], f"{name}({given})", _text(result), place[1])
            self._operations += map(self._number, line)
        for tensor in _tensors((result,)):
            self._know(tensor)

    def pending(self) -> Awaited[dict[str, Any]] | None:
        """Return the record, whose digests may still be on the device; None if it has failed."""
        if self._failed:
            return None
        facts = {**self._facts, "operations": self._operations, "constants": self._constants}
        facts["texts"] = list(self._texts)
        digests = [digest.to(self._device) for digest in self._digests]
        copy = HostCopy(torch.stack(digests)) if digests else None
        return Awaited([copy], partial(_with_digests, facts, copy))

    def _number(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _know(self, tensor: Tensor) -> None:
        self._known[id(tensor)] = weakref.ref(tensor)

    def _note_constant(self, tensor: Tensor) -> None:
        """Digest a tensor that comes from elsewhere."""
        known = self._known.get(id(tensor))
        if known is not None and known() is tensor:
            return
        self._know(tensor)
        self._constant_bytes += tensor.nbytes
        if self._constant_bytes <= _MOST_CONSTANT_BYTES:
            self._constants.append(len(self._operations) // 4)
            self._digests.append(digest_tensor(tensor))

    def _place(self) -> tuple[str, str] | None:
        """Return the module that computes, and the line of the user's that does; None in a hook."""
        line = ""
        called: FrameType | None = None
        frame: FrameType | None = sys._getframe(4)  # above this class and the dispatch mode
        while frame is not None:
            code = frame.f_code
            if code.co_filename == _OF_MODULES and code.co_name in _CALLS:
                module = frame.f_locals.get("self")
                name = self._parts.get(id(module))
                if isinstance(module, nn.Module) and called is not None:
                    if called.f_code in map(_code_of, _hooks(module)):
                        return None
                    line = line or self._line_above(frame)
                    if name is not None:
                        return name, line
            elif not line:
                file = self._file(code)
                line = f"{file}:{frame.f_lineno}" if file else ""
            called = frame
            frame = frame.f_back
        return "", line

    def _line_above(self, frame: FrameType | None) -> str:
        """Return the innermost line outside of torch from a frame upwards."""
        while frame is not None:
            file = self._file(frame.f_code)
            if file:
                return f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _file(self, code: CodeType) -> str:
        """Return the name of a code's file; empty for torch's own."""
        file = self._files.get(code)
        if file is None:
            path = code.co_filename
            file = "" if path.startswith(_OF_TORCH) else path.replace("\\", "/").rpartition("/")[2]
            self._files[code] = file
        return file


def _with_digests(facts: Mapping[str, Any], digests: HostCopy | None) -> dict[str, Any]:
    """Wait for the device; return a record as JSON can hold it."""
    return {**facts, "digests": [] if digests is None else digests.numpy().tolist()}


def program_digest(program: Mapping[str, Any]) -> int:
    """Return a 63-bit digest of all that decides on a result."""
    left_out = ("modules", "texts")
    texts = [program["texts"][number] for number in program["operations"]]
    del texts[3::4]  # lines of the source may differ by a comment
    facts = {name: value for name, value in program.items() if name not in left_out}
    return digest_of(json.dumps([{**facts, "operations": texts}], sort_keys=True).encode())


def _state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    for name, buffer in module.named_buffers():
        if name.rpartition(".")[2] not in RUNNING_STATISTICS:
            yield name, buffer


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _text(value: Any) -> str:
    """Return an argument or result as text, equal on healthy workers: no address, no index."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, _PLAIN):
        return repr(value)
    return (
        str(value)
        if isinstance(value, torch.layout | torch.memory_format)
        else type(value).__qualname__
    )


def _hooks(module: nn.Module) -> list[Any]:
    own = vars(module)
    return [hook for n in _HOOKS for hook in own.get(n, {}).values()]


def _code_of(function: Any) -> CodeType | None:
    """Return the code that runs first where something is called."""
    while isinstance(function, MethodType | partial):
        function = function.__func__ if isinstance(function, MethodType) else function.func
    if not isinstance(function, FunctionType):
        function = vars(type(function)).get("__call__")
    return function.__code__ if isinstance(function, FunctionType) else None


def describe_module(module: nn.Module) -> str:
    """Return mode, class, code, attributes, hooks and frozen parameters of a module, as JSON."""
    own = vars(module)
    kind = type(module)
    code, read = _read_functions([getattr(kind, "forward", None)], kind)  # with what it calls
    facts = {
        "mode": "training" if module.training else "evaluation",
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "code": _digest_of_texts(code),
        "compiled": "yes" if own.get("_compiled_call_impl") is not None else "no",
        "hooks": ", ".join([*map(_name_of, _hooks(module)), *_gradient_hooks(own)]),
        "frozen": ", ".join(n for n, p in own["_parameters"].items() if _is_frozen(p)) or "nothing",
    }
    facts |= {f"{READ}{name}": value for name, value in read.items()}
    for name, value in own.items():
        if name.startswith("_") or name == "training":
            continue
        if isinstance(value, FunctionType | MethodType):
            parts, values = _read_functions([value])
            digest = _digest_of_texts([*parts, *values.values()])
            facts[f".{name}"] = f"{_name_of(value)} {digest}"
        elif _is_plain(value):
            facts[f".{name}"] = repr(value)[:_LONGEST]
        elif not callable(value) and hasattr(value, "__dict__"):  # a configuration
            items = [(n, v) for n, v in vars(value).items() if not n.startswith("_")]
            plain = {f".{name}.{n}": repr(v)[:_LONGEST] for n, v in items if _is_plain(v)}
            facts |= plain if len(plain) <= _MOST_FUNCTIONS else {}
    return json.dumps(facts)


def _gradient_hooks(own: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the training's hooks on gradients of a module, from its ``vars``."""
    hooks = [("", own["_backward_pre_hooks"]), ("", own["_backward_hooks"])]
    for name, parameter in own["_parameters"].items():
        kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
        hooks += [(f" of {name}", getattr(parameter, kind, None)) for kind in kinds]
    for where, registered in hooks:
        for hook in (registered or {}).values():
            code = _code_of(hook)
            if code is None or not code.co_filename.startswith((_OF_RANKSCOPE, _OF_TORCH)):
                yield f"{_name_of(hook)} on the gradient{where}"


def _is_frozen(parameter: Tensor | None) -> bool:
    return parameter is not None and not parameter.requires_grad


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) < _LONGEST and all(map(_is_plain, value))
    if isinstance(value, dict):
        return len(value) < _LONGEST and all(map(_is_plain, (*value, *value.values())))
    return isinstance(value, _PLAIN)


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _read_functions(
    functions: Sequence[Any], kind: type = object
) -> tuple[list[str], dict[str, str]]:
    """Return the bytecode of functions and of those that they name, and the plain values they read.

    These are methods of ``kind``, and functions of the same file; of others, the name counts.
    """
    read: dict[str, str] = {}
    waiting = list(functions)
    parts: list[str] = []
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        function: Any = waiting.pop()
        while isinstance(function, MethodType):
            function = function.__func__
        if id(function) in seen:
            continue
        seen.add(id(function))
        if not isinstance(function, FunctionType):
            parts.append(_name_of(function))
            continue
        codes = list(_codes(function.__code__))
        for code in codes:
            constants = [_constant(c) for c in code.co_consts if not isinstance(c, CodeType)]
            parts.append(f"{code.co_code.hex()} {constants} {code.co_names}")
        values = _own_values(function)
        names = {name for code in codes for name in code.co_names}
        own = function.__globals__
        for name in sorted(names):
            stored = next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), None)
            for value in (stored, own.get(name)):
                same_file = getattr(value, "__module__", None) == own.get("__name__")
                if isinstance(value, FunctionType) and (same_file or value is not own.get(name)):
                    waiting.append(value)
                elif value is not None and isinstance(value, _PLAIN):
                    values[name] = value
        read |= {name: _value(value) for name, value in values.items() if isinstance(value, _PLAIN)}
        waiting += [v for v in values.values() if isinstance(v, FunctionType | MethodType)]
    return parts, read


def _digest_of_texts(parts: Iterable[str]) -> str:
    return f"{digest_of(chr(10).join(parts).encode()):x}"[:8]


def _own_values(function: FunctionType) -> dict[str, Any]:
    """Return what a function has of its closure and its defaults, by names."""
    cells = map(_content, function.__closure__ or ())
    defaults = enumerate(function.__defaults__ or ())
    return {
        **dict(zip(function.__code__.co_freevars, cells, strict=True)),
        **{f"default {place}": value for place, value in defaults},
    }


def _value(value: Any) -> str:
    """Return a plain value; of a text, which may be a secret, a digest."""
    if isinstance(value, str):
        return f"a text {digest_of(value.encode()):x}"[:15]
    return repr(value)[:_LONGEST]


def _constant(value: Any) -> str:
    """Return a constant as text; a set's order is another in each process."""
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None
