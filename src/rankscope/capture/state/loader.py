"""Random generators of a data loader's workers: where they start, and whether they are used.

A data loader gives each of its worker processes its own seed. A ``worker_init_fn`` that seeds
numpy with a constant undoes that, and then all of them draw the same augmentations.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankscope.capture.state.fingerprint import digest_of, numpy_state, python_state, torch_state

_READERS: Mapping[str, Callable[[], bytes]] = {
    "loader_rng_python": python_state,
    "loader_rng_numpy": numpy_state,
    "loader_rng_torch": torch_state,
}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 10.0


class LoaderMeter:
    """Learns from each worker process of a data loader in which states its generators start.

    It wraps the loader's ``worker_init_fn``, which is called first as before. Each process then
    writes digests into memory that it shares with this one, and later whether a generator has
    moved. Batches and random numbers stay as they are. Iterators that exist already are not
    touched; a loader without worker processes is left alone.

    Args:
        loader: A ``torch.utils.data.DataLoader``, or anything with its ``worker_init_fn`` and
            ``num_workers``; or accelerate's wrapper of one.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader = getattr(loader, "base_dataloader", loader)
        self._starts: _Starts | None = None
        num_workers = getattr(loader, "num_workers", 0)
        if not isinstance(num_workers, int) or num_workers < 1:
            return
        if not hasattr(loader, "worker_init_fn"):
            return
        table = torch.zeros(num_workers, 2 * len(_READERS), dtype=torch.int64, device="cpu")
        table.share_memory_()  # type: ignore[no-untyped-call]
        self._starts = _Starts(loader.worker_init_fn, table)
        loader.worker_init_fn = self._starts

    def collect(self) -> dict[str, int]:
        """Return what the processes have written so far.

        Returns:
            A digest of the starting states of each generator that some process has used
            (``loader_rng_python`` and so on), and ``loader_rng_repeats``: which of these start
            in equal states in two or more processes, a sum of 1 Python, 2 numpy, 4 torch.
            Nothing before all have started, or while none has used a generator.
        """
        if self._starts is None:
            return {}
        table = self._starts.table.numpy().copy()
        states, moved = table[:, 0::2], np.asarray(table[:, 1::2].any(axis=0))
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
        """Give the loader its own ``worker_init_fn`` back, unless somebody replaced it since."""
        if self._starts is not None and self._loader.worker_init_fn is self._starts:
            self._loader.worker_init_fn = self._starts.original


class _Starts:
    """A ``worker_init_fn`` that writes down where the generators start, after the loader's own.

    Args:
        original: The loader's ``worker_init_fn``, or None.
        table: int64 ``[num_workers, 2 per generator]`` in shared memory: the digest of its state
            at the start, and 1 once it has moved.
    """

    def __init__(self, original: Callable[[int], Any] | None, table: Tensor) -> None:
        self.original = original
        self.table = table

    def __call__(self, worker_id: int) -> None:
        if self.original is not None:
            self.original(worker_id)
        with contextlib.suppress(Exception):  # nothing of this may end a process of the training
            _Witness(self.table[worker_id])


class _Witness:
    """Notices when a generator of this process moves: now and then, and when the process ends.

    Args:
        row: The row of the table that belongs to this process.
    """

    def __init__(self, row: Tensor) -> None:
        self._row = row.numpy()
        self._starts = [read() for read in _READERS.values()]
        self._row[1::2] = 0
        self._row[0::2] = [max(1, digest_of(start)) for start in self._starts]
        Finalize(None, self._look, exitpriority=0)
        threading.Thread(target=self._watch, name="rankscope-loader", daemon=True).start()

    def _watch(self) -> None:
        pause, never = _FIRST_PAUSE, threading.Event()
        while not self._look():
            never.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _look(self) -> bool:
        """Write down which generators have moved; return whether all have."""
        for number, read in enumerate(_READERS.values()):
            if not self._row[2 * number + 1] and read() != self._starts[number]:
                self._row[2 * number + 1] = 1
        return bool(self._row[1::2].all())
