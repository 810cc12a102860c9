"""Files of detector states, for the job's next start.

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

STATE_FILE = "detectors.npz"  # the state of the detectors at the last flush, or at the end
START_FILE = "detectors-start.npz"  # their state at the start of a run that continues another
STATE_FORMAT = 1  # raised when a state of the same shape gets another meaning

MAX_BYTES = 2**28  # the largest state that is read: what is kept of samples is of bounded size

_PLACE = "$array"


def pack_state(state: State) -> bytes:
    """Return the content of a state's file; a TypeError unless it is arrays and plain JSON."""
    arrays: list[NDArray[Any]] = []
    header = {"format": STATE_FORMAT, "schema": schema_hash(), "state": take_out(state, arrays)}
    contents: dict[str, Any] = {f"array-{i}": array for i, array in enumerate(arrays)}
    contents["tree"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    return archive_of(contents)


def unpack_state(content: bytes) -> State:
    """Return the state in a file's content."""
    try:
        with np.load(BytesIO(content), allow_pickle=False) as archive:
            _check_size(archive)
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
    """Return the state in a file, None if there is no such file."""
    try:
        content = read_file(file, MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"it cannot be read ({error.strerror})") from error
    return unpack_state(content)


def read_number(file: Path, name: str) -> int | None:
    """Return an integer at the top level of a state's file without its arrays; None without."""
    try:
        with np.load(BytesIO(read_file(file, MAX_BYTES)), allow_pickle=False) as archive:
            _check_size(archive)
            value = parse(archive["tree"].tobytes())["state"][name]
    except (StateError, *DAMAGES):
        return None
    return value if isinstance(value, int) else None


def _check_size(archive: Any) -> None:
    if sum(entry.file_size for entry in archive.zip.infolist()) > MAX_BYTES:
        raise StateError(f"it holds more than {MAX_BYTES // 2**20} MiB, as no state does")


def take_out(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """Return a state with a placeholder for each array; append the arrays to ``arrays``."""
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
    """Reverse :func:`take_out`, with arrays by their number."""
    if isinstance(value, dict):
        if _PLACE in value:
            return array_of(value[_PLACE])
        return {key: put_back(item, array_of) for key, item in value.items()}
    return [put_back(item, array_of) for item in value] if isinstance(value, list) else value
