"""The state of an object as plain data, to continue after a restart without pickle.

A class that derives from :class:`Stateful` needs no code for it::

    class Counter(Stateful):
        SETTINGS = ("_limit",)          # given to the constructor; no part of the state

        def __init__(self, limit: int) -> None:
            self._limit = limit
            self._seen: dict[int, int] = {}

    state = before.state()              # {"_seen": {"dict": [[7, 1]]}}
    after = Counter(3)
    after.restore(state)                # continues where `before` stood

Attributes may be None, numbers, text, members of an enumeration, numpy arrays, other ``Stateful``
objects, and tuples, lists, sets, deques and dicts of these. A ``Stateful`` dataclass is made anew;
any other object, and an enumeration, is restored into the one that the constructor (or a default of
the dataclass) has put in its place; an object where there is none, into a new one, if its
constructor needs no arguments. Objects are identified by the name of their class, wherever it is
defined.
"""

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, ClassVar

import numpy as np

State = Mapping[str, Any]
"""Nested mappings of str and lists, whose leaves are numpy arrays, numbers, text and None."""

_TAGS: Mapping[type, str] = {
    tuple: "tuple",
    list: "list",
    set: "set",
    frozenset: "frozenset",
    deque: "deque",
    dict: "dict",
}
_KINDS = {tag: kind for kind, tag in _TAGS.items()}

_CLASSES: dict[str, type["Stateful"]] = {}


_OTHERS = "another version of rankscope wrote their state, with other fields of {}"


class StateError(ValueError):
    """A state that does not fit the object to restore."""


class Stateful:
    """Gives ``state`` and ``restore`` to a class, over all attributes that are not ``SETTINGS``."""

    __slots__ = ()

    SETTINGS: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        _CLASSES[cls.__name__] = cls

    def state(self) -> State:
        """Return a copy of the object's state; TypeError where an attribute cannot be saved."""
        return {name: _encode(getattr(self, name)) for name in self._attributes()}

    def restore(self, state: State) -> None:
        """Continue from the state of an object of the same build, the result of its ``state``.

        StateError: it has other attributes, or values of another kind; the object is of no use.
        """
        names = self._attributes()
        if set(state) != set(names):
            raise StateError(_OTHERS.format(type(self).__name__))
        for name in names:
            setattr(self, name, _decode(state[name], getattr(self, name)))

    def _attributes(self) -> list[str]:
        own: type[Any] = type(self)
        if is_dataclass(own):
            return [field.name for field in fields(own)]
        slots = [name for kind in type(self).__mro__ for name in getattr(kind, "__slots__", ())]
        return [n for n in (*slots, *getattr(self, "__dict__", ())) if n not in self.SETTINGS]


def _encode(value: Any) -> Any:
    if isinstance(value, Stateful):
        return {"object": value.state(), "class": type(value).__name__}
    if isinstance(value, Enum):
        return {"enum": value.value}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.copy()
    if isinstance(value, np.bool_ | np.integer | np.float64):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    tag = _TAGS.get(type(value))
    if tag is None:
        raise TypeError(f"a {type(value).__name__} cannot be part of a state")
    if isinstance(value, dict):
        return {tag: [[_encode(key), _encode(item)] for key, item in value.items()]}
    items = {tag: [_encode(item) for item in value]}
    return {**items, "maxlen": value.maxlen} if isinstance(value, deque) else items


def _decode(encoded: Any, now: Any = None) -> Any:
    """Return a value from its state; ``now`` is the value to replace, None if unknown."""
    if isinstance(encoded, Mapping):
        value = _decode_tagged(encoded, now)
    else:
        value = encoded.copy() if isinstance(encoded, np.ndarray) else encoded
    if not _may_replace(value, now):
        raise StateError(f"expected {_kind(now)}, got {_kind(value)}")
    return value


def _decode_tagged(encoded: Mapping[str, Any], now: Any) -> Any:
    if "object" in encoded:
        return _decode_object(encoded, now)
    if "enum" in encoded:
        if not isinstance(now, Enum) or encoded["enum"] not in [m.value for m in type(now)]:
            raise StateError(f"there is no member {encoded['enum']!r} to take")
        return type(now)(encoded["enum"])
    tag, items = next(((tag, encoded[tag]) for tag in _KINDS if tag in encoded), ("", ()))
    if not tag or not isinstance(items, list):
        raise StateError(f"there is no value in {list(encoded)}")
    if tag == "dict":
        old = now if isinstance(now, dict) else {}
        keys = [_decode(key) for key, _ in items]
        return {key: _decode(item[1], old.get(key)) for key, item in zip(keys, items, strict=True)}
    before = list(now) if isinstance(now, tuple | list | deque) else []
    before += [None] * (len(items) - len(before))
    values = [_decode(item, old) for item, old in zip(items, before, strict=False)]
    return deque(values, encoded.get("maxlen")) if tag == "deque" else _KINDS[tag](values)


def _decode_object(encoded: Mapping[str, Any], now: Any) -> Any:
    name = encoded["class"].rpartition(".")[2]
    state = encoded["object"]
    kind: type[Any] | None = _CLASSES.get(name)
    if kind is None:
        raise StateError(f"there is no class {encoded['class']}")
    if is_dataclass(kind):
        usual = {each.name: None if each.default is MISSING else each.default
                 for each in fields(kind)}  # fmt: skip
        if state.keys() != usual.keys():
            raise StateError(_OTHERS.format(kind.__name__))
        return kind(**{name: _decode(item, usual[name]) for name, item in state.items()})
    if now is None:
        with suppress(TypeError):  # its constructor needs arguments
            now = kind()
    if type(now).__name__ != name or not isinstance(now, Stateful):
        raise StateError(f"there is no {name} to take this state")
    now.restore(state)
    return now


def _may_replace(value: Any, now: Any) -> bool:
    """Return whether a value is of a kind that may stand where ``now`` stands."""
    if now is None or value is None:
        fixed = isinstance(now, np.ndarray | Enum | Stateful) and not is_dataclass(type(now))
        return not fixed
    if isinstance(now, np.ndarray):
        return isinstance(value, np.ndarray) and _kind(value) == _kind(now)
    if isinstance(now, bool | int | float) and not isinstance(now, Enum):
        return isinstance(value, bool | int | float)
    return type(value) is type(now)


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with {value.ndim} axes"
    return f"a {type(value).__name__}"
