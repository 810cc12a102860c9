"""What root and workers say to each other about canaries, as bytes: JSON, and batches behind it.

The root announces a canary (:func:`pack_plan`); the two workers whose batches are wanted answer
(:class:`Answer`); the root sends both batches to all (:func:`pack_run`). Results travel with the
step in which they were computed. Nothing is ever pickled.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rankscope.bus.batches import PlainBatch, unpack_batch
from rankscope.bus.packing import PackedError, pack_headed, unpack_headed
from rankscope.evidence.canary.schedule import Planned

PLAN, RUN = b"P", b"R"
"""Stand in front of what the root sends: the announcement of a canary, or its batches."""


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """What a worker says whose batch is wanted, or that can run no canaries any more.

    Attributes:
        capture_at: The step whose batch was wanted; names the canary.
        batch: The batch as :func:`~rankscope.bus.batches.pack_batch` packs it; empty if none.
        autocast: Type of autocast in the training's forward pass; empty without.
        versions: Releases that the training runs with.
        declined: Why there is no batch.
        ends: Whether this worker runs no canaries from now on.
    """

    capture_at: int
    batch: bytes = b""
    autocast: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    declined: str = ""
    ends: bool = False

    def pack(self) -> bytes:
        """Return its bytes."""
        header = asdict(self)
        return pack_headed(header, header.pop("batch"))

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> "CanaryAnswer":
        """Read one.

        Raises:
            PackedError: These bytes hold none.
        """
        header, batch = unpack_headed(content)
        try:
            return cls(batch=bytes(batch), **header)
        except TypeError as error:
            raise PackedError(f"these bytes answer no canary ({error})") from error


def pack_plan(planned: Planned) -> bytes:
    """Return the announcement of a canary."""
    return PLAN + json.dumps(planned.to_json()).encode()


def unpack_plan(content: bytes | memoryview) -> Planned:
    """Read the announcement of a canary.

    Raises:
        PackedError: These bytes hold none.
    """
    try:
        return Planned(**json.loads(bytes(content[1:])))
    except (ValueError, TypeError) as error:
        raise PackedError(f"these bytes announce no canary ({error})") from error


def pack_run(planned: Planned, batches: tuple[bytes, bytes]) -> bytes:
    """Return what every worker needs to run a canary.

    Args:
        planned: The canary.
        batches: The suspect's batch and the peer's, packed.
    """
    sizes = [len(batch) for batch in batches]
    return RUN + pack_headed({"planned": planned.to_json(), "sizes": sizes}, *batches)


def unpack_run(content: bytes | memoryview) -> tuple[Planned, tuple[PlainBatch, PlainBatch]]:
    """Read what every worker needs to run a canary; the batches look into ``content``.

    Raises:
        PackedError: These bytes hold none.
    """
    header, batches = unpack_headed(content[1:])
    try:
        planned, (first, second) = Planned(**header["planned"]), header["sizes"]
        if first + second != len(batches):
            raise PackedError(f"expected batches of {first} and {second} bytes, got {len(batches)}")
    except (KeyError, TypeError, ValueError) as error:
        raise PackedError(f"these bytes hold no canary ({error})") from error
    return planned, (unpack_batch(batches[:first]), unpack_batch(batches[first:]))
