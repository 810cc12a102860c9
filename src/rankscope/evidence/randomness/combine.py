"""From the states of each worker's random generators to rows of the table of digests."""

from rankscope.bus.judge import HeldValues
from rankscope.bus.layout import Layout
from rankscope.evidence.randomness import KEY


def make_combiner(layout: Layout) -> HeldValues:
    """Return the combiner of random states."""
    return HeldValues(KEY)
