"""Where the workers meet: the rank of each, and a store in which they post their results.

They use no collective. Writing needs nobody else, so a worker that hangs or fails holds up no
other; those that wait for its result know which worker it is.
"""

import json
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankscope.errors import UsageError

c10d: Any = dist  # its stores have no types
Store = Any

_ADDRESS = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

PAUSE = 0.01
"""Seconds between two looks at the store."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """This worker's place among the others.

    ``num_ranks`` is the number that the launcher promises, ``local_rank`` and ``num_local`` count
    on this host; ``launched`` means that a launcher such as ``torchrun`` started this worker.
    """

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local: int = 1
    launched: bool = False


def find_place(environment: Mapping[str, str]) -> RankPlace:
    """Read the launcher's variables; UsageError if some are missing, or do not fit together."""
    if "RANK" not in environment:
        return RankPlace()
    missing = [name for name in _ADDRESS if not environment.get(name)]
    if missing:
        raise UsageError(
            f"RANK is set and {' and '.join(missing)} not: the workers cannot find each other; "
            "start rankscope doctor with torchrun"
        )
    rank = _number(environment, "RANK")
    num_ranks = _number(environment, "WORLD_SIZE")
    if not 0 <= rank < num_ranks:
        raise UsageError(
            f"expected RANK from 0 to WORLD_SIZE − 1, got RANK={rank} and WORLD_SIZE={num_ranks}; "
            "correct what the launcher sets"
        )
    return RankPlace(
        rank,
        num_ranks,
        _number(environment, "LOCAL_RANK", rank),
        _number(environment, "LOCAL_WORLD_SIZE", 1),
        launched=True,
    )


def open_stores(place: RankPlace, seconds: float) -> tuple[Store, Store]:
    """Open two connections to the place where workers meet: one for each of a worker's threads."""
    if not place.launched:
        store = c10d.HashStore()
        return store, store
    hosting = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    prefix = f"rankscope-doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    stores = (_connect(seconds, host=hosting), _connect(seconds, host=False))
    first, second = (c10d.PrefixStore(prefix, store) for store in stores)
    return first, second


def choose_device(place: RankPlace) -> torch.device:
    """Return this worker's device, and make it the current one.

    More workers than accelerators share them.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.get_default_backend_for_device(accelerator) == "gloo":
        return torch.device("cpu")  # none, or one without a backend
    device = torch.device(accelerator.type, place.local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def choose_backend(place: RankPlace, device: torch.device) -> str:
    """Return the device's own backend; gloo where workers share an accelerator."""
    if device.type != "cpu" and place.num_local > torch.accelerator.device_count():
        return "gloo"
    return dist.get_default_backend_for_device(device)


class Meeting:
    """One worker's view of the store in which all workers post."""

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self.store = store
        self.rank = rank
        self.num_ranks = num_ranks

    def post(self, topic: str, value: Any) -> None:
        """Post this worker's value on a topic: plain JSON values."""
        self.announce(f"{topic}/{self.rank}", value)

    def announce(self, topic: str, value: Any = True) -> None:
        """Set the value of a topic that all workers share."""
        self.store.set(topic, zlib.compress(json.dumps(value).encode()))

    def announced(self, topic: str) -> Any:
        """Return the value that was announced, or None before that."""
        return self._get(topic) if self.store.check([topic]) else None

    def posted(self, topic: str) -> dict[int, Any]:
        """Return the values that workers have posted on a topic so far, by rank."""
        keys = {rank: f"{topic}/{rank}" for rank in range(self.num_ranks)}
        if not self.store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: self._get(key) for rank, key in keys.items()}

    def collect(self, topic: str, until: float) -> dict[int, Any]:
        """Return the values by rank once all workers have posted, or at a time of ``monotonic``."""
        keys = [f"{topic}/{rank}" for rank in range(self.num_ranks)]
        while not self.store.check(keys) and time.monotonic() < until:
            time.sleep(PAUSE)
        return self.posted(topic)

    def wait(self, topics: tuple[str, ...], until: float) -> bool:
        """Wait until one of the topics was announced; return whether it was in time."""
        while not any(self.store.check([topic]) for topic in topics):
            if time.monotonic() > until:
                return False
            time.sleep(PAUSE)
        return True

    def count_in(self, topic: str) -> int:
        """Return how many have called this for a topic, this call included."""
        return int(self.store.add(topic, 1))

    def _get(self, key: str) -> Any:
        return json.loads(zlib.decompress(self.store.get(key)))


def _connect(seconds: float, *, host: bool) -> Store:
    address = os.environ["MASTER_ADDR"]
    port = _number(os.environ, "MASTER_PORT")
    try:
        return c10d.TCPStore(
            address,
            port,
            is_master=host,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"rank {os.environ['RANK']} cannot reach rank 0 at {address}:{port} within "
            f"{seconds:g} s; check MASTER_ADDR, MASTER_PORT and that rank 0 was started"
        ) from error


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError as error:
        raise UsageError(
            f"expected a whole number in {name}, got {text!r}; correct what the launcher sets"
        ) from error
