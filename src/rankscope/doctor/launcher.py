"""Who this worker is among the others, as its launcher says, and where all of them meet."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankscope.doctor.meeting import Store
from rankscope.errors import UsageError

_c10d: Any = dist  # its stores have no types

_ADDRESS = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Place:
    """This worker's place among the others.

    Attributes:
        rank: Its rank, from 0.
        num_ranks: Number of ranks that the launcher promises.
        local_rank: Its number on its host.
        num_local: Number of ranks on its host.
        launched: Whether a launcher such as ``torchrun`` started it.
    """

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local: int = 1
    launched: bool = False


def find_place(environment: Mapping[str, str]) -> Place:
    """Read the launcher's variables.

    Raises:
        UsageError: Some of them are missing, or are no numbers that fit together.
    """
    if "RANK" not in environment:
        return Place()
    missing = [name for name in _ADDRESS if not environment.get(name)]
    if missing:
        raise UsageError(
            f"RANK is set and {' and '.join(missing)} not: the workers cannot find each other; "
            "start rankscope doctor with torchrun"
        )
    rank, num_ranks = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if not 0 <= rank < num_ranks:
        raise UsageError(
            f"expected RANK from 0 to WORLD_SIZE − 1, got RANK={rank} and WORLD_SIZE={num_ranks}; "
            "correct what the launcher sets"
        )
    return Place(
        rank,
        num_ranks,
        _number(environment, "LOCAL_RANK", rank),
        _number(environment, "LOCAL_WORLD_SIZE", 1),
        launched=True,
    )


def open_stores(place: Place, seconds: float) -> tuple[Store, Store]:
    """Open two connections to the place where workers meet: one for each of a worker's threads.

    Raises:
        UsageError: It cannot be reached.
    """
    if not place.launched:
        store: Store = _c10d.HashStore()
        return store, store
    hosting = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    prefix = f"rankscope-doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    stores = (_connect(seconds, host=hosting), _connect(seconds, host=False))
    first, second = (inside(store, prefix) for store in stores)
    return first, second


def inside(store: Store, name: str) -> Store:
    """Return a part of a store, whose keys are not those of the rest."""
    part: Store = _c10d.PrefixStore(name, store)
    return part


def choose_device(place: Place) -> torch.device:
    """Return this worker's device, and make it the current one.

    More workers than accelerators share them.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.get_default_backend_for_device(accelerator) == "gloo":
        return torch.device("cpu")  # none, or one over which ranks cannot talk
    device = torch.device(accelerator.type, place.local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def choose_backend(place: Place, device: torch.device) -> str:
    """Return the device's own backend; gloo where workers share an accelerator."""
    if device.type != "cpu" and place.num_local > torch.accelerator.device_count():
        return "gloo"
    return dist.get_default_backend_for_device(device)


def _connect(seconds: float, *, host: bool) -> Store:
    address, port = os.environ["MASTER_ADDR"], _number(os.environ, "MASTER_PORT")
    try:
        store: Store = _c10d.TCPStore(
            address,
            port,
            is_master=host,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        return store
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
