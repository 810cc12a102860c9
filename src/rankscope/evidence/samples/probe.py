"""The samples that a worker trains on, and the lengths of its sequences."""

import logging
import math
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankscope.bus.probe import Awaited, Job, MessagePart, Pending, Probe, RareProbe, StepEnd
from rankscope.bus.replicas import StateKind
from rankscope.errors import UsageError
from rankscope.evidence.samples import INPUTS
from rankscope.gradients.digest import digest_tensor
from rankscope.gradients.host import HostCopy, Numbers, copy_numbers
from rankscope.gradients.kernels.native import count_labels
from rankscope.stats.arrays import Ints
from rankscope.wrappers.loading import MISSED, LoaderBatch, LoaderRows
from rankscope.wrappers.part_calls import PartCall
from rankscope.wrappers.passes import hook_gradient, tensors_in
from rankscope.wrappers.samples import digest_batch, find_batch, identity_of, is_dense

_log = logging.getLogger("rankscope")

_LAST_STEP = 64  # steps since the start
_MOST_INPUTS = 16
_MOST_ELEMENTS = 1 << 16
_MOST_CALLS = 64  # of parts, in one pass
_READINGS = 3  # from which on an input that never changed is constant


class _Seen(NamedTuple):
    forward: int
    samples: int
    tokens: int
    # tokens that the mask keeps, and the rows that it pads on the left alone and on the right
    # alone; None without a mask
    kept: Numbers | Ints | None


def _lengths(seen: Sequence[_Seen]) -> MessagePart:
    """Wait for the device; return lengths, padding, and the side of it, as far as known."""
    samples = sum(one.samples for one in seen)
    tokens = sum(one.tokens for one in seen)
    if not samples or not tokens:
        return MessagePart()
    values = {"sequence_length": tokens / samples}
    kept = [
        one.kept if isinstance(one.kept, np.ndarray) else one.kept.numpy()
        for one in seen
        if one.kept is not None
    ]
    if len(kept) == len(seen):
        present, left, right = np.sum(kept, axis=0).tolist()
        values["padding"] = 1 - present / tokens
        if left + right:
            values["padded_left"] = left / (left + right)
    return MessagePart(values)


class LengthMeter(Probe):
    """Collects the lengths of one step on one worker."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    @torch.no_grad()
    def on_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int = 0) -> None:
        """Read the inputs of a forward pass: token ids ``[B, n]``, and their mask if any."""
        first = args[0] if args else None
        named = first if isinstance(first, Mapping) and "input_ids" in first else kwargs
        ids = named.get("input_ids", first)
        mask = named.get("attention_mask")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not is_dense(ids):
            return
        if ids.dtype not in (torch.int64, torch.int32):
            return
        kept = None
        if isinstance(mask, Tensor) and is_dense(mask) and mask.shape == ids.shape:
            kept = _kept(mask)
        self._seen.append(_Seen(forward, ids.shape[0], ids.numel(), kept))

    def collect(self, end: StepEnd) -> Pending:
        """Return the lengths since the last call, of forward passes that the loss can come from."""
        apart = end.idle | end.graphless
        seen = [one for one in self._seen if one.forward not in apart]
        self._seen = []
        counts = [one.kept for one in seen if not isinstance(one.kept, np.ndarray)]
        return Awaited(counts, partial(_lengths, seen))

    def abort(self) -> None:
        """Forget the step's lengths."""
        self._seen = []


def _kept(mask: Tensor) -> Numbers | Ints:
    """Return the tokens that a mask keeps, and the rows that it pads on one side alone: ``[3]``."""
    count = count_labels(mask, 0, first=0)
    if count == mask.numel():
        return np.array([count, 0, 0])
    first_B, last_B = (mask[:, place] != 0 for place in (0, -1))
    rows = [(last_B & ~first_B).sum(), (first_B & ~last_B).sum()]
    if count is not None:
        return np.array([count, *map(int, rows)])
    return copy_numbers(torch.stack([(mask != 0).sum(), *rows]), torch.int64, own=True)


class _BeforeChanges:
    """Digests of inputs, and of the rows of the loader's batch that they were made of."""

    def __init__(self, inputs: Numbers | Ints, rows_B: Ints, rows: LoaderRows) -> None:
        self._inputs = inputs
        self._rows_B = rows_B
        self._rows = rows

    @property
    def ready(self) -> bool:
        """Whether it can be read without waiting."""
        return isinstance(self._inputs, np.ndarray) or self._inputs.ready

    def numpy(self) -> Ints:
        """Return the digests of the inputs if they hold a row as it was, else those of the rows."""
        inputs = self._inputs
        inputs_B: Ints = (
            inputs if isinstance(inputs, np.ndarray) else inputs.numpy().astype(np.int64)
        )
        unchanged = bool(np.isin(inputs_B, self._rows_B).any())
        self._rows.compare(unchanged=unchanged)
        return inputs_B if unchanged else self._rows_B


class _OfCall(NamedTuple):
    """Digests of what a part of the model was given; parts of one pass may be given the same."""

    digests: Numbers | Ints
    forward: int

    @property
    def ready(self) -> bool:
        """Whether they can be read without waiting."""
        return isinstance(self.digests, np.ndarray) or self.digests.ready

    def numpy(self) -> Ints:
        """Return them."""
        found = self.digests
        return found if isinstance(found, np.ndarray) else found.numpy().astype(np.int64)


_Samples = Numbers | Ints | _BeforeChanges | _OfCall


class _Unseen(NamedTuple):
    """What identifies the samples of a pass that was not seen."""

    forward: int
    batch: LoaderBatch | None  # that a loader has yielded for it
    # the calls of parts in it, and digests of their inputs
    calls: Sequence[tuple[PartCall, Numbers | Ints]]


class SampleMeter:
    """Collects the samples of one step on one worker; given ids take precedence over digests."""

    def __init__(self, rows: LoaderRows | None = None) -> None:
        self._rows = rows
        self._given: list[tuple[int, Numbers | NDArray[np.int64]]] = []
        self._seen: list[tuple[int, _Samples]] = []
        self._batches: list[tuple[int, LoaderBatch | None]] = []  # of the same forward passes
        self._calls: deque[tuple[PartCall, Numbers | Ints]] = deque(maxlen=_MOST_CALLS)
        self._unseen: list[_Unseen] = []
        self._missed = False  # whether the rows of one of the step's batches are unknown
        self._declined = False

    def give(self, samples: object, forward: int = 0) -> None:
        """Add ids (of any type that has a content) or the tensors of a batch, in any structure."""
        given = self._unless_declined(lambda: identity_of(samples))
        if given is not None:
            self._given.append((forward, given))

    def see(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int = 0) -> None:
        """Digest the inputs of a forward pass, unless ids were given for this step."""
        if self._given:
            return
        digests = self._unless_declined(lambda: digest_batch(args, kwargs))
        if digests is None:
            return
        if not isinstance(digests, np.ndarray):
            digests = copy_numbers(digests, torch.int64, own=True)
        rows = self._rows
        batch: LoaderBatch | None = None
        if rows is not None:
            batch = self._unless_declined(lambda: rows.take(args, kwargs))
        if batch is MISSED:
            self._missed = True  # rows will stand for the samples of later steps
            return
        seen = digests
        if rows is not None and batch is not None and batch.content_B is not None:
            seen = _BeforeChanges(digests, batch.content_B, rows)
        self._seen.append((forward, seen))
        self._batches.append((forward, batch))

    def see_part(self, call: PartCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Digest what a part of the model is given, unless it was computed by another."""
        if any(tensor.grad_fn is not None for tensor in tensors_in([args, kwargs])):
            return
        batch, _ = find_batch(args, kwargs)
        if batch is None or (isinstance(batch, Tensor) and batch.dim() < 2):
            return  # single numbers, as of users or items, are no samples
        digests = self._unless_declined(lambda: digest_batch(args, kwargs))
        if digests is not None:
            own = isinstance(digests, np.ndarray)
            copy = digests if own else copy_numbers(digests, torch.int64, own=True)
            self._calls.append((call, copy))

    def see_part_output(self, call: PartCall, output: object) -> None:
        """See whether the call of a part is trained on, if its samples count then."""
        if self._calls and self._calls[-1][0] is call:
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    hook_gradient(tensor, call.see_gradient)

    def begin_unseen(self, forward: int) -> None:
        """Take what was seen since the last pass for the samples of one that was not seen."""
        batch = None if self._rows is None else self._rows.take_drawn()
        self._unseen.append(_Unseen(forward, batch, tuple(self._calls)))
        self._calls.clear()

    def _collect_unseen(self) -> None:
        """Add the samples of passes that were not seen: of loaders' batches, or of calls."""
        unseen, self._unseen = self._unseen, []
        by_loader = any(one.batch is not None for one in unseen)
        for forward, batch, calls in unseen:
            self._missed |= batch is MISSED
            if batch is not None and batch is not MISSED:
                self._batches.append((forward, batch))
                self._seen.append((forward, batch.identity()))
            for call, digests in () if by_loader else calls:
                if call.trained:
                    self._seen.append((forward, _OfCall(digests, forward)))

    def _unless_declined(self, work: Callable[[], Any]) -> Any:
        """Return what ``work`` returns; None, and once a line in the log, if it raises."""
        try:
            return work()
        except Exception as error:
            if not self._declined:
                self._declined = True
                words: object = error
                if not isinstance(error, UsageError):
                    words = (
                        "the samples of a batch cannot be told apart: its tensors cannot be read "
                        f"({type(error).__name__}: {error}); give scope.batch(ids) one id per "
                        "sample"
                    )
                _log.warning("%s; the rest is measured as before", words)
            return None

    @property
    def named(self) -> bool:
        """Whether the training gave ids in this step."""
        return bool(self._given)

    def collect(self, idle: Container[int] = ()) -> list[_Samples]:
        """Return the samples since the last call, without those of ``idle`` forward passes."""
        self._collect_unseen()
        seen = [] if self._missed else self._seen  # a part of a step would be too few
        collected: Sequence[tuple[int, _Samples]] = self._given or seen
        self._missed = False
        self._given = []
        self._seen = []
        self._batches = []
        return [part for forward, part in collected if forward not in idle]

    def places(self, idle: Container[int] = ()) -> tuple[Ints, int] | None:
        """Return the places of the step's samples in their data set, and the digest of its rows.

        None unless they are known of all forward passes, and of one data set.
        """
        self._collect_unseen()
        batches = [batch for forward, batch in self._batches if forward not in idle]
        digests = {None if batch is None else batch.data for batch in batches}
        known = len(digests) == 1 and not self._given and not self._missed
        data = digests.pop() if known else None
        if data is None:
            return None
        places = [b.places_B for b in batches if b is not None and b.places_B is not None]
        return np.concatenate(places), data


class SampleProbe(Probe):
    """Collects the samples of one worker's steps."""

    def __init__(self, guard: Callable[..., None]) -> None:
        self._rows = LoaderRows(guard)
        self._samples = SampleMeter(self._rows)

    def give_samples(self, samples: Any, forward: int) -> None:
        """Add the ids that the user has given of the next forward pass."""
        self._samples.give(samples, forward)

    def on_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int) -> None:
        """Digest the batch, unless the training gave its ids."""
        self._rows.begin_pass()
        self._samples.see(args, kwargs, forward)

    def before_part(self, call: PartCall, args: Any, kwargs: Any, step: int) -> None:
        """Digest what a part of the model is given."""
        self._samples.see_part(call, args, kwargs)

    def after_part(self, call: PartCall, output: Any) -> None:
        """See whether the call is trained on."""
        self._samples.see_part_output(call, output)

    def begin_unseen(self, forward: int) -> None:
        """Take what was seen since the last pass for its samples."""
        self._samples.begin_unseen(forward)
        self._rows.begin_pass()

    def collect(self, end: StepEnd) -> Pending:
        """Return the samples of the step's forward passes that the loss can come from."""
        apart = end.idle if self._samples.named else end.idle | end.graphless
        values = {
            "samples_named": self._samples.named,
            "micro_batches": end.num_passes or math.nan,
            "idle_passes": len(end.idle),
            "loader_goes_on": self._rows.end_step(),
        }
        again = self._rows.collect()
        if again is not None:
            values["loader_repeats"] = again
        rows_B: Ints = np.empty(0, np.int64)
        places = self._samples.places(apart)
        if places is not None:
            rows_B, values["rows_digest"] = places
        samples = self._samples.collect(apart)
        copies = [one for one in samples if not isinstance(one, np.ndarray)]
        return Awaited(copies, partial(_read, samples, rows_B, values))

    def abort(self) -> None:
        """Forget the step's samples."""
        self._samples.collect()
        self._rows.end_step()

    def close(self) -> None:
        """Follow the loaders no more."""
        self._rows.stop()


def _read(samples: Sequence[_Samples], rows_B: Ints, values: Mapping[str, float]) -> MessagePart:
    """Wait for the device; return ids or digests."""
    packed: dict[tuple[object, bytes], bytes] = {}
    for number, one in enumerate(samples):
        array = one if isinstance(one, np.ndarray) else one.numpy()
        part = array.astype(np.int64, copy=False).tobytes()
        once = (one.forward, part) if isinstance(one, _OfCall) else (None, b"%d" % number)
        packed[once] = part
    return MessagePart(values, {"samples_B": b"".join(packed.values()), "rows_B": rows_B.tobytes()})


_Inputs = dict[int, tuple[tuple[int, ...], int]]
"""Shape and digest of each input, by its number."""


class PlaceProbe(RareProbe):
    """Finds inputs of the model that stay the same from step to step, as positions do."""

    def __init__(self, first_step: int) -> None:
        super().__init__(first_step, last=_LAST_STEP)
        self._constant: _Inputs | None = None  # the inputs that have not changed so far
        self._num_readings = 0

    def on_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int) -> None:
        """Digest the inputs of the step's first forward pass."""
        if not self.due or forward:
            return
        try:
            found = tensors_in([args, kwargs])
            inputs = [t for t in found if is_dense(t) and 1 < t.numel() <= _MOST_ELEMENTS]
            devices = {tensor.device for tensor in inputs}
            if len(inputs) <= _MOST_INPUTS and len(devices) == 1:
                digests = torch.stack([digest_tensor(tensor) for tensor in inputs])
                shapes = [tuple(tensor.shape) for tensor in inputs]
                copy = HostCopy(digests, own=True)
                self.pending = Awaited([copy], partial(self._read, shapes, copy))
        except Exception as error:  # whatever a model is given
            _log.debug("inputs that stay the same are not looked for: %r", error)

    def _read(self, shapes: Sequence[tuple[int, ...]], digests: HostCopy) -> MessagePart:
        """Wait for the device; return digests of the inputs that have never changed."""
        inputs: _Inputs = dict(enumerate(zip(shapes, digests.numpy().tolist(), strict=True)))
        before = inputs if self._constant is None else self._constant
        self._constant = {n: one for n, one in inputs.items() if before.get(n) == one}
        self._num_readings += 1
        if self._num_readings < _READINGS or not self._constant:
            return MessagePart()
        held = {f"number {number}": digest for number, (_, digest) in self._constant.items()}
        return MessagePart(names={INPUTS: {str(StateKind.CONSTANT): held}})


def make_probe(job: Job) -> tuple[Probe, ...]:
    """Return the probes of samples, of their lengths, and of inputs that stay the same."""
    return SampleProbe(job.guard), LengthMeter(), PlaceProbe(job.first_step)
