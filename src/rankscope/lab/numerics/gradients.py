"""Local gradients whose sums are measured: made up by kind, or read from a file."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import DataError, UsageError
from rankscope.files import DAMAGES, archive_of, open_file, replace

SYNTHETIC_ELEMENTS = 65_536
SUFFIXES = (".npz", ".npy")

_DAMAGED = (*DAMAGES, RuntimeError)  # zipfile: encrypted, or compressed in a way it does not know

_HOW = "see docs/numerics.md for how to save local gradients"


class GradientKind(StrEnum):
    """Kinds of synthetic gradients."""

    NORMAL = "normal"  # independent: workers have nothing in common, as late in training
    COHERENT = "coherent"  # one gradient with little noise (mean cosine 0.9), as early in training
    HEAVY_TAILED = "heavy-tailed"  # Student's t, 2 degrees of freedom: few elements are far larger
    CANCELLING = "cancelling"  # to a thousandth of their size: the hardest to add up


@dataclass(frozen=True, slots=True)
class LocalGradients:
    """Gradients of several workers for the same parameters, before they are reduced."""

    kind: str  # ``recorded``, ``synthetic`` or ``file``
    name: str  # what they are called where they are shown
    arrays: Mapping[str, NDArray[np.float32]]  # ``[W, n]`` by parameter name, finite

    @property
    def num_workers(self) -> int:
        """W."""
        return len(next(iter(self.arrays.values())))

    @property
    def num_elements(self) -> int:
        """Elements of one worker's gradient, over all names."""
        return sum(array.shape[1] for array in self.arrays.values())


def synthetic(
    kind: GradientKind, num_workers: int, *, seed: int = 0, num_elements: int = SYNTHETIC_ELEMENTS
) -> LocalGradients:
    """Make up gradients of four layers, each a tenth as large as the one before it."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for layer, columns in enumerate(np.array_split(np.arange(num_elements), 4)):
        values = _made_up(kind, rng, num_workers, len(columns)) * 10.0 ** (-2 - layer)
        arrays[f"layers.{layer}"] = values.astype(np.float32)
    return LocalGradients("synthetic", str(kind), arrays)


def _made_up(
    kind: GradientKind, rng: np.random.Generator, rows: int, columns: int
) -> NDArray[np.float64]:
    if kind is GradientKind.HEAVY_TAILED:
        return np.asarray(rng.standard_t(2, (rows, columns)))
    common = 3.0 * rng.standard_normal(columns) if kind is GradientKind.COHERENT else 0.0
    values = rng.standard_normal((rows, columns))
    if kind is GradientKind.CANCELLING:
        values -= values.mean(axis=0)
        common = 1e-3 * rng.standard_normal(columns)
    return np.asarray(values + common)


def read(path: Path) -> LocalGradients:
    """Read gradients from a file; DataError if it holds no finite ones of two workers or more.

    A ``.npz`` file has an array ``[W, …]`` for each parameter, a ``.npy`` file has one: float16,
    float32 or float64 (rounded to float32). Row i is worker i's gradient, flattened.
    """
    if path.suffix not in SUFFIXES:
        raise DataError(f"expected a .npz or .npy file of gradients, got {path}: {_HOW}")
    arrays: dict[str, NDArray[np.float32]] = {}
    try:
        with open_file(path) as file:
            loaded = np.load(file, allow_pickle=False)
            if path.suffix == ".npy":
                arrays[path.stem] = _checked(path, path.stem, loaded)
            else:
                for name in loaded.files:
                    arrays[name] = _checked(path, name, loaded[name])
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"there is no file {path}: check the path; {_HOW}") from None
    except _DAMAGED as error:
        raise DataError(
            f"{path} does not hold numpy arrays of numbers ({error}): write it with numpy.savez; "
            f"{_HOW}"
        ) from None
    workers = {name: len(array) for name, array in arrays.items()}
    if not arrays:
        raise DataError(f"{path} holds no array of gradients: {_HOW}")
    if len(set(workers.values())) > 1:
        few = min(workers, key=workers.__getitem__)
        many = max(workers, key=workers.__getitem__)
        raise DataError(
            f"{path}: expected one row for each worker in every array, got {workers[few]} in "
            f"{few!r} and {workers[many]} in {many!r}: save the same workers everywhere"
        )
    arrays = {name: array for name, array in arrays.items() if array.size}
    if not arrays:
        raise DataError(f"{path} holds empty arrays only: {_HOW}")
    return LocalGradients("file", path.name, arrays)


def _checked(path: Path, name: str, array: Any) -> NDArray[np.float32]:
    """Return an array of a file as float32 ``[W, n]``; raise DataError when it is none."""
    where = f"{path}, array {name!r}"
    if array.dtype.kind != "f":
        raise DataError(
            f"{where}: expected floating-point numbers, got {array.dtype}: convert bfloat16 to "
            "float32 first, which keeps every bit"
        )
    if array.ndim < 2 or len(array) < 2:
        raise DataError(
            f"{where}: expected gradients of at least 2 workers in the shape [W, …], got the "
            f"shape {list(array.shape)}: stack the workers' gradients along a new first dimension"
        )
    columns = array.size // len(array)
    with np.errstate(over="ignore"):
        flat: NDArray[np.float32] = array.reshape(len(array), columns).astype(np.float32)
    if not np.isfinite(flat).all():
        row, column = (int(index[0]) for index in np.nonzero(~np.isfinite(flat)))
        raise DataError(
            f"{where}: expected finite numbers, got {flat[row, column]} as element {column} of "
            f"worker {row}: save a step whose gradients are finite"
        )
    return flat


def save(gradients: LocalGradients, path: Path) -> None:
    """Write gradients to a ``.npz`` file that :func:`read` reads."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    replace(path, archive_of(gradients.arrays))


def for_workers(
    gradients_WN: NDArray[np.float32], num_workers: int, rng: np.random.Generator
) -> tuple[NDArray[np.float32], int]:
    """Return gradients of so many workers, making up those that are missing.

    A gradient that is made up is the mean of the given ones, shortened by what chance adds to its
    length, plus a random mixture of their deviations from it, with the covariance that the given
    ones have. So it has the expected norm, and the expected cosine with others of its kind, that
    the given ones have.

    Returns the gradients ``[num_workers, N]``, the given ones first, and how many are made up.
    """
    given = len(gradients_WN)
    if num_workers <= given:
        return gradients_WN[:num_workers], 0
    mean_N = gradients_WN.mean(axis=0, dtype=np.float64)
    factors = rng.standard_normal((num_workers - given, given)) / np.sqrt(given - 1)
    deviations_WN = gradients_WN - mean_N
    length = float((mean_N**2).sum())
    by_chance = float((deviations_WN**2).sum()) / (given * (given - 1))
    shortened = np.sqrt(max(1.0 - by_chance / length, 0.0)) if length > 0 else 0.0
    made_up = shortened * mean_N + factors @ deviations_WN
    return np.concatenate([gradients_WN, made_up.astype(np.float32)]), num_workers - given
