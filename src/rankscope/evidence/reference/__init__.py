"""The gradient of one step, computed again without wrapper, accumulation or collective."""

from rankscope.bus.evidence import Evidence

EVIDENCE = Evidence("reference", __name__)
