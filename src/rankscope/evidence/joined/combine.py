"""From the names of parameters that joined the training to rows of the table of digests."""

from rankscope.bus.messages import HeldValues, Layout
from rankscope.evidence.joined import KEY


def make_combiner(layout: Layout) -> HeldValues:
    """Return the combiner of these names."""
    return HeldValues(KEY)
