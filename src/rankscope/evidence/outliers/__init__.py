"""Workers that differ from the others, by statistics with a bounded rate of false alarms."""

from rankscope.bus.evidence import Evidence

EVIDENCE = Evidence("outliers", __name__)
