"""From what each worker's optimizer holds to rows of the table of digests."""

from rankscope.bus.messages import HeldValues, Layout
from rankscope.evidence.optimizer import KEY


def make_combiner(layout: Layout) -> HeldValues:
    """Return the combiner of what optimizers hold."""
    return HeldValues(KEY)
