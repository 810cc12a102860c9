"""Messages between root and workers about canaries, as bytes: JSON, followed by batches.

The root announces a canary (:func:`pack_plan`); the suspect and the peer answer
(:class:`CanaryAnswer`); the root sends both batches to all (:func:`pack_run`). Results are part of
their step's message. Nothing is ever pickled.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rankscope.bus.batches import PlainBatch, unpack_batch
from rankscope.bus.packing import PackedError, pack_headed, unpack_headed
from rankscope.evidence.canary.schedule import Planned

PLAN = b"P"
"""First byte of a canary's announcement."""

RUN = b"R"
"""First byte of a canary's batches."""


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """A worker's answer to the announcement of a canary."""

    capture_at: int  # the planned step of the batch; identifies the canary
    batch: bytes = b""  # as pack_batch packs it; empty if none
    autocast: str = ""  # type of autocast in the training's forward pass; empty without
    # releases that the training runs with
    versions: Mapping[str, str] = field(default_factory=dict)
    declined: str = ""  # why there is no batch, or no result
    ends: bool = False  # whether this worker runs no canaries from now on
    step: int = -1  # of the batch; a later one where the announcement came late
    late: int = 0  # steps by which the batches came too late to be run

    def pack(self) -> bytes:
        """Return its bytes."""
        header = asdict(self)
        return pack_headed(header, header.pop("batch"))

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> "CanaryAnswer":
        """Read one."""
        header, batch = unpack_headed(content)
        try:
            return cls(batch=bytes(batch), **header)
        except TypeError as error:
            raise PackedError(f"these bytes answer no canary ({error})") from error


def pack_plan(planned: Planned) -> bytes:
    """Return the announcement of a canary."""
    return PLAN + json.dumps(planned.to_json()).encode()


def unpack_plan(content: bytes | memoryview) -> Planned:
    """Read the announcement of a canary."""
    try:
        return Planned(**json.loads(bytes(content[1:])))
    except (ValueError, TypeError) as error:
        raise PackedError(f"these bytes announce no canary ({error})") from error


def pack_run(planned: Planned, batches: tuple[bytes, bytes]) -> bytes:
    """Return a canary with the packed batches of the suspect and of the peer."""
    sizes = [len(batch) for batch in batches]
    return RUN + pack_headed({"planned": planned.to_json(), "sizes": sizes}, *batches)


def unpack_run(content: bytes | memoryview) -> tuple[Planned, tuple[PlainBatch, PlainBatch]]:
    """Read a canary and its batches, which are views of ``content``."""
    header, batches = unpack_headed(content[1:])
    try:
        planned, (first, second) = Planned(**header["planned"]), header["sizes"]
        if first + second != len(batches):
            raise PackedError(f"expected batches of {first} and {second} bytes, got {len(batches)}")
    except (KeyError, TypeError, ValueError) as error:
        raise PackedError(f"these bytes hold no canary ({error})") from error
    return planned, (unpack_batch(batches[:first]), unpack_batch(batches[first:]))
