"""The reduced gradients of Megatron-core's ``DistributedDataParallel``: no parameter holds them."""

from collections.abc import Callable, Mapping
from typing import Any

from rankscope.evidence.parity.figures import Named, Part
from rankscope.wrappers.calls import Relay
from rankscope.wrappers.megatron import (
    check_megatron,
    is_sharded,
    own_shards,
    whole_gradients,
)


class MegatronBuffers:
    """What this rank holds of the gradient once it is reduced: a shard with ZeRO's reduce-scatter.

    Attributes:
        gradients: Views of the wrapper's buffers, by the parameters' names.
        firsts: The first element of each shard; empty without shards.

    Raises:
        UnsupportedError: The wrapper works in a way that is not known.
    """

    def __init__(self, ddp: Any, names: Mapping[int, str]) -> None:
        check_megatron(ddp, experts=True)
        self.gradients: list[Named] = []
        self.firsts: dict[str, int] = {}
        sizes = {names[id(p)]: p.numel() for p in ddp.module.parameters() if id(p) in names}
        for group in [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]:
            if is_sharded(ddp):
                for name, gradient, first in own_shards(group, names):
                    self.gradients.append((name, Part(gradient, (sizes[name],), (first,))))
                    self.firsts[name] = first
            else:
                self.gradients += [(name, each) for name, each, _ in whole_gradients(group, names)]
        self._end = Relay(ddp, "finish_grad_sync")

    def subscribe(self, after: Callable[..., None]) -> Callable[[], object]:
        """Call a bound method after each reduction; return a function that ends this."""
        return self._end.subscribe(after=after)
