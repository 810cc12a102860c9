"""Frozen modules that the training uses and no wrapper holds: teachers, encoders, references."""

from rankscope.bus.evidence import Evidence

KEY = "frozen"
"""Its name in messages, and the beginning of the names of its rows in the table of digests."""

EVIDENCE = Evidence("frozen", __name__, held=KEY)
