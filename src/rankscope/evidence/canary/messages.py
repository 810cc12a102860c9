"""Messages between root and workers about canaries, as bytes: JSON, followed by batches.

The root announces a canary (:func:`pack_plan`); the suspect and the peer answer
(:class:`CanaryAnswer`); the root sends both batches to all (:func:`pack_run`). Results are part of
their step's message. Nothing is ever pickled.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rankscope.bus.packing import PackedError, PlainBatch, pack_headed, unpack_batch, unpack_headed
from rankscope.evidence.canary.schedule import Planned

PLAN = b"P"
"""First byte of a canary's announcement."""

RUN = b"R"
"""First byte of a canary's batches."""


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """A worker's answer to the announcement of a canary.

    Attributes:
        capture_at: The planned step of the batch; identifies the canary.
        step: The step of the batch, a later one where the announcement came late.
        batch: The batch as :func:`~rankscope.bus.packing.pack_batch` packs it; empty if none.
        autocast: Type of autocast in the training's forward pass; empty without.
        versions: Releases that the training runs with.
        declined: Why there is no batch, or no result.
        late: Steps by which the batches came too late to be run.
        ends: Whether this worker runs no canaries from now on.
    """

    capture_at: int
    batch: bytes = b""
    autocast: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    declined: str = ""
    ends: bool = False
    step: int = -1
    late: int = 0

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
    """Return a canary with the packed batches of the suspect and of the peer."""
    sizes = [len(batch) for batch in batches]
    return RUN + pack_headed({"planned": planned.to_json(), "sizes": sizes}, *batches)


def unpack_run(content: bytes | memoryview) -> tuple[Planned, tuple[PlainBatch, PlainBatch]]:
    """Read a canary and its batches, which are views of ``content``.

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
