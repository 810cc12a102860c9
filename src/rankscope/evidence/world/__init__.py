"""The job as a whole: ranks that hold the same model, and the groups that reduce its gradients."""

from rankscope.bus.evidence import Evidence

EVIDENCE = Evidence("world", __name__)
