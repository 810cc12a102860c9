"""Files that hold a state: what the detectors of a run remember, for the job's next start.

A file is a NumPy archive without pickles: one array per array of the state, and ``tree``, the
state itself as JSON in bytes, in which ``{"$array": 3}`` stands for ``array-3``.
"""

import json
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.evidence import schema_hash
from rankscope.files import DAMAGES, archive_of, parse, read_file
from rankscope.stats.state import State, StateError

STATE_FILE = "detectors.npz"
"""What the detectors remembered when the tables were last written, or at the end."""

START_FILE = "detectors-start.npz"
"""What they remembered at the start of a run that continues another."""

STATE_FORMAT = 1
"""Raised when a state of the same shape has come to mean something else."""

_PLACE = "$array"


def pack_state(state: State) -> bytes:
    """Return the content of a state's file.

    Raises:
        TypeError: Something in it is neither an array nor plain JSON.
    """
    arrays: list[NDArray[Any]] = []
    header = {"format": STATE_FORMAT, "schema": schema_hash(), "state": take_out(state, arrays)}
    contents: dict[str, Any] = {f"array-{i}": array for i, array in enumerate(arrays)}
    contents["tree"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    return archive_of(contents)


def unpack_state(content: bytes) -> State:
    """Return the state that a file holds.

    Raises:
        StateError: It is damaged, or of another release whose states mean something else.
    """
    try:
        with np.load(BytesIO(content), allow_pickle=False) as archive:
            header = parse(archive["tree"].tobytes())
            if (header["format"], header["schema"]) != (STATE_FORMAT, schema_hash()):
                raise StateError("it is of another release of rankscope")
            state: State = put_back(header["state"], lambda i: archive[f"array-{i}"])
    except StateError:
        raise
    except DAMAGES as error:
        raise StateError(f"it is damaged ({error})") from error
    return state


def read_state(file: Path) -> State | None:
    """Return the state in a file, None if there is no such file.

    Raises:
        StateError: It cannot be read, is damaged, or is of another release.
    """
    try:
        content = read_file(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"it cannot be read ({error.strerror})") from error
    return unpack_state(content)


def read_number(file: Path, name: str) -> int | None:
    """Return a whole number that a state's file holds at its top, without reading the arrays.

    None where there is no such number, or the file cannot be read as a state.
    """
    try:
        with np.load(BytesIO(read_file(file)), allow_pickle=False) as archive:
            value = parse(archive["tree"].tobytes())["state"][name]
    except DAMAGES:
        return None
    return value if isinstance(value, int) else None


def take_out(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """Return a state with a mark in place of each array; collect the arrays."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of objects cannot be saved")
        arrays.append(value)
        return {_PLACE: len(arrays) - 1}
    if isinstance(value, Mapping):
        assert all(isinstance(key, str) and key != _PLACE for key in value)
        return {key: take_out(item, arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [take_out(item, arrays) for item in value]
    return value


def put_back(value: Any, array_of: Callable[[int], NDArray[Any]]) -> Any:
    """Return the state that :func:`take_out` was given, with arrays by their number."""
    if isinstance(value, dict):
        if _PLACE in value:
            return array_of(value[_PLACE])
        return {key: put_back(item, array_of) for key, item in value.items()}
    return [put_back(item, array_of) for item in value] if isinstance(value, list) else value
