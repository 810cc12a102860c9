"""Where all ranks meet once, before the first step: the store of the training's process group.

No process group is made for it. Each rank writes what it says; rank 0 reads it and answers all.
"""

import hashlib
import json
import os
import time
from collections import Counter
from typing import Any

import torch.distributed as dist

from rankscope.errors import RunError, UnsupportedError

PATIENCE_SECONDS = 1800.0
"""How long a rank waits for the others, which may still load their data."""

_FIRST_SLEEP, _LONGEST_SLEEP = 0.001, 0.1

_meetings: Counter[str] = Counter()


class Meeting:
    """One meeting of all ranks of a data-parallel group.

    Every rank constructs it at the same point of the program.

    Args:
        group: The data-parallel group.

    Raises:
        UnsupportedError: The process group has no store that is in reach.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.rank = ranks.index(dist.get_rank())
        self.num_workers = len(ranks)
        name = hashlib.blake2b(json.dumps(ranks).encode(), digest_size=8).hexdigest()
        self._name = f"rankscope/{name}/{_attempt()}{_meetings[name]}"
        _meetings[name] += 1
        self._store = default_store()

    def gather(self, content: bytes) -> list[bytes] | None:
        """Give what this rank says; rank 0 gets what all say, in rank order.

        Raises:
            RunError: A rank does not come.
        """
        self.write(f"hello/{self.rank}", content)
        if self.rank:
            return None
        keys = [f"hello/{rank}" for rank in range(self.num_workers)]
        return self.read(*keys)

    def write(self, key: str, content: bytes) -> None:
        """Write something for others to read."""
        self._store.set(self._key(key), content)

    def read(self, *keys: str) -> list[bytes]:
        """Return what was written; waits for it.

        Raises:
            RunError: It does not come.
        """
        named = [self._key(key) for key in keys]
        until, sleep = time.monotonic() + PATIENCE_SECONDS, _FIRST_SLEEP
        while not self._store.check(named):
            if time.monotonic() > until:
                missing = [key for key in keys if not self._store.check([self._key(key)])]
                raise RunError(
                    f"watch() expected a call on every rank, and {', '.join(missing[:8])} of this "
                    f"meeting did not come within {PATIENCE_SECONDS / 60:.0f} minutes"
                )
            time.sleep(sleep)
            sleep = min(2 * sleep, _LONGEST_SLEEP)
        return [bytes(value) for value in self._store.multi_get(named)]

    def look(self, key: str) -> bytes | None:
        """Return what was written, None if it was not as yet; does not wait for it."""
        named = self._key(key)
        return bytes(self._store.get(named)) if self._store.check([named]) else None

    def is_first(self, key: str) -> bool:
        """Return whether this rank is the first to ask this."""
        return int(self._store.add(self._key(key), 1)) == 1

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"


def _attempt() -> str:
    """Return what tells a restarted job's keys from those of the job before, or nothing.

    By default torchrun keeps its store over restarts. With several nodes its counts may differ
    between them.
    """
    alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}/" if alone else ""


def default_store() -> Any:
    """Return the store of the training's process group.

    Raises:
        UnsupportedError: It is out of reach.
    """
    c10d: Any = dist.distributed_c10d
    try:
        return c10d._get_default_store()
    except Exception as error:
        raise UnsupportedError(
            "watch() expected a process group with a store, through which the ranks find each "
            f"other's monitor; it is out of reach ({error})"
        ) from error
