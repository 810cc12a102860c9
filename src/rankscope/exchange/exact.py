"""The exact tier: inner products of whole local gradients, out of the reduction that runs anyway.

A DDP communication hook puts :class:`~rankscope.exchange.reduction.OrderedMean` in the place of
the all-reduce. Between its halves each worker holds one W-th of every worker's gradient; the
inner products of these pieces, summed over workers, are those of the gradients.

A communication hook cannot be taken out of a DDP model again: after :meth:`ExactGram.release` the
reduction stays, since another one would round otherwise, and only the measurement ends.

Legend of shapes: W workers, N any number of gradient elements, T = W (W + 1) / 2.
"""

from functools import partial
from typing import Any, NoReturn, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from rankscope.capture.tap import Guarded
from rankscope.errors import UnsupportedError
from rankscope.exchange.reduction import Exchange, OrderedMean

_WITH_FLOAT64 = ("cpu", "cuda")


class ExactGram:
    """Reduces the gradient of a DDP model and measures all inner products on the way.

    Made by :meth:`register`. The reduced gradient is the sum over workers in rank order, in fp32,
    divided by W: the same bits on every worker and in every run. It differs from what DDP's own
    all-reduce gives by rounding (not at all at W = 2 in fp32).

    Args:
        group: The workers.
        device: Where the gradients are.
        num_bytes: Size of all buckets of a backward pass.
        guarded: Keeps the measurement's exceptions out of the reduction.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, num_bytes: int, guarded: Guarded
    ) -> None:
        self.measure = True
        """Whether the backward passes that begin from now on are measured."""
        self._num_workers = group.size()
        self._device = device
        self._guarded = guarded
        self._reduction = OrderedMean(group, device)
        self._under_way: Exchange | None = None
        self._share: _Share | None = None
        self._num_bytes = num_bytes
        self._num_bytes_missing = 0
        self._first_address = 0
        self._complete = False

    @classmethod
    def register(cls, model: DistributedDataParallel, guarded: Guarded) -> Self:
        """Put the reduction into a model; every worker calls it at the same point of the program.

        Args:
            model: A model that :func:`check_exact` has accepted on every worker.
            guarded: Keeps the measurement's exceptions out of the reduction.

        Raises:
            UnsupportedError: See :func:`check_exact`; or the backend has no all-to-all.
        """
        check_exact(model)
        _try_all_to_all(model.process_group, model.device)
        num_bytes = _log(model)["total_parameter_size_bytes"]
        exact = cls(model.process_group, model.device, num_bytes, guarded)
        model.register_comm_hook(exact, _reduce_bucket)
        return exact

    def take_gram(self) -> Tensor | None:
        """Return this worker's share of the last backward pass's Gram matrix, and forget it.

        Call it after the backward pass, on the stream that the training runs on.

        Returns:
            Symmetric ``[W, W]`` on the gradient's device, in float64 where the device has that.
            The sum of all workers' shares holds ``g_i · g_j``; see :func:`sum_shares`. None when
            the last backward pass was not measured, or not to its end.
        """
        share, self._share = self._share, None
        return share.gram_WW if self._complete and share is not None and share.whole else None

    def release(self) -> None:
        """Stop measuring for good. The reduction stays in the model, with the same bits."""
        self.measure = False
        self._share = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies empty: DDP copies the hook's state with the model, but not the hook."""
        return type(None), ()

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Begin to average a bucket's gradients; called by DDP, bucket by bucket.

        Each call first finishes the bucket before: its communication had the time in between, and
        collectives are launched in the same order everywhere whatever arrives first.
        """
        buffer = bucket.buffer()
        if self._begins_with(bucket):
            self._begin()
            self._first_address = buffer.data_ptr()
        self._finish()
        exchange = self._under_way = self._reduction.start(buffer)
        self._num_bytes_missing -= buffer.nbytes
        if bucket.is_last() or self._num_bytes_missing <= 0:
            self._finish()
            self._reduction.trim()
            self._num_bytes_missing = 0
            self._complete = True
        return exchange.mean

    def _begins_with(self, bucket: dist.GradBucket) -> bool:  # type: ignore[name-defined]
        """Return whether a bucket is the first of a backward pass.

        In the first pass of a static graph every bucket has the index 0 and none is the last, so
        that sizes have to be counted. A pass that raised before its end was reset by the user.
        """
        again = bucket.index() == 0 and bucket.buffer().data_ptr() == self._first_address
        return self._num_bytes_missing == 0 or again

    def _begin(self) -> None:
        if self._under_way is not None:
            self._under_way.abandon()
            self._under_way = None
        self._num_bytes_missing = self._num_bytes
        self._complete = False
        self._share = None
        if self.measure:
            self._guarded(self._new_share)

    def _new_share(self) -> None:
        self._share = _Share(self._num_workers, self._device)

    def _finish(self) -> None:
        exchange, self._under_way = self._under_way, None
        if exchange is not None:
            self._reduction.finish(exchange, self._look)

    def _look(self, gradients_WN: Tensor) -> None:
        if self._share is not None:
            self._share.num_shown += gradients_WN.shape[1]
            self._guarded(partial(self._share.add, gradients_WN))


class _Share:
    """One worker's share of the Gram matrix of one backward pass.

    Products are taken and added in float64, which also keeps matrix units that would round fp32
    factors away from them.
    """

    def __init__(self, num_workers: int, device: torch.device) -> None:
        self._dtype = torch.float64 if device.type in _WITH_FLOAT64 else torch.float32
        self.gram_WW = torch.zeros(num_workers, num_workers, dtype=self._dtype, device=device)
        self.num_shown = 0
        self._num_added = 0

    @property
    def whole(self) -> bool:
        return self._num_added == self.num_shown

    def add(self, gradients_WN: Tensor) -> None:
        wide_WN = gradients_WN.to(self._dtype)
        self.gram_WW.addmm_(wide_WN, wide_WN.T)
        self._num_added += gradients_WN.shape[1]


def _reduce_bucket(state: ExactGram, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    return state.reduce(bucket)


def pack_share(gram_WW: Tensor) -> Tensor:
    """Return the upper triangle ``[T]`` of a share, row by row: what has to travel."""
    rows, columns = torch.triu_indices(*gram_WW.shape, device=gram_WW.device)
    return gram_WW[rows, columns]


def sum_shares(packed_WT: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return the Gram matrix ``[W, W]`` of the local gradients from all workers' packed shares.

    Rows and columns of workers whose gradient holds an infinity or NaN are NaN.
    """
    num_workers = len(packed_WT)
    gram_WW = np.zeros((num_workers, num_workers))
    rows, columns = np.triu_indices(num_workers)
    with np.errstate(invalid="ignore"):
        gram_WW[rows, columns] = packed_WT.sum(axis=0, dtype=np.float64)
    gram_WW[columns, rows] = gram_WW[rows, columns]
    broken_W = ~np.isfinite(gram_WW.diagonal())
    gram_WW[broken_W, :] = np.nan
    gram_WW[:, broken_W] = np.nan
    return gram_WW


def check_exact(model: nn.Module) -> None:
    """Check, without communication, that the exact tier can reduce a model's gradients.

    Raises:
        UnsupportedError: It cannot; one sentence says why and what to do.
    """
    if not isinstance(model, DistributedDataParallel):
        _refuse(f"a model in DistributedDataParallel, got {type(model).__name__}")
    if model._comm_hooks or _log(model).get("comm_hook"):  # a built-in hook stands in the log only
        _refuse("a model without a communication hook of its own, got one that has a hook")
    if model._use_python_reducer:
        _refuse("DDP's C++ reducer, got optimize_ddp='python_reducer'")
    if model._delay_all_reduce_params:
        _refuse("all gradients in DDP's buckets, got delay_all_reduce_named_params")
    if any(getattr(module, "sparse", False) for module in model.modules()):
        _refuse("dense gradients, got an embedding with sparse=True")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not all(parameter.is_floating_point() for parameter in parameters):
        _refuse("real gradients, got complex parameters")
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        _refuse(f"all parameters on one device, got {', '.join(sorted(map(str, devices)))}")


def _refuse(expected_and_got: str) -> NoReturn:
    raise UnsupportedError(
        f"the exact tier needs {expected_and_got}: watch with tier='sketch' instead"
    )


def _log(model: DistributedDataParallel) -> dict[str, Any]:
    log: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return log


def _try_all_to_all(group: dist.ProcessGroup, device: torch.device) -> None:
    sent = torch.zeros(group.size(), device=device)
    try:
        dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        name = dist.get_backend(group)
        raise UnsupportedError(
            f"the exact tier needs a backend with all-to-all, and {name} says '{error}': "
            "watch with tier='sketch' instead"
        ) from error
