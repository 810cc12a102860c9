"""What one rank keeps of a step for ``rankscope parity``, and its bytes in a file.

Legend of shapes: P rows, each a rank's part of one tensor; Q parts of a tensor by position; k
numbers in a sketch; U losses; M micro-batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.shares import PackedError, pack_arrays, unpack_arrays
from rankscope.stats.arrays import Floats, Floats32, Ints

FOLDER = "parity"
"""The folder of a run's directory that holds the files."""

QUARTERS = 4
"""Parts by position into which each tensor is cut."""

WIDTH = 61
"""Numbers in the sketch of a quarter; a prime."""

VERSION = 1

START = "start"
BUFFER = "buffer"
GRADIENT = "gradient"
UNCLIPPED = "unclipped"
UPDATE = "update"
MOMENT = "moment "
HELD = "held "
OUTPUT = "output"
OUTPUT_GRADIENT = "output gradient"
"""Kinds of figures: parameters and buffers as the step begins; the gradient that the optimizer
gets, and the same before it was clipped; the update; each of the optimizer's moments by its name,
after the step, and before the first one; sums over the batch of what layers return, and of its
gradients."""


def folder_of_rank(rank: int) -> str:
    """Return the name of the folder of a rank's files."""
    return f"rank-{rank:05d}"


def file_of_step(step: int) -> str:
    """Return the name of the file of a step."""
    return f"step-{step:06d}.bin"


@dataclass(frozen=True, slots=True)
class TensorFigures:
    """Sketches and norms of one kind of tensors, on one rank."""

    names: tuple[str, ...] = ()  # names of the parameters ``[P]``
    # which part of the parameter the rank holds ``[P]``; equal for copies
    places: tuple[str, ...] = ()
    squares_PQ: Floats = field(default_factory=lambda: np.empty((0, QUARTERS)))  # sums of squares
    # linear sketches, whose signs depend on name and position alone
    sketches_PQK: Floats32 = field(
        default_factory=lambda: np.empty((0, QUARTERS, WIDTH), np.float32)
    )

    def plus(self, other: "TensorFigures") -> "TensorFigures":
        """Return the figures of the tensors of both."""
        return TensorFigures(
            self.names + other.names,
            self.places + other.places,
            np.concatenate([self.squares_PQ, other.squares_PQ]),
            np.concatenate([self.sketches_PQK, other.sketches_PQK]),
        )


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's part of a step."""

    rank: int
    step: int  # the step, counted from the beginning of the training
    facts: Mapping[str, Any]  # what is no number, by name
    figures: Mapping[str, TensorFigures]
    # identities of the samples
    samples: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    # losses of the micro-batches, and of samples where the training gave those ``[U]``
    losses: Floats = field(default_factory=lambda: np.empty(0))
    # label tokens behind each ``[U]``; NaN if unknown
    weights: Floats = field(default_factory=lambda: np.empty(0))
    # factor between loss and what ``backward`` was called on ``[M]``; or none
    multipliers: Floats = field(default_factory=lambda: np.empty(0))

    def pack(self) -> bytes:
        """Return its bytes: JSON, and arrays behind it."""
        header = {
            "version": VERSION,
            "rank": self.rank,
            "step": self.step,
            "facts": dict(self.facts),
            "figures": {k: [list(f.names), list(f.places)] for k, f in self.figures.items()},
        }
        arrays: list[NDArray[Any]] = [self.samples, self.losses, self.weights, self.multipliers]
        for each in self.figures.values():
            arrays += [each.squares_PQ, each.sketches_PQK]
        return pack_arrays(header, arrays)

    @classmethod
    def unpack(cls, content: bytes) -> "RankStep":
        """Read it; its arrays are views of ``content``."""
        header, arrays = unpack_arrays(content)
        try:
            if header["version"] != VERSION:
                raise PackedError("they were recorded by another version of rankscope")
            figures = {}
            places = zip(arrays[4::2], arrays[5::2], strict=True)
            for (kind, (names, at)), (squares, sketches) in zip(
                header["figures"].items(), places, strict=True
            ):
                expected = (len(names), QUARTERS)
                if squares.shape != expected or sketches.shape != (*expected, WIDTH):
                    raise PackedError(f"figures of {kind} do not fit together")
                named = tuple(map(str, names)), tuple(map(str, at))
                figures[str(kind)] = TensorFigures(*named, squares, sketches)
            return cls(int(header["rank"]), int(header["step"]), dict(header["facts"]), figures,
                       *arrays[:4])  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise PackedError(f"these bytes hold no step of a rank ({error})") from error
