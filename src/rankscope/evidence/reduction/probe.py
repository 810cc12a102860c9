"""Whether the reduction saw all gradients that the optimizer got."""

from rankscope.bus.probe import Job, MessagePart, Probe, Ready, StepEnd


class ReductionProbe(Probe):
    """Records the collector's facts about reductions."""

    def collect(self, end: StepEnd) -> Ready:
        """Return the step's flags."""
        values = {
            "unreduced": end.unreduced,
            "grad_left_over": end.left_over,
            "grad_set_aside": end.set_aside,
            "schedule_scale": end.schedule_scale,
        }
        return Ready(MessagePart(values))


def make_probe(job: Job) -> ReductionProbe:
    """Return the probe of these flags."""
    return ReductionProbe()
