"""The exact tier: inner products of whole local gradients, out of the reduction that runs anyway.

:class:`~rankscope.reduce.bucket_means.BucketMeans` averages a DDP model's gradient in rank order
and shows it on the way: each worker holds one W-th of every worker's gradient. The inner products
of these pieces, summed over workers, are those of the gradients.

After :meth:`ExactGram.release` the reduction stays, since another one would round otherwise, and
only the measurement ends.

Legend of shapes: W workers, N any number of gradient elements, T = W (W + 1) / 2.
"""

from typing import NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankscope.capture.taps.tap import Guarded
from rankscope.errors import UnsupportedError
from rankscope.reduce.bucket_means import BucketMeans, obstacle

_WITH_FLOAT64 = ("cpu", "cuda")


class ExactGram:
    """Measures all inner products while the gradient of a DDP model is reduced.

    Made by :meth:`register`. The reduced gradient is the sum over workers in rank order, in fp32,
    divided by W: the same bits on every worker and in every run. It differs from what DDP's own
    all-reduce gives by rounding (not at all at W = 2 in fp32).

    Args:
        means: Reduces the gradient.
        num_workers: W.
        device: Where the gradients are.
        guarded: Keeps the measurement's exceptions out of the reduction.
    """

    def __init__(
        self, means: BucketMeans, num_workers: int, device: torch.device, guarded: Guarded
    ) -> None:
        self.measure = True
        """Whether the backward passes that begin from now on are measured."""
        self._means = means
        self._num_workers = num_workers
        self._device = device
        self._guarded = guarded
        self._share: _Share | None = None
        self._complete = False

    @classmethod
    def register(cls, model: DistributedDataParallel, guarded: Guarded) -> Self:
        """Measure a model from now on; every worker calls it at the same point of the program.

        The reduction is put into the model, unless ``fixed_order`` or an earlier call has done so.

        Args:
            model: A model that :func:`check_exact` has accepted on every worker.
            guarded: Keeps the measurement's exceptions out of the reduction.

        Raises:
            UnsupportedError: See :func:`check_exact`; or the backend has no all-to-all.
        """
        means = BucketMeans.put_into(model, _refuse)
        exact = cls(means, model.process_group.size(), model.device, guarded)
        means.watchers.append(exact)
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
        if self in self._means.watchers:
            self._means.watchers.remove(self)

    def begin(self) -> None:
        """Begin to measure a backward pass, if it is to be measured."""
        self._complete = False
        self._share = None
        if self.measure:
            self._guarded(self._new_share)

    def look(self, gradients_WN: Tensor) -> None:
        """Add what a part of the gradients contributes."""
        if self._share is not None:
            self._share.num_shown += gradients_WN.shape[1]
            self._guarded(self._share.add, gradients_WN)

    def end(self) -> None:
        """Note that the share holds the whole gradient."""
        self._complete = True

    def _new_share(self) -> None:
        self._share = _Share(self._num_workers, self._device)


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


def pack_share(gram_WW: Tensor) -> Tensor:
    """Return the upper triangle ``[T]`` of a share, row by row: what has to travel."""
    rows, columns = torch.triu_indices(*gram_WW.shape, device=gram_WW.device)
    return gram_WW[rows, columns]


def check_exact(model: nn.Module) -> None:
    """Check, without communication, that the exact tier can reduce a model's gradients.

    Raises:
        UnsupportedError: It cannot; one sentence says why and what to do.
    """
    if not isinstance(model, DistributedDataParallel):
        _refuse(f"a model in DistributedDataParallel, got {type(model).__name__}")
    wrong = obstacle(model)
    if wrong is not None:
        _refuse(wrong)


def _refuse(expected_and_got: str) -> NoReturn:
    raise UnsupportedError(
        f"the exact tier needs {expected_and_got}: watch with tier='sketch' instead"
    )
