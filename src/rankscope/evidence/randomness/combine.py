"""From the states of each worker's random generators to rows of the table of digests."""

from rankscope.bus.messages import HeldValues, Layout
from rankscope.evidence.randomness import KEY


def make_combiner(layout: Layout) -> HeldValues:
    """Return the combiner of random states."""
    return HeldValues(KEY)
