"""Parameters that the training begins to train after ``watch``, and whose gradients nobody reads."""

from rankscope.bus.evidence import Evidence

KEY = "joined"
"""Its name in messages, and the beginning of the names of its rows in the table of digests."""

EVIDENCE = Evidence("joined", __name__, held=KEY)
