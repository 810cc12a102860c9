"""From what each worker's optimizer holds to rows of the table of digests."""

from rankscope.bus.judge import HeldValues
from rankscope.bus.layout import Layout
from rankscope.evidence.optimizer import KEY


def make_combiner(layout: Layout) -> HeldValues:
    """Return the combiner of what optimizers hold."""
    return HeldValues(KEY)
