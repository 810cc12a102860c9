"""Finds models whose shards begin with the same random numbers on every rank.

Each rank that draws its own shard from the same seed draws what the others draw: a matrix then
consists of copies of its first rows. A matrix may repeat its rows on purpose, as experts do that
begin as copies of one, but not every matrix of a model.
"""

from collections.abc import Sequence
from functools import partial
from itertools import compress

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rankscope.bus.probe import Awaited, Job, MessagePart
from rankscope.bus.rare import RareProbe
from rankscope.gradients.host import HostCopy
from rankscope.stats.arrays import digest_of
from rankscope.wrappers.find import FSDP2
from rankscope.wrappers.labels import own

_ELEMENTS = 16  # of each shard
_MOST_MATRICES = 64


class ShardsProbe(RareProbe):
    """Reads the first elements of sharded matrices before a session's first update."""

    def __init__(self, matrices: Sequence[tuple[str, DTensor]], first_step: int) -> None:
        super().__init__(first_step, last=0)
        self._matrices = matrices

    def before_forward(self, step: int, *, first: bool) -> None:
        """Read them before the first forward pass."""
        if not self.due or not first:
            return
        some = [(n, m) for n, m in self._matrices if own(m).numel() >= _ELEMENTS][:_MOST_MATRICES]
        if some:
            rows = [own(matrix).reshape(-1)[:_ELEMENTS].float() for _, matrix in some]
            copy = HostCopy(torch.stack(rows), own=True)
            names = [(name, _place_of(matrix)) for name, matrix in some]
            self.pending = Awaited([copy], partial(_read, names, copy))


def _read(names: Sequence[tuple[str, str]], copy: HostCopy) -> MessagePart:
    """Return what each shard begins with, without those that begin with a constant."""
    starts_ME = copy.numpy().astype(np.float32)
    vary_M = np.ptp(starts_ME, axis=1) > 0
    rows = zip(names, starts_ME, strict=True)
    found = [
        [name, place, digest_of(row.tobytes())] for (name, place), row in compress(rows, vary_M)
    ]
    return MessagePart(names={"shards": found} if found else {})


def _place_of(matrix: DTensor) -> str:
    """Return this rank's place along the axes over which a matrix is divided."""
    coordinate = matrix.device_mesh.get_coordinate() or ()
    placed = zip(coordinate, matrix.placements, strict=True)
    return " ".join(str(at) for at, placement in placed if not placement.is_replicate())


def make_shards_probe(job: Job) -> ShardsProbe | None:
    """Return the probe of sharded matrices; None where there are none."""
    if job.wrapped.kind is not FSDP2:
        return None
    held: dict[str, Tensor] = job.wrapped.parameters
    matrices = [(n, p) for n, p in held.items() if isinstance(p, DTensor) and p.dim() > 1]
    return ShardsProbe(matrices, job.first_step) if matrices else None
