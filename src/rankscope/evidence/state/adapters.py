"""Finds matrices that an adapter is added to and that are trained as well.

A low-rank adapter of a matrix ``W [o, i]`` is a pair ``[r, i]``, ``[o, r]`` with a small ``r`` (or
both transposed), one of which begins at zero, so that it changes nothing at first. It is trained in
place of ``W``, which stays frozen.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rankscope.bus.probe import Job, MessagePart, Probe, Ready, StepEnd
from rankscope.wrappers.find import all_parameters
from rankscope.wrappers.labels import own
from rankscope.wrappers.optimizers import held_names

_MOST_LEVELS = 3  # from a factor's own module up to the one that holds the matrix, too


def adapted_matrices(parameters: Mapping[str, Tensor], trained: Sequence[str]) -> list[str]:
    """Return the trained matrices to which an adapter is added, by name.

    There are none where no other matrix is frozen: all of the model is trained on purpose then.

    Args:
        parameters: All parameters of the model by name, as they begin.
        trained: Names of those that the optimizer updates.
    """
    matrices = {name: p for name, p in parameters.items() if p.dim() == 2 and not p.is_meta}
    if all(name in trained for name in matrices):
        return []
    updated = {name: matrices[name] for name in trained if name in matrices}
    with torch.no_grad():
        zero = [name for name, matrix in updated.items() if not own(matrix.detach()).any()]
    return sorted({base for name in zero for base in _bases_of(name, updated)})


def _bases_of(zero: str, updated: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the matrices in the smallest part of the model that has the adapter's other factor."""
    scope = zero
    for _ in range(_MOST_LEVELS):
        scope = scope.rpartition(".")[0]
        inside = [n for n in updated if n != zero and n.startswith(f"{scope}." if scope else "")]
        pairs = [(factor, _product(updated[zero], updated[factor])) for factor in inside]
        bases = [
            base
            for factor, shapes in pairs
            for base in inside
            if base != factor and tuple(updated[base].shape) in shapes
        ]
        if any(shapes for _, shapes in pairs) or not scope:
            yield from bases
            return


def _product(one: Tensor, other: Tensor) -> set[tuple[int, int]]:
    """Return the shapes of the products of two matrices, in either order, of a low rank."""
    orders = ((one.shape, other.shape), (other.shape, one.shape))
    return {
        (left[0], right[1])
        for left, right in orders
        if left[1] == right[0] and 2 * left[1] <= min(left[0], right[1])
    }


class AdapterProbe(Probe):
    """Sends the names of such matrices, in the first step of a session."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def collect(self, end: StepEnd) -> Ready | None:
        """Return the names once."""
        names, self._names = self._names, []
        return Ready(MessagePart(names={"adapted": names})) if names else None


def make_adapter_probe(job: Job) -> AdapterProbe | None:
    """Return the probe of adapters; None where the optimizer does not hold the parameters."""
    if getattr(job.optimizer, "param_groups", None) is None:
        return None
    parameters = all_parameters(job.wrapped)
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    names = adapted_matrices(parameters, held_names(job.optimizer, trained))
    return AdapterProbe(names) if names else None
