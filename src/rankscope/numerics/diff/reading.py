"""One of two runs, read for the comparison. T steps, W workers, G groups, N tensors."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.core.arrays import Floats, Ints
from rankscope.core.signals import DType, Table, signal
from rankscope.core.step import MISSING_INT
from rankscope.errors import RunError
from rankscope.record import Run
from rankscope.record.schema import to_numpy


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of one kind in one step, by name.

    Attributes:
        names: Sorted ``[N]``.
        digests_N: Digest of their bits.
        norms_N: Their L2 norms.
        sketches_NK: Their linear sketches.
    """

    names: tuple[str, ...]
    digests_N: Ints
    norms_N: Floats
    sketches_NK: Floats


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first time that a run's workers differ in what they should hold alike.

    Attributes:
        step: When.
        kind: parameter, optimizer, reduced or applied.
        name: What differs.
        ranks: Those that differ from most.
    """

    step: int
    kind: str
    name: str
    ranks: tuple[int, ...]


class Side:
    """One of the two runs.

    Args:
        run: An open run.

    Raises:
        RunError: A file is damaged, or the run has no step.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.info = run.info
        self.name = str(run.path)
        self._rows = run.table(Table.WORKERS)
        rows = to_numpy(self._rows["step"], DType.INT)
        if not len(rows):
            raise RunError(
                f"{run.path} has no recorded step: there is nothing to compare; wait until the "
                "run has written its first steps, or check the path"
            )
        self.steps_T: Ints
        self.steps_T, self._at = np.unique(rows, return_inverse=True)
        self._ranks = to_numpy(self._rows["rank"], DType.INT)
        self.num_workers = max(run.num_workers, int(self._ranks.max()) + 1)
        self._columns: dict[str, NDArray[Any]] = {}

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of the workers ``[T, W]``: NaN, MISSING_INT or False where null."""
        if name not in self._columns:
            dtype = signal(Table.WORKERS, name).dtype
            values = to_numpy(self._rows[name], dtype)
            fill = {DType.INT: MISSING_INT, DType.BOOL: False}.get(dtype, np.nan)
            matrix = np.full((len(self.steps_T), self.num_workers), fill, values.dtype)
            matrix[self._at, self._ranks] = values
            self._columns[name] = matrix
        return self._columns[name]

    @cached_property
    def samples(self) -> dict[int, dict[int, Ints]]:
        """Samples by step and rank, as far as they are recorded."""
        columns = self.run.columns(Table.SAMPLES, "step", "rank", "samples")
        found: dict[int, dict[int, Ints]] = {}
        for step, rank, ids in zip(*columns.values(), strict=True):
            found.setdefault(int(step), {})[int(rank)] = ids
        return found

    @cached_property
    def batches(self) -> dict[int, bytes]:
        """The multiset of samples of each step's global batch, as one key."""
        return {
            step: np.sort(np.concatenate(list(ranks.values()))).tobytes()
            for step, ranks in self.samples.items()
        }

    @cached_property
    def groups(self) -> dict[str, Floats]:
        """Local gradient norms of each group ``[T, W]``, NaN where not measured."""
        columns = self.run.columns(Table.GROUPS, "step", "rank", "group", "grad_norm")
        norms: dict[str, Floats] = {}
        names, which = np.unique(columns["group"].astype(str), return_inverse=True)
        known = np.isin(columns["step"], self.steps_T)
        at = np.searchsorted(self.steps_T, columns["step"])
        for index, name in enumerate(names):
            rows = (which == index) & known
            matrix = np.full((len(self.steps_T), self.num_workers), np.nan)
            matrix[at[rows], columns["rank"][rows]] = columns["grad_norm"][rows]
            norms[str(name)] = matrix
        return norms

    def per_step(self, name: str) -> Floats:
        """Return a float column of the steps table ``[T]``, NaN where it has no row."""
        columns = self.run.columns(Table.STEPS, "step", name)
        values = dict(zip(columns["step"].tolist(), columns[name].tolist(), strict=True))
        return np.array([values.get(int(step), np.nan) for step in self.steps_T])

    @cached_property
    def traces(self) -> dict[tuple[int, str], Tensors]:
        """Traced tensors by step and kind; empty when the run has no traces."""
        table = self.run.table(Table.TRACES)
        if not len(table):
            return {}
        columns = {s: to_numpy(table[s], signal(Table.TRACES, s).dtype) for s in _TRACED}
        names, kinds = columns["name"].astype(str), columns["kind"].astype(str)
        steps = columns["step"]
        width = max(len(cell) for cell in columns["sketch"])
        sketches_NK = np.full((len(table), width), np.nan)
        for row, cell in enumerate(columns["sketch"]):
            sketches_NK[row, : len(cell)] = cell
        order = np.lexsort((names, kinds, steps))
        changes = (np.diff(steps[order]) != 0) | (kinds[order][1:] != kinds[order][:-1])
        found = {}
        for rows in np.split(order, np.flatnonzero(changes) + 1):
            found[int(steps[rows[0]]), str(kinds[rows[0]])] = Tensors(
                tuple(names[rows].tolist()),
                columns["digest"][rows],
                columns["norm"][rows],
                sketches_NK[rows],
            )
        return found

    @cached_property
    def disagreement(self) -> Disagreement | None:
        """Where the run's own workers first differ in parameters, optimizer or gradients."""
        columns = self.run.columns(Table.DIGESTS, "step", "rank", "kind", "name", "digest")
        kinds = columns["kind"].astype(str)
        rows = np.flatnonzero(np.isin(kinds, ("parameter", "optimizer", "reduced", "applied")))
        if not len(rows):
            return None
        step = int(columns["step"][rows].min())
        rows = rows[columns["step"][rows] == step]
        order = ("reduced", "applied", "parameter", "optimizer")
        first = min(rows, key=lambda row: (order.index(kinds[row]), str(columns["name"][row])))
        kind, name = str(kinds[first]), str(columns["name"][first])
        same = rows[(kinds[rows] == kind) & (columns["name"][rows].astype(str) == name)]
        digests = columns["digest"][same]
        values, counts = np.unique(digests, return_counts=True)
        odd = digests != values[counts.argmax()]
        ranks = tuple(int(rank) for rank in columns["rank"][same][odd])
        return Disagreement(step, kind, name, ranks)

    def weighted_loss(self) -> Floats:
        """Return the global batch's loss ``[T]``: weighted by label tokens where these are known.

        NaN in steps where a worker has no loss.
        """
        losses, weights = self.column("loss"), self.column("loss_weight")
        known = (weights > 0).all(axis=1, keepdims=True)
        weights = np.where(known, weights, 1.0)
        return np.asarray((losses * weights).sum(axis=1) / weights.sum(axis=1), np.float64)


_TRACED = ("step", "kind", "name", "digest", "norm", "sketch")
