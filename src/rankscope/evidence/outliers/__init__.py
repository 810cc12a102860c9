"""Workers that differ from the others, by statistics with a bounded rate of false alarms."""

from rankscope.bus.evidence import Evidence

EXCHANGES = "forward"
"""Key of the exchanges among workers in the model's forward pass."""

EVIDENCE = Evidence("outliers", __name__, held=EXCHANGES)
