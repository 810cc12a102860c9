"""Fingerprints of the random generators that a worker and its data loader's processes use.

Two workers with equal generator states draw the same dropout masks and the same noise. That matters
only if the generator moves: equal seeds without randomness are usual and harmless. So a generator
counts as used when a forward pass has moved it (dropout), and when it has moved between the passes
of two steps (noise and augmentation outside the model).

Two kinds of draws between the passes do not count, as ranks may or must share them: a single number
of Python's or numpy's, which chooses for the whole step, and those between forward passes without
gradients, by which a model draws completions of its own.

A data loader gives each of its worker processes its own seed. A ``worker_init_fn`` that seeds
numpy with a constant undoes that, and then all of them draw the same augmentations.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from rankscope.bus.probe import Job, MessagePart, Probe, Ready, StepEnd
from rankscope.bus.replicas import StateKind
from rankscope.evidence.randomness import (
    ACCELERATOR,
    BETWEEN_BITS,
    DIGESTS,
    GENERATORS,
    KEY,
    NUMPY,
    PYTHON,
    TORCH,
)
from rankscope.gradients.fingerprint import (
    Snapshot,
    flattened,
    num_drawn,
    numpy_state,
    python_bytes,
    python_snapshot,
    python_state,
    python_state_bytes,
    torch_state,
)
from rankscope.private import Patch
from rankscope.stats.arrays import digest_of

OF_TORCH = TORCH | ACCELERATOR
"""The bits of torch's generators."""

_ONE_NUMBER = 2  # words of a twister for a number of double precision


class RandomMeter:
    """Finds the random generators that a step moves, and their states at its start.

    It reads states and never draws: Python's ``random``, numpy's global generator, torch's on the
    CPU, and that of the device. A state of an accelerator's generator is a seed and an offset on
    the host; reading it does not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._readers: dict[int, Callable[[], Snapshot]] = {
            PYTHON: python_snapshot,
            NUMPY: numpy_state,
            TORCH: torch_state,
        }
        if device.type != "cpu":
            self._readers[ACCELERATOR] = _reader_of(device)
        self._first: dict[int, Snapshot] = {}
        self._last: dict[int, Snapshot] = {}  # after the passes of the step before
        self._after: dict[int, Snapshot] = {}  # those that this step's passes have moved
        self._before: dict[int, Snapshot] | None = None
        self._used: int | None = None
        self._between = 0
        self._generating: list[dict[int, Snapshot]] = []  # before the first and last such pass

    def held(self) -> dict[str, int]:
        """Return a digest of the present state of each generator that has one, by name."""
        states = {bit: python_bytes(read()) for bit, read in self._readers.items()}
        return {GENERATORS[bit]: digest_of(state) for bit, state in states.items() if state}

    def before_forward(self) -> None:
        """Read the states before a forward pass; those before the first one of a step count."""
        used = self._used or 0
        states = {bit: read() for bit, read in self._readers.items() if not used & bit}
        if not self._first:
            self._first = states
            moved = [bit for bit, last in self._last.items() if last != states[bit]]
            self._between = sum(bit for bit in moved if not self._is_shared(bit, states[bit]))
            self._generating = []
            self._after = {}
        self._before = states

    def before_apart(self) -> None:
        """Read torch's states before a forward pass of the model without gradients."""
        if self._last:
            readers = {bit: read for bit, read in self._readers.items() if bit & OF_TORCH}
            states = {bit: read() for bit, read in readers.items()}
            self._generating = [*self._generating[:1], states]

    def _is_shared(self, bit: int, now: Snapshot) -> bool:
        """Return whether ranks may share what moved a generator since the last step's passes."""
        last = self._last[bit]
        if not bit & OF_TORCH:
            return num_drawn(last, now) <= _ONE_NUMBER
        if len(self._generating) < 2:
            return False
        before, after = (states[bit] for states in self._generating)
        return last == before != after

    def after_forward(self) -> None:
        """Read the states after a forward pass, of the generators that the step moves."""
        before = self._before or {}
        self._before = None
        if not (before or self._used):
            return
        used = self._used or 0
        after = {bit: self._readers[bit]() for bit in (*before, *self._after)}
        moved = {bit for bit, state in before.items() if after[bit] != state}
        self._used = used | sum(moved)
        self._after = {bit: after[bit] for bit in (*moved, *self._after)}

    def collect(self) -> dict[str, int]:
        """Return ``rng_used`` and digests of the first states of what has moved; begin a step."""
        used = self._used
        between = self._between
        first = self._first
        self._used = None
        self._between = 0
        self._first = {}
        self._before = None
        if used is None:
            self._last = {}
            return {}
        self._last = {**first, **self._after}
        values = {"rng_used": used | between << BETWEEN_BITS}
        for name, bits in DIGESTS.items() if used | between else ():
            moved = bits & (used | between)
            states = [
                bytes([bit]) + python_bytes(state) for bit, state in first.items() if moved & bit
            ]
            if states:
                values[name] = digest_of(b"".join(states))
        return values


def _reader_of(device: torch.device) -> Callable[[], bytes]:
    module: Any = torch.get_device_module(device)

    def read() -> bytes:
        try:
            state = module.get_rng_state(device)
        except (RuntimeError, NotImplementedError, AttributeError):
            return b""  # unknown, as during the capture of a graph: it counts as unmoved
        return state.numpy().tobytes() if state.device.type == "cpu" else b""

    return read


_READERS: Mapping[str, Callable[[], bytes]] = {
    "loader_rng_python": python_state,
    "loader_rng_numpy": numpy_state,
    "loader_rng_torch": torch_state,
}
_FIRST_PAUSE = 0.02  # seconds
_LONGEST_PAUSE = 10.0


class LoaderMeter:
    """Reads the states in which the generators of a data loader's worker processes start.

    It wraps the loader's ``worker_init_fn``, which is called first as before. Each process then
    writes digests into memory that it shares with this one, and later whether a generator has
    moved. Batches and random numbers stay the same. Existing iterators and loaders without worker
    processes are left alone.

    ``loader``: a ``torch.utils.data.DataLoader``, or anything with its ``worker_init_fn`` and
    ``num_workers``; or accelerate's wrapper of one.
    """

    def __init__(self, loader: Any) -> None:
        loader = getattr(loader, "base_dataloader", loader)
        self._starts: _Starts | None = None
        num_workers = getattr(loader, "num_workers", 0)
        if not isinstance(num_workers, int) or num_workers < 1:
            return
        if not hasattr(loader, "worker_init_fn"):
            return
        table = torch.zeros(num_workers, 2 * len(_READERS), dtype=torch.int64, device="cpu")
        table.share_memory_()  # type: ignore[no-untyped-call]
        self._starts = _Starts(loader.worker_init_fn, table)
        self._patch = Patch(loader, "worker_init_fn", lambda _: self._starts)

    def collect(self) -> dict[str, int]:
        """Return a digest of the starting states of each generator that some process has used.

        And ``loader_rng_repeats``: those that start in equal states in two or more processes, a sum
        of 1 Python, 2 numpy, 4 torch. Nothing before all have started, or while none has used a
        generator.
        """
        if self._starts is None:
            return {}
        table = self._starts.table.numpy().copy()
        states = table[:, 0::2]
        moved = np.asarray(table[:, 1::2].any(axis=0))
        if not states.all() or not moved.any():
            return {}
        values = {"loader_rng_repeats": 0}
        for number, name in enumerate(_READERS):
            if moved[number]:
                starts = states[:, number]
                values[name] = digest_of(starts.tobytes())
                values["loader_rng_repeats"] |= (len(np.unique(starts)) < len(starts)) << number
        return values

    def remove(self) -> None:
        """Give the loader its own ``worker_init_fn`` back, unless it was replaced since."""
        if self._starts is not None:
            self._patch.remove()


class _Starts:
    """A ``worker_init_fn`` that records the states of the generators, after the loader's own.

    ``table`` is int64 ``[num_workers, 2 per generator]`` in shared memory: the digest of its state
    at the start, and 1 once it has moved.
    """

    def __init__(self, original: Callable[[int], Any] | None, table: Tensor) -> None:
        self.original = original
        self.table = table

    def __call__(self, worker_id: int) -> None:
        if self.original is not None:
            self.original(worker_id)
        with contextlib.suppress(Exception):  # a failure must not end a process of the training
            _MoveWatcher(self.table[worker_id])


class _MoveWatcher:
    """Checks from time to time whether a generator of this process has moved, and at its end."""

    def __init__(self, row: Tensor) -> None:
        self._row = row.numpy()
        self._starts = [read() for read in _READERS.values()]
        self._row[1::2] = 0
        self._row[0::2] = [max(1, digest_of(start)) for start in self._starts]
        Finalize(None, self._update, exitpriority=0)
        threading.Thread(target=self._watch, name="rankscope-loader", daemon=True).start()

    def _watch(self) -> None:
        pause = _FIRST_PAUSE
        never = threading.Event()
        while not self._update():
            never.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _update(self) -> bool:
        """Record the generators that have moved; return whether all have."""
        for number, read in enumerate(_READERS.values()):
            if not self._row[2 * number + 1] and read() != self._starts[number]:
                self._row[2 * number + 1] = 1
        return bool(self._row[1::2].all())


KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Classes of random generators."""

_MOST = 8  # generators
_DEPTH = 3
_BREADTH = 16
_OBJECTS = 512
_HOLDERS = (list, tuple, dict)
_NOT_OPENED = (torch.Tensor, nn.Module, Sampler, DataLoader, type, str, bytes, np.ndarray)


class PrivateRandomMeter:
    """Digests the states of private generators that move from step to step.

    It reads states and never draws. It searches once, for at most eight generators, in attributes
    of modules, of the data set and of their attributes, short lists included. Samplers are left
    out, since theirs have to be alike; so are the processes of the data loader.
    """

    def __init__(self, module: nn.Module, loader: Any = None) -> None:
        holders = [*module.modules(), getattr(loader, "dataset", None)]
        self._generators: list[Any] = []
        with contextlib.suppress(Exception):  # attributes may be objects of any kind
            self._generators += islice(_generators_in(holders), _MOST)
        self._last: list[bytes] = []
        self._digest: int | None = None

    def held(self) -> dict[str, int]:
        """Return a digest of the present state of each generator that has one, by name."""
        states = enumerate(map(_state_of, self._generators))
        return {f"generator {n} of the modules": digest_of(state) for n, state in states if state}

    def before_forward(self) -> None:
        """Read the generators before a step's first forward pass."""
        if not self._generators:
            return
        states = list(map(_state_of, self._generators))
        if self._last:
            moved = [s for s, last in zip(states, self._last, strict=True) if s != last]
            self._digest = digest_of(b"".join(moved)) if moved else None
        self._last = states

    def collect(self) -> dict[str, int]:
        """Return ``rng_private``, a digest of the states of those that have moved, if any has."""
        digest = self._digest
        self._digest = None
        return {} if digest is None else {"rng_private": digest}


def _generators_in(holders: Iterable[Any]) -> Iterator[Any]:
    seen: dict[int, Any] = {}
    level = [part for holder in holders for part in _attributes(holder)]
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            if id(value) in seen or len(seen) >= _OBJECTS:
                continue
            seen[id(value)] = value  # alive, so that no other gets its id
            if issubclass(type(value), KINDS):
                if not isinstance(value, random.SystemRandom):  # it has no state
                    yield value
            elif issubclass(type(value), _HOLDERS):
                parts = value.values() if isinstance(value, dict) else value
                below += [part for part in islice(parts, _BREADTH) if _may_hold(part)]
            else:
                below += _attributes(value)
        level = below


def _attributes(value: Any) -> list[Any]:
    """Return the attributes of an object, without running any property."""
    own = getattr(value, "__dict__", None)
    return [part for part in list(own.values()) if _may_hold(part)] if type(own) is dict else []


def _may_hold(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, (*KINDS, *_HOLDERS)):
        return True
    return kind.__dictoffset__ != 0 and not issubclass(kind, _NOT_OPENED)


def _state_of(generator: Any) -> bytes:
    try:
        if isinstance(generator, torch.Generator):
            return generator.get_state().numpy().tobytes()
        if isinstance(generator, random.Random):
            return python_state_bytes(generator.getstate())
        if isinstance(generator, np.random.Generator):
            return flattened(generator.bit_generator.state)
        return flattened(generator.get_state(legacy=False))
    except Exception:
        return b""  # unknown, as during the capture of a graph: it counts as unmoved


class RandomnessProbe(Probe):
    """Collects fingerprints of one worker's random generators."""

    def __init__(
        self, shared: RandomMeter, private: PrivateRandomMeter, loader: LoaderMeter
    ) -> None:
        self._shared = shared
        self._private = private
        self._loader = loader
        self._begun = False
        self._held: dict[str, dict[str, int]] = {}  # at the session's start, and where it saves

    def before_forward(self, step: int, *, first: bool) -> None:
        """Read the generators before the step's first forward pass."""
        if not self._begun:
            self._begun = True
            self._hold(StateKind.STARTED)
        if first:
            self._shared.before_forward()
            self._private.before_forward()

    def after_forward(self) -> None:
        """Find those that have moved."""
        self._shared.after_forward()

    def before_apart(self) -> None:
        """Read the generators before the model runs without gradients."""
        self._shared.before_apart()

    def see_saved(self) -> None:
        """Read what a checkpoint would hold."""
        self._hold(StateKind.SAVED)

    def _hold(self, kind: StateKind) -> None:
        self._held[kind] = {**self._shared.held(), **self._private.held()}

    def collect(self, end: StepEnd) -> Ready | None:
        """Return the fingerprints of a step after which workers are comparable."""
        values = {**self._shared.collect(), **self._private.collect()}
        held, self._held = self._held, {}
        if not end.comparable:
            return None
        names = {KEY: held} if held else {}
        return Ready(MessagePart({**values, **self._loader.collect()}, names=names))

    def abort(self) -> None:
        """Forget a step that was never finished."""
        self._shared.collect()
        self._private.collect()

    def close(self) -> None:
        """Give the data loader its own function back."""
        self._loader.remove()


def make_probe(job: Job) -> RandomnessProbe | None:
    """Return the probe of generators; None where they are not compared."""
    if not job.exact:
        return None
    wrapped = job.wrapped
    private = PrivateRandomMeter(wrapped.module, job.loader)
    return RandomnessProbe(RandomMeter(wrapped.device), private, LoaderMeter(job.loader))
