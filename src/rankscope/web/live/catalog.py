"""Which runs a directory holds, and whether one has changed.

Pages name a run by an id made from its path below the served directory. An id is looked up among
the runs that were found, never turned into a path; links are not followed, and a run whose files
lead out of the served directory is not read. So nothing outside of it can be reached.
"""

import hashlib
import heapq
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rankscope.errors import RunError
from rankscope.record import Run
from rankscope.record.files import unreadable

MAX_DEPTH = 6
"""Levels below the served directory at which runs are looked for."""
MAX_DIRECTORIES = 20_000
"""Directories that one look lists at most."""

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_UNPLAIN = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run lies.

    Attributes:
        id: Names it in addresses: letters, digits and ``. _ - ~ /`` only.
        path: Its directory.
        name: The path below the served directory, to be read by people.
    """

    id: str
    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells one state of a run's files from another, without reading them.

    Attributes:
        token: Differs when a file has changed, come or gone.
        changed: When the youngest file was written, in seconds since 1970.
    """

    token: str
    changed: float


class Found(NamedTuple):
    """What a look through a directory has found.

    Attributes:
        places: Runs by id, those of the upper levels first.
        cut: Whether directories were left out because there are too many.
    """

    places: dict[str, Place]
    cut: bool


def places(root: Path) -> Found:
    """Return the runs in a directory; the directory itself may be one.

    Every directory shares its weight evenly among those in it, and the heaviest are looked into
    first. So where there are more than ``MAX_DIRECTORIES``, the ones left out are those that lie
    among many: 20,000 folders of a data set hide no run beside them.

    Args:
        root: The served directory, without links in its path.
    """
    if Run.is_run(root):
        name = root.name or "run"
        return Found({id_of(name): Place(id_of(name), root, name)}, cut=False)
    runs: list[Place] = []
    waiting = [(1, 0, "", root)]  # one over the weight, the level, the name below root, the path
    for _ in range(MAX_DIRECTORIES):
        if not waiting:
            break
        crowd, level, name, path = heapq.heappop(waiting)
        below = []
        for child in _directories(path):
            inside = f"{name}/{child.name}" if name else child.name
            if Run.is_run(child.path):
                runs.append(Place(id_of(inside), Path(child.path), inside))
            elif level + 1 < MAX_DEPTH:
                below.append((inside, Path(child.path)))
        for inside, child_path in below:
            heapq.heappush(waiting, (crowd * len(below), level + 1, inside, child_path))
    runs.sort(key=lambda place: (place.name.count("/"), place.name))
    return Found({place.id: place for place in runs}, cut=bool(waiting))


def id_of(name: str) -> str:
    """Return the id of a run: its relative path where that is plain, else a like one and a digest.

    >>> id_of("sft/first"), id_of("<b>")
    ('sft/first', 'b~e54bd95e')
    """
    parts = name.split("/")
    if all(_PLAIN.fullmatch(part) for part in parts):
        return name
    digest = hashlib.blake2b(os.fsencode(name), digest_size=4).hexdigest()
    like = "/".join(_UNPLAIN.sub("-", part).strip("-") or "run" for part in parts)
    return f"{like}~{digest}"


def stamp(place: Place, root: Path) -> Stamp | None:
    """Return the state of a run's files; None when the run is gone.

    Raises:
        RunError: A file or table of it is a link out of the served directory, or the directory
            cannot be read.
    """
    lines = []
    changed = 0.0
    try:
        for entry in _files(place.path, root):
            try:
                known = entry.stat()
            except FileNotFoundError:
                continue  # replaced just now: the next look sees it
            times = f"{known.st_mtime_ns}\0{known.st_ctime_ns}"  # the second: its permissions, too
            lines.append(f"{entry.path}\0{known.st_size}\0{times}\0{known.st_ino}")
            changed = max(changed, known.st_mtime)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(place.path, error) from error
    if not any(line.startswith(f"{place.path / 'run.json'}\0") for line in lines):
        return None
    text = "\n".join(sorted(lines)).encode(errors="surrogateescape")
    return Stamp(hashlib.blake2b(text, digest_size=9).hexdigest(), changed)


def _files(path: Path, root: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the files that a page of a run is made from.

    Raises:
        RunError: One is a link out of the served directory.
    """
    with os.scandir(path) as entries:
        listed = list(entries)
    for entry in listed:
        if entry.name in ("run.json", "findings.jsonl"):
            _stay_inside(entry, root)
            yield entry
        elif not entry.name.startswith(".") and _is_directory(entry, links=True):
            _stay_inside(entry, root)
            for part in _entries(entry.path):
                if part.name.endswith(".parquet") and not part.name.startswith("."):
                    _stay_inside(part, root)
                    yield part


def _stay_inside(entry: os.DirEntry[str], root: Path) -> None:
    if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root):
        raise RunError(
            f"{entry.name} of this run is a link that leads out of the served directory, and is "
            "not read: copy what it links to into the run, or serve a directory that holds both"
        )


def _directories(path: Path) -> list[os.DirEntry[str]]:
    found = [
        entry
        for entry in _entries(path)
        if not entry.name.startswith(".") and _is_directory(entry, links=False)
    ]
    return sorted(found, key=lambda entry: entry.name)


def _entries(path: Path | str) -> list[os.DirEntry[str]]:
    """Return what a directory holds; nothing of one that cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def _is_directory(entry: os.DirEntry[str], *, links: bool) -> bool:
    try:
        return entry.is_dir(follow_symlinks=links)
    except OSError:
        return False
