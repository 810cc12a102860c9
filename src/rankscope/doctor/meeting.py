"""How the workers tell each other what they found: through a store, never by a collective.

Writing to a store needs nobody else, so a worker that hangs or fails holds up no other; those that
wait for its word see that it is missing, and know who it is.
"""

import json
import time
import zlib
from typing import Any, Protocol

PAUSE = 0.01
"""Seconds between two looks at the store."""


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Read a value; waits until there is one."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have been written; does not wait."""


class Meeting:
    """One worker's view of what all workers have written.

    Args:
        store: Where they write.
        rank: This worker's rank.
        num_ranks: Number of workers.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self.store = store
        self.rank = rank
        self.num_ranks = num_ranks

    def post(self, topic: str, value: Any) -> None:
        """Write this worker's word on a topic: plain JSON values."""
        self._set(f"{topic}/{self.rank}", value)

    def announce(self, topic: str, value: Any = True) -> None:
        """Write a word that is for all."""
        self._set(topic, value)

    def heard(self, topic: str) -> Any:
        """Return what was announced, or None when nothing was yet."""
        return self._get(topic) if self.store.check([topic]) else None

    def said(self, topic: str) -> dict[int, Any]:
        """Return what workers have posted on a topic so far, by rank."""
        keys = {rank: f"{topic}/{rank}" for rank in range(self.num_ranks)}
        if not self.store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: self._get(key) for rank, key in keys.items()}

    def collect(self, topic: str, until: float) -> dict[int, Any]:
        """Wait until all workers have posted on a topic, or until a time of ``time.monotonic``.

        Returns:
            What came by then, by rank.
        """
        keys = [f"{topic}/{rank}" for rank in range(self.num_ranks)]
        while not self.store.check(keys) and time.monotonic() < until:
            time.sleep(PAUSE)
        return self.said(topic)

    def wait(self, topics: tuple[str, ...], until: float) -> bool:
        """Wait until one of the topics was announced; whether it was in time."""
        while not any(self.store.check([topic]) for topic in topics):
            if time.monotonic() > until:
                return False
            time.sleep(PAUSE)
        return True

    def count_in(self, topic: str) -> int:
        """Return how many have called this for a topic, this call included."""
        return self.store.add(topic, 1)

    def _set(self, key: str, value: Any) -> None:
        self.store.set(key, zlib.compress(json.dumps(value).encode()))

    def _get(self, key: str) -> Any:
        return json.loads(zlib.decompress(self.store.get(key)))
