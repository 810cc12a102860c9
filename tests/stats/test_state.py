import math
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import pytest

from rankscope.stats.state import StateError, Stateful


class Colour(IntEnum):
    RED = 1
    BLUE = 2


class Inner(Stateful):
    __slots__ = ("values",)

    def __init__(self, size=0):
        self.values = np.zeros(size)


@dataclass(frozen=True, slots=True)
class Mark(Stateful):
    step: int
    score: float
    where: tuple[int, ...] = ()


class Outer(Stateful):
    SETTINGS = ("limit",)

    def __init__(self, limit):
        self.limit = limit
        self.number = 0.0
        self.maybe = None
        self.best = None
        self.marks = {}
        self.colour = Colour.RED
        self.pairs = {}
        self.seen = set()
        self.recent = deque(maxlen=3)
        self.history = []
        self.inner = Inner(2)
        self.inners = (Inner(1), Inner(1))
        self.flags = np.zeros((2, 2), bool)


def filled():
    outer = Outer(7)
    outer.number = -math.inf
    outer.maybe = (1, "two", 3.5)
    outer.best = Mark(3, math.inf, (1, 2))
    outer.marks = {7: Mark(4, 0.1), 9: None}
    outer.colour = Colour.BLUE
    outer.pairs = {(0, 3): (1, 2), "text": [np.arange(3), {4}]}
    outer.seen = {(1, 2), (3,)}
    outer.recent.extend(range(5))
    outer.history = [(np.array([2.0**-1074, np.nan]), np.int64(5))]
    outer.inner.values = np.array([0.1, -0.0, np.inf])
    outer.inners[1].values[:] = 9
    outer.flags[1] = True
    return outer


def test_an_object_goes_on_with_the_same_values_of_the_same_kinds():
    restored, original = Outer(8), filled()
    restored.restore(original.state())
    assert restored.limit == 8
    for name in ("number", "maybe", "best", "marks", "colour", "pairs", "recent", "flags"):
        assert repr(getattr(restored, name)) == repr(getattr(original, name))
    assert restored.seen == {(1, 2), (3,)}
    assert restored.history[0][0].tobytes() == original.history[0][0].tobytes()
    assert restored.history[0][1] == 5
    assert repr(restored.inner.values) == repr(original.inner.values)
    assert [inner.values.tolist() for inner in restored.inners] == [[0], [9]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s.pop("number"), "other fields of Outer"),
        (lambda s: s.update(number="many"), "expected a float, got a str"),
        (lambda s: s.update(colour={"enum": 9}), "no member 9"),
        (lambda s: s.update(number={"object": {}, "class": "os.system"}), "no class os.system"),
        (lambda s: s.update(flags=np.zeros((2, 2))), "expected an array of bool with 2 axes"),
        (lambda s: s.update(seen={"set": 3}), "no value in"),
    ],
)
def test_what_does_not_fit_is_refused(change, told):
    state = filled().state()
    change(state)
    with pytest.raises(StateError, match=told):
        Outer(7).restore(state)
