from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest

from rankscope.bus.shares import Packable, PackedError, Waiting
from rankscope.stats.arrays import Floats, Ints


@dataclass(frozen=True, slots=True)
class Inner(Packable):
    values_N: Ints
    note: str = ""


@dataclass(frozen=True, slots=True)
class Outer(Packable):
    rank: int
    lines: Mapping[str, tuple[int, ...]]
    by_age: Mapping[int, Floats]
    parts: tuple[Inner, ...]
    weight: float | None = None
    content: bytes = b""

    @property
    def fits(self) -> bool:
        return self.rank >= 0


SENT = Outer(
    3, {"tp": (1, 2)}, {4: np.array([[0.5, np.nan]])}, (Inner(np.arange(3), "ü"),), None, b"x"
)


def test_a_share_comes_back_with_its_types():
    got = Outer.unpack(memoryview(SENT.pack()))
    assert (got.rank, got.lines, got.weight, got.content) == (3, {"tp": (1, 2)}, None, b"x")
    np.testing.assert_array_equal(got.by_age[4], SENT.by_age[4])
    np.testing.assert_array_equal(got.parts[0].values_N, np.arange(3))
    assert got.parts[0].note == "ü"
    assert Outer.unpack(replace(SENT, weight=2.0).pack()).weight == 2.0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1" * 40,
        SENT.pack()[:-8],
        SENT.parts[0].pack(),
        replace(SENT, rank=-1).pack(),
        replace(SENT, lines={"tp": 7}).pack(),
        replace(SENT, parts=(Inner(np.ones(3)),)).pack(),
    ],
)
def test_other_bytes_are_an_error(content):
    with pytest.raises(PackedError):
        Outer.unpack(content)


def test_shares_wait_until_all_have_come_and_the_oldest_are_dropped():
    waiting = Waiting[int, str](most=2)
    assert [waiting.add(step, 0, "a", 2) for step in (1, 2, 3)] == [None] * 3
    assert waiting.add(1, 1, "b", 2) is None
    assert waiting.add(3, 1, "b", 2) == {0: "a", 1: "b"}
