"""What ranks send to each other and to the root: arrays, and dataclasses of them, as bytes."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from math import prod
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.finding import Finding
from rankscope.bus.pace import PACE
from rankscope.bus.probe import DirectedRun, Director, Request

if TYPE_CHECKING:
    from rankscope.bus.step import GatheredStep

_log = logging.getLogger("rankscope")

_MOST_STEPS = 4  # that wait for the workers' other messages


_LENGTH = 8  # bytes of the header's length


class PackedError(ValueError):
    """Bytes without the expected content."""


def pack_arrays(header: Any, arrays: Sequence[NDArray[Any]]) -> bytes:
    """Return a header and arrays of any shapes as bytes.

    Example:
        >>> header, (array,) = unpack_arrays(pack_arrays({"step": 3}, [np.eye(2)]))
        >>> header, array.tolist()
        ({'step': 3}, [[1.0, 0.0], [0.0, 1.0]])
    """
    shapes = [[array.dtype.str, list(array.shape)] for array in arrays]
    text = json.dumps([header, shapes]).encode()
    contents = (array.tobytes() for array in arrays)
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *contents])


def unpack_arrays(packed: bytes | bytearray | memoryview) -> tuple[Any, list[NDArray[Any]]]:
    """Return header and arrays, as views into ``packed``; PackedError if there are none."""
    content = memoryview(packed)
    end = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    arrays = list[NDArray[Any]]()
    at = 0
    try:
        header, shapes = json.loads(bytes(content[_LENGTH:end]))
        rest = content[end:]
        for name, shape in shapes:
            dtype = np.dtype(name)
            if dtype.hasobject:
                raise PackedError("expected numbers, got an array of objects")
            array = np.frombuffer(rest, dtype, prod(shape), at).reshape(shape)
            arrays.append(array)
            at += array.nbytes
    except (ValueError, TypeError) as error:
        raise PackedError(f"these bytes hold no arrays ({error})") from error
    return header, arrays


class Packable:
    """A dataclass that travels as bytes: its arrays behind a header in JSON.

    Its fields are numbers, texts, bytes, arrays, other shares, tuples and mappings of these, and
    any of them or None. Arrays and memory views that are read look into the bytes.
    """

    __slots__ = ()

    @property
    def fits(self) -> bool:
        """Whether its values fit together."""
        return True

    def pack(self) -> bytes:
        """Return its bytes."""
        arrays: list[NDArray[Any]] = []
        return pack_arrays(_plain(self, arrays), arrays)

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> Self:
        """Read one; PackedError where these bytes hold none."""
        header, arrays = unpack_arrays(content)
        try:
            share: Self = _typed(cls, header, arrays)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise PackedError(f"these bytes hold no {cls.__name__} ({error})") from error
        if not share.fits:
            raise PackedError(f"these bytes hold a {cls.__name__} whose parts do not fit together")
        return share


def _plain(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """Return a value as JSON can hold it, with arrays by their number; append these."""
    if isinstance(value, bytes | memoryview):
        value = np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return len(arrays) - 1
    if isinstance(value, Packable):
        return {f.name: _plain(getattr(value, f.name), arrays) for f in fields(value)}  # type: ignore[arg-type]
    if isinstance(value, Mapping):
        return {key: _plain(item, arrays) for key, item in value.items()}
    return [_plain(item, arrays) for item in value] if isinstance(value, tuple) else value


def _typed(kind: Any, value: Any, arrays: Sequence[NDArray[Any]]) -> Any:
    """Reverse :func:`_plain` for a value that was declared to be of this type."""
    if kind in (int, float, str, bool):
        return kind(value)
    own = get_origin(kind) or kind
    args = get_args(kind)
    if own is UnionType:
        return None if value is None else _typed(args[0], value, arrays)
    if own is np.ndarray:
        array = arrays[value]
        (wanted,) = get_args(args[1])
        if array.dtype.kind != np.dtype(wanted).kind:
            raise ValueError(f"expected an array of {np.dtype(wanted)}, got {array.dtype}")
        return array
    if own is memoryview:
        return arrays[value].data
    if own is bytes:
        return arrays[value].tobytes()
    if own is tuple:
        return tuple(_typed(args[0], item, arrays) for item in value)
    if hasattr(own, "__dataclass_fields__"):
        hints = _hints(own)
        return own(**{name: _typed(hints[name], item, arrays) for name, item in value.items()})
    return {args[0](key): _typed(args[1], item, arrays) for key, item in value.items()}


_hints = cache(get_type_hints)

_Key = TypeVar("_Key")
_Some = TypeVar("_Some")
_Share = TypeVar("_Share", bound=Packable)


class Waiting(Generic[_Key, _Some]):
    """What ranks have sent under one key, until all of them have; ``most`` keys wait."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sent: dict[_Key, dict[int, _Some]] = {}

    def add(self, key: _Key, rank: int, sent: _Some, num_ranks: int) -> dict[int, _Some] | None:
        """Add what a rank has sent; return it with all others', by rank, if it is the last one."""
        there = self._sent.setdefault(key, {})
        there[rank] = sent
        if len(there) >= num_ranks:
            return self._sent.pop(key)
        if len(self._sent) > self._most:
            del self._sent[min(self._sent)]  # type: ignore[type-var]
        return None


class ShareDirector(Director, Generic[_Share]):
    """Judges the workers' shares of requested steps, each with the step's own message."""

    kind: type[_Share]

    def __init__(self, run: DirectedRun) -> None:
        super().__init__(run.report)
        self.num_workers = run.num_workers
        requested = run.options.get("verify_at", ())
        self._silent = {run.first_step + later for later in PACE.references}.difference(requested)
        self._shares: dict[int, dict[int, _Share]] = {}

    def declined(self, why: str) -> _Share:
        """Return a share that holds nothing but the reason."""
        raise NotImplementedError

    def judge(self, step: "GatheredStep", shares: Mapping[int, _Share]) -> Iterable[Finding]:
        """Return the findings of a step from the shares that have come, by worker."""
        raise NotImplementedError

    def miss(self, step: int) -> Iterable[Finding]:
        """Return the findings of a step whose message does not come."""
        return ()

    def take(self, rank: int | None, step: int, content: bytes) -> None:
        """Store a worker's share of a step; it arrives before that step's own message."""
        if rank is None:
            return
        try:
            share = self.kind.unpack(content)
        except PackedError as error:
            share = self.declined(f"what was sent of it cannot be read: {error}")
        self._shares.setdefault(step, {})[rank] = share
        for late in sorted(self._shares)[:-_MOST_STEPS]:
            del self._shares[late]
            self._conclude(late, self.miss(late))

    def observe(
        self,
        step: "GatheredStep",
        changed: Sequence[Finding],
        known: Sequence[Finding],
        newest: int,
    ) -> Iterable[Request]:
        """Judge the step, if shares of it have come."""
        shares = self._shares.pop(step.step, None)
        if shares is not None:
            self._conclude(step.step, self.judge(step, shares))
        return ()

    def _conclude(self, step: int, findings: Iterable[Finding]) -> None:
        for finding in findings:
            if step in self._silent:
                _log.debug("a check that nobody asked for: %s", finding)
            else:
                self.publish(finding)
