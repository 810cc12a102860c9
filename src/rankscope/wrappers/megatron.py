"""The local gradient under Megatron-core's ``DistributedDataParallel``.

Its hooks add each micro-batch's gradient to ``main_grad``, a view of a buffer, and drop ``.grad``.
Buffers are cut into buckets. A group of buckets begins its reduction with ``start_grad_sync``: in
the last micro-batch's backward pass (``overlap_grad_reduce``), or after it. That scales the buffer
first. So the local gradient is read before that call, group by group, and the reduced one as soon
as the wrapper's ``finish_grad_sync`` has returned.

With the distributed optimizer the reduction is a reduce-scatter. Of each bucket, a worker then
holds one shard of the reduced gradient; nobody uses the rest of the bucket.

The gradient is that of the tensor on which ``backward`` is called: with Megatron's schedules, the
loss divided by the number of micro-batches, or a sum over tokens (``calculate_per_token_loss``),
times the loss scale.

Legend of shapes: W workers.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankscope.errors import UnsupportedError
from rankscope.gradients.sketch import Measured
from rankscope.gradients.totals import GradientTotals
from rankscope.wrappers.calls import Relay
from rankscope.wrappers.parts import MicroBatches, measure_reduced_parts
from rankscope.wrappers.passes import BackwardEnd
from rankscope.wrappers.tap import GradientTap, LocalGradient, ReadReduced, TapPlan, guarded
from rankscope.wrappers.wrapped import Wrapped, WrapperKind

_WRAPPERS = "megatron.core.distributed"
_OPTIMIZERS = "megatron.core.optimizer"
_NEEDED = (
    "config", "ddp_config", "buffers", "bucket_groups", "expert_parallel_buffers", "dp_group",
    "dp_cp_group", "tp_group", "pp_group", "finish_grad_sync",
)  # fmt: skip
_NEEDED_OF_GROUPS = "buckets", "start_grad_sync", "grad_reduce_handle"
_NEEDED_OF_BUCKETS = "params_list", "grad_data", "gradient_scaling_factor"


class MegatronTap(GradientTap):
    """Reads gradients of Megatron-core's ``DistributedDataParallel``."""

    def __init__(
        self,
        wrapped: Wrapped,
        plan: TapPlan,
    ) -> None:
        ddp = wrapped.wrapper
        parameters = wrapped.parameters
        super().__init__(plan)
        sketcher = plan.sketcher
        self._factor = factor_of_mean(ddp)
        sharded = is_sharded(ddp)
        self.reduced_copies = 1 if sharded else megatron_process_group(ddp).size()
        self._totals = sketcher.new_totals()
        self._reduced = sketcher.new_totals()
        self._grown = sketcher.new_totals()
        self._micro = MicroBatches()
        self._backward = BackwardEnd(self._begin_backward, self._end_backward, plan.guarded)
        self._buffers = [buffer.grad_data for buffer in ddp.buffers]
        self._versions: list[int] = []  # of the buffers, when the pass began
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._groups = [_Group(group, names, self._read_group) for group in ddp.bucket_groups]
        self._all = [part for group in self._groups for part in group.gradients]
        self._held = self._all
        if sharded:
            self._held = [p for group in ddp.bucket_groups for p in own_shards(group, names)]
        self._stop = Relay(ddp, "finish_grad_sync").subscribe(after=self._finish)
        self._complete = self._begun = False
        self._carried_over: Tensor | None = None
        self._start_again()

    @property
    def summed_workers(self) -> float:
        """1 for a mean, W under ``calculate_per_token_loss``."""
        return self._factor

    def begin_forward(self, *, measure: bool, bypassed: bool = False) -> None:
        """Announce a forward pass in training; one past the wrapper is seen by its hooks as well.

        The sum of earlier passes is read here: only now it is known that they were not the step's
        last.
        """
        if self._measure and measure and self._num_new and self._sketcher.sketches:
            self._grown.reset()
            self._sketcher.measure_many(self._all, self._grown)
            self._add_micro_batch(self._grown, last=False)
        self._backward.begin()
        self._measure = measure

    def notice_backward(self, trained: Callable[[], None]) -> None:
        """Note that the running backward pass has reached the model's output."""
        if self._measure and not self._begun:
            self._carried_over = self._sketcher.holds_any([g for _, g, _ in self._all])
        self._begun = True
        self._backward.notice()
        self._reached.append(trained)

    @property
    def complete(self) -> bool:
        """Whether a reduction has ended since the last :meth:`collect`."""
        return self._complete

    @property
    def aborted(self) -> bool:
        """Whether a backward pass began since then and never ended: it raised."""
        return self._backward.running

    def _gradient(self) -> LocalGradient | None:
        if any(group.reads != 1 for group in self._groups):
            return None
        reduced = None if self._reads is ReadReduced.OFF else self._reduced
        micro = self._micro.squared_norms() if self._one_each else None
        return LocalGradient(self._totals, reduced, micro, self._carried_over)

    def remove(self) -> None:
        """Take all hooks out of the model."""
        self._stop()
        for group in self._groups:
            group.stop()

    def _start_again(self) -> None:
        self._backward.begin()
        self._complete = self._begun = False
        self._carried_over = None
        self._one_each = True  # each reading holds one micro-batch more than the last one
        self._num_new = 0  # backward passes since the last reading
        self._micro.reset()
        for group in self._groups:
            group.reads = 0

    def _begin_backward(self) -> None:
        self._reached.clear()
        self._versions = self._now()

    def _now(self) -> list[int]:
        return [buffer._version for buffer in self._buffers]

    def _end_backward(self) -> None:
        if self._versions == self._now():
            return  # the training wanted gradients, and accumulated none
        for trained in self._reached:
            trained()
        self._num_new += 1
        self.unreduced = True

    def _add_micro_batch(self, totals: GradientTotals, *, last: bool) -> None:
        self._one_each &= self._num_new == 1
        self._num_new = 0
        self._micro.add(totals, last=last)

    @guarded
    def _read_group(self, group: "_Group") -> None:
        """Read the local gradient of buckets whose reduction is about to begin."""
        if not self._measure or group.begun:  # then the call does nothing
            return
        if not any(each.reads for each in self._groups):
            self._totals.reset()
        group.reads += 1
        self._sketcher.measure_many(group.gradients, self._totals)

    @guarded
    def _finish(self, *args: Any, **kwargs: Any) -> None:
        """Close a step: all reductions are over, and nothing has touched the gradients since."""
        self._complete = True
        self.unreduced = False
        if not self._measure:
            return
        if self._sketcher.sketches:
            self._add_micro_batch(self._totals, last=True)
        if self._reads is not ReadReduced.OFF:
            measure_reduced_parts(self._sketcher, self._reads, self._held, self._reduced)
            self._reduced.scale(1 / self._factor)


class _Group:
    """A group of buckets that are reduced together; ``starts`` is called before each reduction."""

    def __init__(
        self, group: Any, names: Mapping[int, str], starts: Callable[["_Group"], None]
    ) -> None:
        self.gradients = whole_gradients(group, names)
        self.reads = 0  # in this step; the second one is not of a local gradient
        self._group = group
        self._starts = starts
        self.stop = Relay(group, "start_grad_sync").subscribe(before=self._see_start)

    @property
    def begun(self) -> bool:
        """Whether their reduction has begun and has not ended."""
        return self._group.grad_reduce_handle is not None

    def _see_start(self, *args: Any, **kwargs: Any) -> None:
        self._starts(self)


def is_megatron(model: object) -> bool:
    """Return whether a model is in a wrapper of Megatron-core's."""
    return _comes_from(model, _WRAPPERS)


def plain_megatron_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside Megatron-core's, which takes hooks; any other as it is.

    None where several are chained, or where there is none inside.
    """
    while _comes_from(optimizer, _OPTIMIZERS) and not isinstance(optimizer, torch.optim.Optimizer):
        chained = getattr(optimizer, "chained_optimizers", None)
        if chained is None:
            optimizer = getattr(optimizer, "optimizer", None)
        else:
            optimizer = chained[0] if len(chained) == 1 else None
    return optimizer


def megatron_process_group(ddp: Any) -> dist.ProcessGroup:
    """Return the ranks over which a wrapper reduces gradients; each of them is a worker."""
    check_megatron(ddp)
    group: dist.ProcessGroup = ddp.dp_cp_group
    return group


def check_megatron(ddp: Any, *, experts: bool = False) -> None:
    """Raise UnsupportedError where a wrapper works in another way.

    With ``experts``, these may be dealt out over ranks.
    """
    for reason, present in _obstacles(ddp, experts):
        if present:
            who, kinds = (
                ("parity", "those of data and experts")
                if experts
                else ("watch()", "that of the data")
            )
            raise UnsupportedError(
                f"{who} expected Megatron-core's DistributedDataParallel, and no parallelism but "
                f"{kinds}, got {reason}, which cannot be watched"
            )


def megatron_parameters(ddp: Any) -> dict[str, Tensor]:
    """Return the trained parameters whose gradients are reduced, by their names in the module."""
    reduced = {id(parameter) for bucket in _buckets(ddp) for parameter in bucket.params_list}
    named = ddp.module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and id(p) in reduced}


def is_sharded(ddp: Any) -> bool:
    """Return whether a worker gets a shard of the reduced gradient: the distributed optimizer."""
    return bool(ddp.ddp_config.use_distributed_optimizer)


def factor_of_mean(ddp: Any) -> float:
    """Return the ratio of a reduced gradient to the mean of the workers' local ones.

    It is 1, or W under ``calculate_per_token_loss``, where they are added up.
    """
    first = next(_buckets(ddp))
    adds_up = not ddp.ddp_config.average_in_collective
    return float(first.gradient_scaling_factor) * (ddp.dp_cp_group.size() if adds_up else 1)


def whole_gradients(group: Any, names: Mapping[int, str]) -> list[Measured]:
    """Return the gradients in a group of buckets, each as a view of its buffer.

    Parameters without a name by their ``id`` are left out.
    """
    parameters = [p for bucket in group.buckets for p in bucket.params_list]
    return [(names[id(p)], p.main_grad, 0) for p in parameters if id(p) in names]


def own_shards(group: Any, names: Mapping[int, str]) -> list[Measured]:
    """Return the parts of the gradients of a group that a reduce-scatter reduces for this worker.

    Each bucket is cut into as many equal shards as there are workers; parameters in it begin at
    multiples of 64, with padding before them.
    """
    size = group.intra_distributed_optimizer_instance_size
    rank = group.intra_distributed_optimizer_instance_rank
    shards: list[Measured] = []
    for bucket in group.buckets:
        length = bucket.grad_data.numel() // size
        for parameter in bucket.params_list:
            gradient = parameter.main_grad
            at = gradient.storage_offset() - bucket.grad_data.storage_offset()
            start = max(rank * length - at, 0)
            stop = min((rank + 1) * length - at, gradient.numel())
            if start < stop and id(parameter) in names:
                shards.append((names[id(parameter)], gradient.view(-1)[start:stop], start))
    return shards


def _obstacles(ddp: Any, experts: bool) -> Iterator[tuple[str, bool]]:
    missing = _missing(ddp)
    yield f"{type(ddp).__name__} without {', '.join(missing)}", bool(missing)
    config = ddp.config
    settings = ddp.ddp_config
    yield "mixture-of-experts layers", bool(ddp.expert_parallel_buffers) and not experts
    yield "no parameter that it reduces", not ddp.bucket_groups
    yield "tensor parallelism", _size(ddp.tp_group) > 1
    yield "pipeline parallelism", _size(ddp.pp_group) > 1
    yield "context parallelism", _size(ddp.dp_cp_group) != _size(ddp.dp_group)
    yield "FP8", any(getattr(config, name, None) for name in ("fp8", "fp4"))
    yield "CUDA graphs", getattr(config, "cuda_graph_impl", "none") != "none"
    for name in ("overlap_param_gather", "delay_wgrad_compute"):
        yield name, bool(getattr(settings, name, False))
    instances = getattr(settings, "num_distributed_optimizer_instances", 1)
    yield "num_distributed_optimizer_instances above 1", instances > 1


def _missing(ddp: Any) -> list[str]:
    missing = [name for name in _NEEDED if not hasattr(ddp, name)]
    for group in () if missing else ddp.bucket_groups:
        missing += [name for name in _NEEDED_OF_GROUPS if not hasattr(group, name)]
        for bucket in getattr(group, "buckets", ()):
            missing += [name for name in _NEEDED_OF_BUCKETS if not hasattr(bucket, name)]
    return list(dict.fromkeys(missing))


def _size(group: Any) -> int:
    groups = group if isinstance(group, list) else [group]
    return max(int(each.size()) for each in groups)


def _comes_from(value: object, package: str) -> bool:
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(value).__mro__)


def _buckets(ddp: Any) -> Iterator[Any]:
    for group in ddp.bucket_groups:
        yield from group.buckets


_SETTINGS = (
    "grad_reduce_in_fp32", "overlap_grad_reduce", "use_distributed_optimizer",
    "average_in_collective", "bucket_size",
)  # fmt: skip

MEGATRON = WrapperKind(
    "Megatron-core",
    "Megatron-core reduces over a group",
    MegatronTap,
    own_optimizer=False,
    no_canary="a canary's backward pass would add to the gradients in Megatron-core's buffers",
    no_reference="its backward pass would add to the gradients in Megatron-core's buffers",
)


@dataclass(frozen=True, slots=True)
class MegatronModel(Wrapped):
    """A model in Megatron-core's ``DistributedDataParallel``."""

    def settings(self) -> Mapping[str, object]:
        """Return the settings of its ``ddp_config``."""
        return {name: getattr(self.wrapper.ddp_config, name) for name in _SETTINGS}

    def gradient_types(self) -> Mapping[str, Collection[torch.dtype]]:
        """Return by parameter the type of its buffer."""
        held = {name: getattr(p, "main_grad", p) for name, p in self.parameters.items()}
        return {name: [gradient.dtype] for name, gradient in held.items()}


def find_megatron(ddp: Any, process_group: object = None) -> Wrapped:
    """Return a model in Megatron-core's wrapper."""
    group = megatron_process_group(ddp)
    device = ddp.buffers[0].grad_data.device
    return MegatronModel(MEGATRON, ddp, megatron_parameters(ddp), group, device)
