"""What ranks along a mesh's other axes should agree on: losses, and labels of one sequence."""

from rankscope.bus.evidence import Evidence

EVIDENCE = Evidence("axes", __name__)
