"""Objects of the training process, found by their classes."""

import gc
from functools import partial
from itertools import chain, compress, repeat
from typing import Any


def live_objects(*kinds: type) -> dict[type, list[Any]]:
    """Return all living objects of some classes and their subclasses, by class.

    Only the types of objects are read: some objects act at any access.
    """
    kind_of = {id(exact): kind for kind in reversed(kinds) for exact in _with_subclasses(kind)}
    found: dict[type, list[Any]] = {kind: [] for kind in kinds}
    for thing in _objects_of(kind_of):
        found[kind_of[id(type(thing))]].append(thing)
    return found


def _with_subclasses(kind: type) -> set[type]:
    classes, pending = {kind}, [kind]
    while pending:
        new: set[type] = set(type.__subclasses__(pending.pop())) - classes
        classes |= new
        pending += new
    return classes


def _objects_of(classes: dict[int, type]) -> list[Any]:
    """Return the objects whose exact class is one of these, by the identity of the class.

    Python lists tuples that another thread is still building too, and building one fails where
    somebody else refers to it. So all is one call into C, between whose parts no thread can run:
    the lists are made, looked through and dropped within it.
    """
    collects = gc.isenabled()
    gc.disable()  # a collection runs Python code of others
    try:
        twice = chain.from_iterable(map(repeat, map(gc.get_objects, (0, 1, 2)), repeat(2)))
        chosen: Any = twice
        for function in (type, id, classes.__contains__):
            chosen = map(partial(map, function), chosen)
        return list(chain.from_iterable(map(compress, twice, chosen)))
    finally:
        if collects:
            gc.enable()
