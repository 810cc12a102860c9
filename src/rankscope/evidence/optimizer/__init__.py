"""What the optimizer holds where a session begins and where it is saved, and what it changes."""

from rankscope.bus.evidence import Evidence

KEY = "optimizer"
"""Its name in messages, and the beginning of the names of its rows in the table of digests."""

EVIDENCE = Evidence(KEY, __name__, held=KEY)
