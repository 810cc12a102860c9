"""What the data loaders of the training yield, before the training changes it.

A diffusion model, for instance, gets samples with noise: the same sample never looks the same.
"""

import contextlib
import itertools
import math
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from rankscope.stats.arrays import Ints, digest_of
from rankscope.wrappers.calls import Relay, notify
from rankscope.wrappers.datasets import repeats_rows, rows_digest
from rankscope.wrappers.living import ITERATOR, live_objects
from rankscope.wrappers.passes import tensors_in
from rankscope.wrappers.samples import digest_inputs, find_batch
from rankscope.wrappers.untraced import transparent

ENDED = object()
"""In place of a batch: the iterator has no more."""


class _ResultRelay(Relay):
    """Relays the results of an iterator's method with it, and its end."""

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


YIELDS = _ResultRelay(ITERATOR, "__next__")
"""The batches of torch's data loaders."""

PLACES = _ResultRelay(ITERATOR, "_next_index")
"""The places in a data set of the rows of a batch that a loader is about to read."""

_MOST_STREAMS = 4  # iterators that are followed, such as those of training and evaluation
_ENOUGH = 8  # batches in a row that the model gets as they are
_MOST_WAITING = 8  # batches of one that no forward pass has taken


class LoaderBatch(NamedTuple):
    """The samples of a loader's batch."""

    content_B: Ints | None  # digests of their content; None if there are none, or for none
    places_B: Ints | None  # their places in the data set; None if unknown
    data: int | None  # digest of the rows of the data set

    def identity(self) -> Ints:
        """Return a number per sample, of its content or else of its place; nothing if unknown."""
        content_B = self.content_B
        places_B = self.places_B
        if places_B is None:
            return np.empty(0, np.int64) if content_B is None else content_B
        if content_B is not None and len(content_B) == len(places_B):
            return content_B
        return np.array([digest_of(b"%d %d" % (self.data or 0, at)) for at in places_B], np.int64)


MISSED = LoaderBatch(None, None, None)
"""In place of a batch that a loader has yielded before it was followed."""


class _Stream:
    """The batches of one iterator of a data loader."""

    def __init__(self, iterator: Any) -> None:
        self.waiting: deque[LoaderBatch] = deque(maxlen=_MOST_WAITING)
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


class _Places:
    """The places in the data set of the rows that loaders have asked for, and not yet yielded."""

    def __init__(self) -> None:
        self._asked: weakref.WeakKeyDictionary[Any, dict[int, Ints]] = weakref.WeakKeyDictionary()
        # the number of the first batch of each iterator that was seen
        self._first: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._digests: dict[int, tuple[weakref.ref[Any], int | None]] = {}  # by a data set's id
        self._numbered = True  # no loader has asked for keys

    def ask(self, iterator: Any, places: Any) -> None:
        """Note what a loader asks its data set for."""
        if places is ENDED or not self._known(iterator):
            return
        found = np.asarray(places)
        self._numbered = found.dtype.kind in "iu" and found.ndim == 1
        if self._numbered:
            number = getattr(iterator, "_send_idx", 0)
            self._asked.setdefault(iterator, {})[number] = found.astype(np.int64)
            self._first[iterator] = min(number, self._first.get(iterator, number))

    def take(self, iterator: Any) -> Ints | None:
        """Return the places of the batch that a loader has just yielded; None if unknown."""
        return self._asked.get(iterator, {}).pop(_number(iterator), None)

    def missed(self, iterator: Any) -> bool:
        """Return whether a loader has asked for this batch, of known places, too early."""
        first = self._first.get(iterator, math.inf)
        return _number(iterator) < first and self._known(iterator)

    def any_missed(self) -> bool:
        """Return whether such a loader has yielded a batch before it was followed."""
        living = [] if ITERATOR is None else live_objects(ITERATOR)[ITERATOR]
        return any(one._num_yielded and self._known(one) for one in living)

    def _known(self, iterator: Any) -> bool:
        """Return whether places stand for the rows of a loader's data set, and are in order."""
        data = iterator._dataset
        if not PLACES.exists or not self._numbered or isinstance(data, IterableDataset):
            return False
        ordered = getattr(iterator, "_in_order", True) and not _repeats(iterator)
        return ordered and self.digest(data) is not None

    def digest(self, data: Any) -> int | None:
        """Return the digest of a data set's rows."""
        known = self._digests.get(id(data))
        if known is not None and known[0]() is data:
            return known[1]
        found = rows_digest(data)
        with contextlib.suppress(TypeError):  # a list is digested each time
            self._digests[id(data)] = weakref.ref(data), found
        return found


def _number(iterator: Any) -> int:
    """Return the number of the batch that an iterator has just yielded; 0 without processes."""
    return int(getattr(iterator, "_rcvd_idx", 1)) - 1


def _repeats(iterator: Any) -> bool:
    """Return whether several ranks are to draw one row, each to augment it in its own way."""
    batches = iterator._index_sampler
    return any(map(repeats_rows, (batches, getattr(batches, "sampler", None))))


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
        self._wanted = True  # the content of batches
        self._placed = True  # their places
        self._first = True  # no forward pass has taken a batch
        self._places = _Places()
        self._taken: LoaderBatch | None = None  # by the last pass
        self._num_plain = 0  # passes without inputs of floating point, in a row
        self._num_unchanged = 0
        self._stops = [
            YIELDS.subscribe(after=self._see),
            PLACES.subscribe(after=self._see_places),
        ]

    def stop(self) -> None:
        """Follow no more."""
        for stop in self._stops:
            stop()

    def _see(self, iterator: Any, batch: Any) -> None:
        if threading.get_ident() == self._thread:
            self._guard(self._add, iterator, batch)

    def _see_places(self, iterator: Any, places: Any) -> None:
        if self._placed and threading.get_ident() == self._thread:
            self._guard(self._places.ask, iterator, places)

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
        if ended:
            return
        places_B = self._places.take(iterator) if self._placed else None
        if self._placed and places_B is None and self._places.missed(iterator):
            stream.waiting.append(MISSED)
            return
        content_B = self._content_of(batch) if self._wanted or stream.processes else None
        if stream.processes and content_B is not None:
            self._again = (self._again or 0) + stream.comes_again(content_B)
        if self._placed or (self._wanted and content_B is not None):
            data = None if places_B is None else self._places.digest(iterator._dataset)
            content_B = content_B if self._wanted else None
            stream.waiting.append(LoaderBatch(content_B, places_B, data))

    def _content_of(self, batch: Any) -> Ints | None:
        whole = (t for t in tensors_in(batch) if t.is_floating_point() and t.dim() > 1)
        digests = digest_inputs((next(whole, batch),), {})  # many samples share a label
        return digests.numpy() if digests is not None and digests.is_cpu else None

    def begin_pass(self) -> None:
        """Handle a forward pass in training."""
        yielding = [stream for stream in self._asked if not stream.ended]
        self._feeding += yielding or self._asked
        self._asked = []
        self._taken = None
        self._goes_on = bool(self._feeding) and all(each.goes_on for each in self._feeding)

    def end_step(self) -> bool:
        """Return whether loaders have fed the step, and all of them go on after it."""
        goes_on = self._goes_on and not any(stream.ended for stream in self._feeding)
        self._feeding = []
        self._goes_on = False
        return goes_on

    def take(self, args: Any, kwargs: Any) -> LoaderBatch | None:
        """Return the samples of the next batch, for a forward pass of as many; None without.

        A model of which the inputs are whole numbers sees its samples as they are.
        """
        if not (self._wanted or self._placed):
            return None
        inputs, _ = find_batch(args, kwargs)
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            self._num_plain += 1
            self._wanted &= self._num_plain < _ENOUGH
            self._placed &= self._num_plain < _ENOUGH
            self._taken = self._next_waiting()
            return None
        first, self._first = self._first, False
        if not self._streams:
            return MISSED if first and self._places.any_missed() else None
        batch = self._taken = self._next_waiting()
        if batch is None or batch is MISSED:
            return batch
        if batch.places_B is not None and len(batch.places_B) != len(inputs):
            batch = batch._replace(places_B=None, data=None)
        if batch.content_B is not None and len(batch.content_B) != len(inputs):
            batch = batch._replace(content_B=None)
        return batch

    def take_drawn(self) -> LoaderBatch | None:
        """Return the batch for a pass of which the inputs are not seen; None without.

        It is the next one of a stream that was asked since the last pass, or the one that this has
        taken and could not use.
        """
        self._num_plain = 0
        taken, self._taken = self._taken, None
        if taken is not None:
            return taken
        asked = [stream for stream in self._asked if stream.waiting]
        latest = self._latest
        goes_on = [stream for stream in asked if stream is latest or not stream.ended]
        if not goes_on:
            return None
        self._latest = latest if latest in goes_on else goes_on[-1]
        return self._latest.waiting.popleft()

    def _next_waiting(self) -> LoaderBatch | None:
        """Return the next batch of the stream that feeds the training."""
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
        return stream.waiting.popleft()

    def compare(self, *, unchanged: bool) -> None:
        """Note whether the model got a batch as it was; after a few of these, follow no more."""
        self._num_unchanged = self._num_unchanged + 1 if unchanged else 0
        self._wanted = self._wanted and self._num_unchanged < _ENOUGH

    def collect(self) -> int | None:
        """Return how many batches of the step each process of their loader has yielded."""
        again, self._again = self._again, None if self._again is None else 0
        return again
