"""Finds inputs of the model that stay the same from step to step, as a rank's positions do."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rankscope.bus.probe import Awaited, MessagePart
from rankscope.bus.rare import RareProbe
from rankscope.bus.replicas import StateKind
from rankscope.evidence.samples import INPUTS
from rankscope.gradients.digest import digest_tensor
from rankscope.gradients.host import HostCopy
from rankscope.wrappers.passes import tensors_in
from rankscope.wrappers.samples import is_dense

_log = logging.getLogger("rankscope")

_LAST = 64  # steps since the start
_MOST_INPUTS = 16
_MOST_ELEMENTS = 1 << 16
_READINGS = 3  # from which on an input that never changed is constant


_Inputs = dict[int, tuple[tuple[int, ...], int]]
"""Shape and digest of each input, by its number."""


class PlaceProbe(RareProbe):
    """Digests the model's inputs in growing distances."""

    def __init__(self, first_step: int) -> None:
        super().__init__(first_step, last=_LAST)
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
