"""The ways in which models go data parallel, and their meaning for the monitor."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WrapperKind:
    """A way in which a model goes data parallel.

    Attributes:
        name: Its name in messages and in the record.
        no_canary: Why a worker cannot run its model without the others; empty if it can.
        no_reference: Why a step's gradient cannot be computed again; empty if it can.
        state_by_parameter: Whether an optimizer's state belongs to single parameters, as a rule.
        updates_at_once: Whether each worker holds the new parameters when ``optimizer.step``
            returns.
        traces: Whether rank 0 holds whole parameters and gradients, of which it can keep a trace.
    """

    name: str
    no_canary: str = ""
    no_reference: str = ""
    state_by_parameter: bool = True
    updates_at_once: bool = True
    traces: bool = False

    def __str__(self) -> str:
        return self.name


def _no_whole(name: str) -> str:
    return f"a canary runs the whole model on each worker alone, which under {name} no worker holds"


DDP = WrapperKind("DDP", traces=True)
DDP_PARTS = WrapperKind(
    "DDP",
    no_canary="the training calls the parts of the model one by one, each in a DDP of its own",
    no_reference="the training calls its parts one by one, each in a DDP of its own",
)
"""A model of several parts, each in a DDP of its own."""
REPLICATE = WrapperKind(
    "replicate",
    no_canary="replicate() reduces in hooks of the model itself, so no worker can run it alone",
)
FSDP2 = WrapperKind("FSDP2", no_canary=_no_whole("FSDP2"))
DEEPSPEED = WrapperKind(
    "DeepSpeed",
    no_canary=_no_whole("DeepSpeed"),
    state_by_parameter=False,
    updates_at_once=False,
)
MEGATRON = WrapperKind(
    "Megatron-core",
    no_canary="a canary's backward pass would add to the gradients in Megatron-core's buffers",
    no_reference="its backward pass would add to the gradients in Megatron-core's buffers",
)
LOOP = WrapperKind("loop")
"""A model without wrapper, whose training reduces gradients itself."""
