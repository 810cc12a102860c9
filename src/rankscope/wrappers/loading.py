"""What the data loaders of the training yield, before the training changes it.

A diffusion model, for instance, gets samples with noise: the same sample never looks the same.
"""

import itertools
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from rankscope.private import find
from rankscope.stats.arrays import Ints, digest_of
from rankscope.wrappers.calls import Relay, notify
from rankscope.wrappers.passes import tensors_in
from rankscope.wrappers.samples import digest_inputs, find_batch
from rankscope.wrappers.untraced import transparent

ENDED = object()
"""In place of a batch: the iterator has no more."""


class _YieldRelay(Relay):
    """Relays the results of an iterator with it, and its end."""

    def _relay(self, original: Any) -> Any:
        after = self._after

        @transparent
        @wraps(original)
        def call(iterator: Any) -> Any:
            try:
                result = original(iterator)
            except StopIteration:
                for reference in tuple(after):
                    notify(reference, (iterator, ENDED), {})
                raise
            for reference in tuple(after):
                notify(reference, (iterator, result), {})
            return result

        return call


YIELDS = _YieldRelay(find("torch.utils.data.dataloader._BaseDataLoaderIter"), "__next__")
"""The batches of torch's data loaders."""

_MOST_STREAMS = 4  # iterators that are followed, such as those of training and evaluation
_ENOUGH = 8  # batches in a row that the model gets as they are
_MOST_WAITING = 8  # batches of one that no forward pass has taken


class _Stream:
    """The batches of one iterator of a data loader."""

    def __init__(self, iterator: Any) -> None:
        self.waiting: deque[Ints] = deque(maxlen=_MOST_WAITING)
        self.ended = False
        self.goes_on = True
        count = len(getattr(iterator, "_workers", ()))
        stream = count > 1 and isinstance(iterator._dataset, IterableDataset)
        self.processes = count if stream else 0
        self._digests: deque[int] = deque(maxlen=2 * max(self.processes, 1))
        self._length = _length_of(iterator)

    def see(self, iterator: Any, *, ended: bool) -> None:
        """Handle a batch, or the end."""
        self.ended = ended
        self.goes_on = not ended and iterator._num_yielded < self._length

    def comes_again(self, rows_B: Ints) -> bool:
        """Return whether each process of the loader yields this batch, one after the other.

        Data that are always the same do not count.
        """
        digest = digest_of(np.sort(rows_B).tobytes())
        before = list(self._digests)
        self._digests.append(digest)
        others = self.processes - 1
        return digest in before[-others:] and digest not in before[:-others]


def _length_of(iterator: Any) -> float:
    """Return how many batches an iterator has; infinity where that shows at its end alone.

    It is 0 for a stream whose length the training has asked for, and may count up to.
    """
    if isinstance(iterator._dataset, IterableDataset):
        return math.inf if iterator._IterableDataset_len_called is None else 0
    try:
        return len(iterator)
    except Exception:  # a sampler of its own
        return math.inf


class LoaderRows:
    """Follows the batches that this thread's loaders yield, until a forward pass takes them."""

    def __init__(self, guard: Callable[..., None]) -> None:
        self._guard = guard
        self._thread = threading.get_ident()
        self._streams: OrderedDict[int, _Stream] = OrderedDict()  # by id; the last to yield is last
        self._latest: _Stream | None = None  # the one that fed the last forward pass
        self._asked: list[_Stream] = []  # for a batch, since the last forward pass
        self._feeding: list[_Stream] = []  # those asked before a forward pass of the step
        self._goes_on = False  # whether all of them had more at the last forward pass
        self._again: int | None = None  # batches of the step; None without such a loader
        self._wanted = True
        self._num_unchanged = 0
        self.stop = YIELDS.subscribe(after=self._see) if YIELDS.exists else lambda: None

    def _see(self, iterator: Any, batch: Any) -> None:
        if threading.get_ident() == self._thread:
            self._guard(self._add, iterator, batch)

    @torch.no_grad()
    def _add(self, iterator: Any, batch: Any) -> None:
        stream = self._streams.pop(id(iterator), None)
        ended = batch is ENDED
        if stream is None or (stream.ended and not ended):  # another iterator, or it begins again
            stream = _Stream(iterator)
        stream.see(iterator, ended=ended)
        self._streams[id(iterator)] = stream
        if stream not in self._asked:
            self._asked = [*self._asked, stream][-_MOST_STREAMS:]
        if len(self._streams) > _MOST_STREAMS:
            self._streams.popitem(last=False)
        if ended or not (self._wanted or stream.processes):
            return
        whole = (t for t in tensors_in(batch) if t.is_floating_point() and t.dim() > 1)
        digests = digest_inputs((next(whole, batch),), {})  # many samples share a label
        if digests is None or not digests.is_cpu:
            return
        rows_B: Ints = digests.numpy()
        if self._wanted:
            stream.waiting.append(rows_B)
        if stream.processes:
            self._again = (self._again or 0) + stream.comes_again(rows_B)

    def begin_pass(self) -> None:
        """Handle a forward pass in training."""
        yielding = [stream for stream in self._asked if not stream.ended]
        self._feeding += yielding or self._asked
        self._asked = []
        self._goes_on = bool(self._feeding) and all(each.goes_on for each in self._feeding)

    def end_step(self) -> bool:
        """Return whether loaders have fed the step, and all of them go on after it."""
        goes_on = self._goes_on and not any(stream.ended for stream in self._feeding)
        self._feeding = []
        self._goes_on = False
        return goes_on

    def take(self, args: Any, kwargs: Any) -> Ints | None:
        """Return the samples of the next batch, for a forward pass of as many; None without.

        A model of which the inputs are whole numbers sees its samples as they are.
        """
        if not (self._wanted and self._streams):
            return None
        inputs, _ = find_batch(args, kwargs)
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            self._wanted = False
            return None
        newest = reversed(self._streams.values())
        latest = () if self._latest is None else (self._latest,)
        stream = next((one for one in itertools.chain(latest, newest) if one.waiting), None)
        if stream is None:
            return None
        if stream is not self._latest:
            self._latest = stream
            for other in self._streams.values():
                if other is not stream:
                    other.waiting.clear()
        rows_B = stream.waiting.popleft()
        return rows_B if len(rows_B) == len(inputs) else None

    def compare(self, *, unchanged: bool) -> None:
        """Note whether the model got a batch as it was; after a few of these, follow no more."""
        self._num_unchanged = self._num_unchanged + 1 if unchanged else 0
        self._wanted = self._wanted and self._num_unchanged < _ENOUGH

    def collect(self) -> int | None:
        """Return how many batches of the step each process of their loader has yielded."""
        again, self._again = self._again, None if self._again is None else 0
        return again
