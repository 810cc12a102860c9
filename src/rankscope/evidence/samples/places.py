"""Finds inputs of the model that stay the same from step to step, as a rank's positions do."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rankscope.bus.probe import MessagePart
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


class _Reading:
    """Digests of the inputs of one step, on their way to the host."""

    def __init__(self, shapes: Sequence[torch.Size], digests: HostCopy, known: "_Known") -> None:
        self._shapes = shapes
        self._digests = digests
        self._known = known

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return self._digests.ready

    def read(self) -> MessagePart:
        """Wait for the device; return digests of the inputs that have never changed."""
        digests = self._digests.numpy().tolist()
        inputs = enumerate(zip(map(tuple, self._shapes), digests, strict=True))
        constant = self._known.keep(dict(inputs))
        if not constant:
            return MessagePart()
        held = {f"number {number}": digest for number, (_, digest) in constant.items()}
        return MessagePart(names={INPUTS: {str(StateKind.CONSTANT): held}})


_Inputs = dict[int, tuple[tuple[int, ...], int]]
"""Shape and digest of each input, by its number."""


class _Known:
    """The inputs that have not changed so far."""

    def __init__(self) -> None:
        self._constant: _Inputs | None = None
        self._num_readings = 0

    def keep(self, inputs: _Inputs) -> _Inputs:
        """Keep those that are as before; return them, once there were enough readings."""
        before = inputs if self._constant is None else self._constant
        self._constant = {n: one for n, one in inputs.items() if before.get(n) == one}
        self._num_readings += 1
        return self._constant if self._num_readings >= _READINGS else {}


class PlaceProbe(RareProbe):
    """Digests the model's inputs in growing distances."""

    def __init__(self, first_step: int) -> None:
        super().__init__(first_step, last=_LAST)
        self._known = _Known()

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
                shapes = [tensor.shape for tensor in inputs]
                self.pending = _Reading(shapes, HostCopy(digests, own=True), self._known)
        except Exception as error:  # whatever a model is given
            _log.debug("inputs that stay the same are not looked for: %r", error)
