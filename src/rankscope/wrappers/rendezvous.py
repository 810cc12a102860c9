"""All ranks meet once, before the first step, in the store of the training's process group.

No process group is made for it. Each rank writes a message; rank 0 reads all and answers.
"""

import contextlib
import hashlib
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from rankscope.errors import RunError, UnsupportedError
from rankscope.wrappers.ranks import ranks_of

PATIENCE_SECONDS = 1800.0
"""How long a rank waits for the others at most; they may still load their data."""

PATIENCE_SHARE = 0.8
"""Of the group's own timeout: a rank that does not watch may wait for the others in a collective,
and is not to be ended by it."""

BEGIN_SECONDS = 120.0
"""How long a rank waits for others that are to begin together with it."""

_GO = "go"
_NOT_THE_SAME = "gradients, state or shapes to gather differ between the ranks"
_POLL_SECONDS = 0.01

_FIRST_SLEEP = 0.001
_LONGEST_SLEEP = 0.1

_meetings: Counter[str] = Counter()


class LateError(RunError):
    """A rank does not come."""


class Rendezvous:
    """One meeting of all ranks of a data-parallel group.

    Every rank constructs it at the same point of the program.

    The store may hold messages of an earlier attempt of the job: ``torchrun`` keeps it over
    restarts, and its count of them may differ between nodes. So the keys of a meeting carry a token
    that rank 0 draws, and each rank uses it only once rank 0 has repeated the rank's own token.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,  # the data-parallel one, or one that holds all ``ranks``
        ranks: Sequence[int] | None = None,  # that meet; None: those of the group
        *,
        patience_seconds: float = math.inf,  # for the others; never more than PATIENCE_SECONDS
    ) -> None:
        kind = "" if ranks is None else "mesh/"
        ranks = ranks_of(group) if ranks is None else list(ranks)
        self.ranks = tuple(ranks)
        self.rank = ranks.index(dist.get_rank())
        self.num_workers = len(ranks)
        name = kind + hashlib.blake2b(json.dumps(ranks).encode(), digest_size=8).hexdigest()
        self._place = f"rankscope/{name}/{_meetings[name]}"
        _meetings[name] += 1
        self._token = secrets.token_hex(8)
        self._name = f"{self._place}/{self._token}"
        self._store = default_store()
        self.patience_seconds = min(
            patience_seconds, PATIENCE_SECONDS, PATIENCE_SHARE * _timeout(group)
        )

    def gather(self, content: bytes) -> list[bytes] | None:
        """Send this rank's message; rank 0 gets all messages, in rank order."""
        if self.rank:
            self._join(content)
            return None
        self._store.set(self._place, self._token)
        others = self.read(*(f"hello/{rank}" for rank in range(1, self.num_workers)))
        messages = [each.partition(b" ") for each in others]
        for rank, (token, _, _) in enumerate(messages, start=1):
            self.write(f"seen/{rank}", token)
        return [content, *(each for _, _, each in messages)]

    def _join(self, content: bytes) -> None:
        """Send this rank's message until the rank 0 of this attempt has read it."""
        own = self._token.encode()
        joined = ""
        sleep = _FIRST_SLEEP
        until = time.monotonic() + self.patience_seconds
        while True:
            if self._store.check([self._place]):
                token = bytes(self._store.get(self._place)).decode()
                self._name = f"{self._place}/{token}"
                if token != joined:
                    self.write(f"hello/{self.rank}", own + b" " + content)
                    joined = token
                if self.look(f"seen/{self.rank}") == own:
                    return
            if time.monotonic() > until:
                raise self._late(["rank 0, or another rank,"])
            time.sleep(sleep)
            sleep = min(2 * sleep, _LONGEST_SLEEP)

    def write(self, key: str, content: bytes) -> None:
        """Write the value of a key for other ranks."""
        self._store.set(self._key(key), content)

    def read(self, *keys: str) -> list[bytes]:
        """Return the values of keys; waits for them. LateError where one does not come."""
        named = [self._key(key) for key in keys]
        until = time.monotonic() + self.patience_seconds
        sleep = _FIRST_SLEEP
        while named and not self._store.check(named):
            if time.monotonic() > until:
                raise self._late([key for key in keys if not self._store.check([self._key(key)])])
            time.sleep(sleep)
            sleep = min(2 * sleep, _LONGEST_SLEEP)
        return [bytes(value) for value in self._store.multi_get(named)] if named else []

    def look(self, key: str) -> bytes | None:
        """Return the value of a key, None if there is none; does not wait for it."""
        named = self._key(key)
        return bytes(self._store.get(named)) if self._store.check([named]) else None

    def is_first(self, key: str) -> bool:
        """Return whether this is the first call for a key on any rank."""
        return int(self._store.add(self._key(key), 1)) == 1

    def agree(
        self,
        topic: str,
        problem: str,
        patience_seconds: float,
        num_ranks: int | None = None,
        *,
        same: object,
    ) -> str:
        """Return why ranks must not do something together: see :func:`agree`; by default all.

        Nor may they where ``same``, what this rank would gather, differs between them.
        """
        c10d: Any = dist.distributed_c10d
        store = c10d.PrefixStore(self._key(topic), self._store)
        digest = hashlib.blake2b(repr(same).encode(), digest_size=8).hexdigest()
        if store.compare_set("same", "", digest).decode() != digest:
            problem = problem or _NOT_THE_SAME
        return agree(store, num_ranks or self.num_workers, problem, patience_seconds)

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"

    def _late(self, missing: list[str]) -> LateError:
        names = ", ".join(key.replace("hello/", "worker ") for key in missing[:8])
        return LateError(
            f"watch() expected a call on every rank, and none came from {names} within "
            f"{self.patience_seconds:.3g} s"
        )


def _timeout(group: dist.ProcessGroup) -> float:
    """Return the seconds after which a collective of a group fails; infinity if unknown."""
    found = [float("inf")]
    inner: Any = group
    for device in getattr(inner, "_device_types", ()):
        with contextlib.suppress(Exception):  # without a backend for this kind of device
            found.append(inner._get_backend(device).options._timeout.total_seconds())
    return min(found)


def default_store() -> Any:
    """Return the store of the training's process group."""
    c10d: Any = dist.distributed_c10d
    try:
        return c10d._get_default_store()
    except Exception as error:
        raise UnsupportedError(
            "watch() expected a process group with a store, through which the ranks find each "
            f"other's monitor; it is out of reach ({error})"
        ) from error


def place_of_all(name: str, num_ranks: int) -> Any:
    """Return a part of the training's store for a question that all ranks of the job come to.

    Each time that all of them have come it is another one, whatever some did without the others.
    """
    c10d: Any = dist.distributed_c10d
    store = default_store()
    times = (int(store.add(f"{name}/came", 1)) - 1) // num_ranks
    return c10d.PrefixStore(f"{name}/{times}", store)


def agree(
    store: Any,  # one of torch's, in a part of its own for this question
    num_ranks: int,  # that must be ready
    problem: str = "",  # why this rank cannot do it; empty if it can
    patience_seconds: float = BEGIN_SECONDS,
    *,
    late: str = "after {seconds:.0f} s, {ready} of {num_ranks} ranks had come",
) -> str:
    """Return why all ranks must not do something together, the same on all; empty if they may.

    A rank that waits in a collective for one that never comes would hold up the training. So each
    rank notes in the store that it is ready; one of them, the last to be ready or the first to lose
    patience, writes down the answer, and the store sees to it that there is only one. ``late`` is
    the answer where some do not come.
    """
    if problem:
        return _answer(store, problem)
    if store.add("ready", 1) >= num_ranks:
        return _answer(store, _GO)
    end = time.monotonic() + patience_seconds
    while not store.check(["answer"]):
        if time.monotonic() > end:
            ready = store.add("ready", 0)
            text = late.format(seconds=patience_seconds, ready=ready, num_ranks=num_ranks)
            return _answer(store, text)
        time.sleep(_POLL_SECONDS)
    return _answer(store, _GO)  # it is there already


def _answer(store: Any, mine: str) -> str:
    """Write the answer unless there is one, and return it."""
    answer: bytes = store.compare_set("answer", "", mine)
    text = answer.decode()
    return "" if text == _GO else text
