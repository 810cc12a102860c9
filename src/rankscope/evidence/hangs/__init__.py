"""Steps that do not end, and where each rank stands."""

from rankscope.bus.evidence import Evidence

EVIDENCE = Evidence("hangs", __name__)
