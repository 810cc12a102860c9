"""The optimizer's update, computed again on whole parameters, in a step that is verified."""

from rankscope.bus.evidence import Evidence

EVIDENCE = Evidence("update", __name__)
