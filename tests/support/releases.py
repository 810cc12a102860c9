"""Which releases of torch can do what only some of them can."""

from torch.distributed.fsdp import FSDPModule

SINCE_TORCH_2_13 = hasattr(FSDPModule, "reset_iter_state")
"""FSDP2 can forget an aborted pass; DDP allows other forward passes between one and its backward
pass."""
SINCE_TORCH_2_15 = hasattr(FSDPModule, "finalize_backward")
"""FSDP2 accumulates gradients in the type in which they are reduced, which is the parameter's by
default. A reduction takes zeros where HSDP holds a part of earlier ones."""
