"""Parameters that are trained and whose gradients nobody reads: begun later, or of other models."""

from rankscope.bus.evidence import Evidence

KEY = "joined"
"""Its name in messages, and the beginning of the names of its rows in the table of digests."""

BEGINS = " at the first update"
"""Ends the names of values that were read before an optimizer was called."""

INSIDE = ", parts of the watched model"
"""Ends the names of parameters that are in a watched model, and that its wrapper leaves alone."""

EVIDENCE = Evidence("joined", __name__, held=KEY)
