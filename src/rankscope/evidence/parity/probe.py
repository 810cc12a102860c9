"""Records the first steps of a watched training for ``rankscope parity``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rankscope.bus.parity import FOLDER
from rankscope.bus.probe import Job, Probe
from rankscope.evidence.parity.recorder import ParityRecorder, RecordPlace
from rankscope.wrappers.optimizers import all_of


class ParityProbe(Probe):
    """Passes on what happens to a recorder."""

    def __init__(self, job: Job) -> None:
        ranks = dist.get_process_group_ranks(job.wrapped.group)
        place = RecordPlace(
            Path(job.given_dir) / FOLDER, dist.get_rank(), dist.get_world_size(), tuple(ranks)
        )
        self._optimizer = job.optimizer
        self._recorder = ParityRecorder(job.wrapped.module, place, job.parity)
        self._waits = False

    def on_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: int) -> None:
        """A forward pass in training begins."""
        self._waits = True
        self._recorder.begin_pass(args, kwargs)

    def on_output(self, output: Any, kwargs: Mapping[str, Any], forward: int) -> None:
        """It has ended."""
        self._recorder.end_pass(output, kwargs)

    def see_reduced(self) -> None:
        """The reduction is over."""
        self._recorder.see_reduced()

    def before_update(self) -> None:
        """An optimizer is about to be called: what all of them hold is kept at the first call."""
        if self._waits:
            self._waits = False
            self._recorder.before_update(self._optimizer)

    def after_update(self, optimizer: Any, *, complete: bool) -> None:
        """An optimizer has been called."""
        self._recorder.after_update(optimizer)

    def give_loss(self, value: Any, weight: Any, forward: int, **more: Any) -> None:
        """The user has given the loss of a micro-batch."""
        self._recorder.loss(value, weight, **more)

    def give_samples(self, samples: Any, forward: int) -> None:
        """The user has given the ids of samples."""
        self._recorder.samples(samples)

    def close(self) -> None:
        """End the record."""
        self._recorder.close()


def make_probe(job: Job) -> ParityProbe | None:
    """Return the probe; None where nothing is to be recorded."""
    if not job.parity or not all_of(job.optimizer):
        return None
    return ParityProbe(job)
