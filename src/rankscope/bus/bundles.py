"""Replay bundles: the batches of a canary, its seeds and its results, to be run again later.

::

    RUN/replay/<finding>-step-<n>/
        bundle.json     the finding, the step, the ranks, the seed, the structure of the batches,
                        the results and the verdict of the live canary, versions
        suspect.npz     the tensors of the suspect's batch, and a digest of each of its samples
        peer.npz        the same of the peer's batch

Tensors are plain arrays; types that numpy lacks (bfloat16, float8) are stored as integers of the
same bits, and the structure names their type. Nothing is ever pickled.
"""

import json
import platform
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.canary import SINGLE, CanaryCause, CanaryResults, CanaryVerdict
from rankscope.bus.finding import Finding
from rankscope.bus.shares import PackedError, pack_arrays, unpack_arrays
from rankscope.errors import RunError
from rankscope.files import (
    DAMAGES,
    archive_of,
    is_file,
    parse,
    read_file,
    replace,
    to_plain,
    write_error,
)
from rankscope.stats.arrays import MISSING_INT, Ints
from rankscope.version import __version__

FOLDER = "replay"
"""Folder of a run's bundles."""

FORMAT = 1

MAX_BYTES = 2**28
"""Bytes of a batch that are read; a canary keeps batches of up to 64 MiB."""

_INFO = "bundle.json"
_FILES = ("suspect.npz", "peer.npz")
_PLAIN: dict[str, Callable[[Any], Any]] = {
    "reason": str,
    **dict.fromkeys(("step", "suspect", "peer", "num_workers", "seed"), int),
    "autocast": str,
}
"""Attributes of a bundle that are one text or number, in the order of the file."""
_INT_COLUMNS = ("digests_W", "again_W", "peer_digests_W")
_FLOAT_COLUMNS = (
    *("losses_W", "norms_W", "again_losses_W", "again_norms_W"),
    *("peer_losses_W", "peer_norms_W"),
)


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """The inputs of one forward pass."""

    structure: Any  # arguments by position and by name, as plain JSON in which tensors are numbered
    # the tensors. Types that numpy lacks are held as integers of the same bits
    arrays: tuple[NDArray[Any], ...]
    # int64 digest of the content of each sample; empty where none was recognised
    samples: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(array.nbytes for array in self.arrays)


def pack_batch(batch: PlainBatch) -> bytes:
    """Return a batch as bytes."""
    return pack_arrays(batch.structure, (batch.samples, *batch.arrays))


def unpack_batch(packed: bytes | memoryview) -> PlainBatch:
    """Return the batch in these bytes, as views into them; PackedError if there is none."""
    structure, arrays = unpack_arrays(packed)
    if not arrays:
        raise PackedError("these bytes hold no batch")
    return PlainBatch(structure, tuple(arrays[1:]), arrays[0].astype(np.int64))


@dataclass(frozen=True, slots=True)
class ReplayBundle:
    """The batches, the seed and the results of a canary."""

    reason: str  # id of the finding behind it, ``scheduled`` or ``asked-for``
    step: int  # step whose batches these are
    suspect: int  # rank of the first batch
    peer: int  # rank of the second
    num_workers: int
    seed: int  # of all random generators in every run of a batch
    autocast: str  # of the training's forward pass, such as ``bfloat16``; empty without
    batches: tuple[PlainBatch, PlainBatch]  # of the suspect, and of the peer
    finding: Finding | None = None  # behind it, if any
    results: CanaryResults | None = None  # of the live canary, once they are known
    verdict: CanaryVerdict | None = None
    versions: Mapping[str, str] = field(default_factory=dict)  # of Python, torch and the like

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"{_file_name(self.reason)}-step-{self.step}"


def _file_name(reason: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", reason)


def save_bundle(run_dir: Path, bundle: ReplayBundle) -> Path:
    """Write a bundle, or its results once they are known, atomically; return its directory."""
    target = run_dir / FOLDER / bundle.name
    info = (json.dumps(_info(bundle), indent=2, allow_nan=False) + "\n").encode()
    if is_file(target / _INFO):
        replace(target / _INFO, info)
        return target
    hidden = target.with_name(f".{target.name}.tmp")
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        for file, batch in zip(_FILES, bundle.batches, strict=True):
            arrays = {f"array-{i}": array for i, array in enumerate(batch.arrays)}
            (hidden / file).write_bytes(archive_of({"samples": batch.samples, **arrays}))
        replace(hidden / _INFO, info)
        hidden.replace(target)
    except OSError as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise write_error(target, error) from error
    return target


def load_bundle(path: Path) -> ReplayBundle:
    """Read a bundle."""
    folder = path.parent if path.name == _INFO else path
    try:
        info = parse(read_file(folder / _INFO))
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(_without_bundle(folder)) from None
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {folder / _INFO} ({error}): the bundle is damaged") from error
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise RunError(
            f"expected a replay bundle of format {FORMAT} in {folder}, got "
            f"{info.get('format') if isinstance(info, dict) else type(info).__name__}: use the "
            "release of rankscope that wrote it"
        )
    try:
        batches = [
            _read_batch(folder / file, structure)
            for file, structure in zip(_FILES, info["structures"], strict=True)
        ]
        return _bundle(info, (batches[0], batches[1]))
    except RunError:
        raise
    except DAMAGES as error:
        raise RunError(
            f"cannot use {folder / _INFO} ({error!r:.200}): the bundle is damaged"
        ) from error


def find_bundles(run_dir: Path) -> list[Path]:
    """Return the directories of a run's bundles, in order of their names."""
    return sorted(file.parent for file in (run_dir / FOLDER).glob(f"[!.]*/{_INFO}"))


def latest_bundle(
    run_dir: Path, reasons: Collection[str], until: int = -1, over_by: int | None = None
) -> Path | None:
    """Return the latest bundle for one of some findings' ids, or for any up to step ``until``.

    ``over_by``: the last step that showed the findings, where they are over.
    """
    names = set(map(_file_name, reasons))
    steps = {}
    for folder in find_bundles(run_dir):
        name, _, step = folder.name.rpartition("-step-")
        if not step.isdecimal() or (over_by is not None and int(step) > over_by):
            continue
        if name in names or int(step) <= until:
            steps[folder] = int(step)
    return max(steps, key=lambda folder: steps[folder], default=None)


def results_to_json(results: CanaryResults) -> dict[str, Any]:
    """Return results as plain JSON, null where a worker has none."""
    columns = {name: getattr(results, name).tolist() for name in _INT_COLUMNS}
    return {
        "suspect": results.suspect,
        "peer": results.peer,
        "projected": results.projected,
        "unit": results.unit,
        **{n: [None if v == MISSING_INT else v for v in c] for n, c in columns.items()},
        **{name: to_plain(getattr(results, name)) for name in _FLOAT_COLUMNS},
    }


def verdict_to_json(verdict: CanaryVerdict) -> dict[str, Any]:
    """Return a verdict as plain JSON."""
    return to_plain(asdict(verdict))  # type: ignore[no-any-return]


def _info(bundle: ReplayBundle) -> dict[str, Any]:
    return {
        "format": FORMAT,
        **{name: getattr(bundle, name) for name in _PLAIN},
        "structures": [batch.structure for batch in bundle.batches],
        "finding": None if bundle.finding is None else to_plain(bundle.finding.to_json()),
        "results": None if bundle.results is None else results_to_json(bundle.results),
        "verdict": None if bundle.verdict is None else verdict_to_json(bundle.verdict),
        "versions": {
            "rankscope": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            **bundle.versions,
        },
    }


def _bundle(info: Mapping[str, Any], batches: tuple[PlainBatch, PlainBatch]) -> ReplayBundle:
    finding, results, verdict = (info[name] for name in ("finding", "results", "verdict"))
    return ReplayBundle(
        **{name: kind(info[name]) for name, kind in _PLAIN.items()},
        batches=batches,
        finding=None if finding is None else Finding.from_json(finding),
        results=None if results is None else _results(results),
        verdict=None if verdict is None else _verdict(verdict),
        versions={str(name): str(version) for name, version in info["versions"].items()},
    )


def _results(plain: Mapping[str, Any]) -> CanaryResults:
    kinds = {**dict.fromkeys(_INT_COLUMNS, MISSING_INT), **dict.fromkeys(_FLOAT_COLUMNS, np.nan)}
    columns: dict[str, Any] = {
        name: np.array([missing if v is None else v for v in _column(plain, name)], type(missing))
        for name, missing in kinds.items()
    }
    shapes = {column.shape for column in columns.values()}
    if len(shapes) > 1 or any(len(shape) != 1 or not shape[0] for shape in shapes):
        raise ValueError("results that are not one of each worker")
    return CanaryResults(
        suspect=int(plain["suspect"]),
        peer=int(plain["peer"]),
        projected=bool(plain.get("projected", False)),
        unit=float(plain.get("unit", SINGLE)),
        **columns,
    )


def _column(plain: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return a column; one that was not recorded has no values."""
    if name not in ("again_losses_W", "again_norms_W"):
        return plain[name]  # type: ignore[no-any-return]
    return plain.get(name) or [None] * len(plain["losses_W"])


def _verdict(plain: Mapping[str, Any]) -> CanaryVerdict:
    distance = plain["distance"]
    return CanaryVerdict(
        CanaryCause(plain["verdict"]),
        tuple(int(rank) for rank in plain["ranks"]),
        np.nan if distance is None else float(distance),
        bool(plain["exact"]),
        tuple(map(str, plain.get("reasons", ()))),
        tuple(map(str, plain.get("hooks", ()))),
        bool(plain.get("compared", False)),
    )


def _read_batch(file: Path, structure: Any) -> PlainBatch:
    try:
        content = read_file(file, MAX_BYTES)
        _check_sizes(content)
        with np.load(BytesIO(content), allow_pickle=False) as archive:
            count = len(archive.files) - 1
            arrays = tuple(archive[f"array-{i}"] for i in range(count))
            samples = archive["samples"]
        if samples.dtype != np.int64 or samples.ndim != 1:
            raise ValueError(f"samples of {samples.dtype} in {samples.ndim} dimensions")
        return PlainBatch(structure, arrays, samples)
    except (*DAMAGES, RuntimeError) as error:  # of an archive with a password
        raise RunError(f"cannot read {file} ({error!s:.200}): the bundle is damaged") from error


def _check_sizes(content: bytes) -> None:
    """Raise ValueError for arrays larger than a batch: NumPy allocates what their headers state."""
    with zipfile.ZipFile(BytesIO(content)) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > MAX_BYTES:
            raise ValueError(f"it holds more than {MAX_BYTES // 2**20} MiB, which no batch does")
        for entry in entries:
            with archive.open(entry) as file:
                if np.lib.format.read_magic(file) != (1, 0):
                    raise ValueError(f"{entry.filename} is of another version")
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            if prod(shape) * dtype.itemsize > entry.file_size:
                raise ValueError(f"{entry.filename} is shorter than it says")


def _without_bundle(folder: Path) -> str:
    """Return what to name in place of a folder without a bundle, in words."""
    found = [str(path) for path in find_bundles(folder)]
    if (folder / "run.json").exists() and not found:
        return (
            f"the run {folder} has no saved batches to replay: a finding saves them when a worker "
            "differs from the others"
        )
    there = f"; there are {', '.join(found)}" if found else ""
    return (
        f"{folder} holds no replay bundle (no {_INFO}): name a directory under RUN/{FOLDER}/{there}"
    )
