"""How much of the gradients is compared, and at what price."""

from enum import StrEnum


class Tier(StrEnum):
    """What ``watch`` measures of the gradients' directions.

    P parameters, W workers, G groups, k sketch width.
    """

    SCALARS = "scalars"
    """Norms of local and reduced gradients. One read of each, a few numbers per worker and group.
    Exact: norms, the mean cosine weighted by the norms and, under DDP without bucket views, each
    worker's cosine with the sum of all others, for one more read of both. No pairs, no groups."""
    SKETCH = "sketch"
    """Norms, and a sketch of k floats per worker and 251 per group. One read of the gradient.
    Norms are exact; every pair's cosine errs by about (1 − cos²)/√k, a group's by the same with
    251."""
    EXACT = "exact"
    """Besides, the exact inner products of all pairs, out of a reduction of our own that takes
    the place of DDP's all-reduce: all-to-all, sum in the order of ranks, all-gather. The bytes of
    an all-reduce; the bits of the reduced gradient are those of that order."""
