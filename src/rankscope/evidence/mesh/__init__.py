"""Parameters and gradients that another axis of the device mesh replicates."""

from rankscope.bus.evidence import Evidence

EVIDENCE = Evidence("mesh", __name__)
