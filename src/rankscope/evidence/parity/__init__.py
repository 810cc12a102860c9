"""What a training is, step by step, in a form that does not depend on its layout."""

from rankscope.bus.evidence import Evidence

EVIDENCE = Evidence("parity", __name__)
