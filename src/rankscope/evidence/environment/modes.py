"""Training or evaluation mode of every module, as a training's forward pass meets it."""

import math
from typing import Any

from torch import nn

from rankscope.evidence.environment.facts import FLAGS_EVERY
from rankscope.gradients.fingerprint import digest_of
from rankscope.gradients.names import canonical_name

NAMES = "modes"
"""Key of the modes among the names of a step's message."""

_LISTED_EVERY = 16  # readings between two looks for modules that were replaced


class ModeMeter:
    """Reads the mode of every module in steps that are multiples of ``FLAGS_EVERY``, and the first.

    The names are sent only when a mode has changed.

    Args:
        module: The model inside the wrapper.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[tuple[str, nn.Module]] = []
        self._flags: bytes | None = None
        self._digest = math.nan
        self._present = False
        self._names: dict[str, Any] = {}

    def read(self, step: int) -> None:
        """Read them if that is due, in a forward pass that trains, or was trained on."""
        if self._flags is not None and step % FLAGS_EVERY:
            return
        self._present = True
        if step % (_LISTED_EVERY * FLAGS_EVERY) == 0 or not self._parts:
            self._parts = list(self._module.named_modules())
        flags = bytes([part.training for _, part in self._parts])
        if flags == self._flags:
            return
        self._flags = flags
        names = [canonical_name(name) for name, _ in self._parts]
        self._names = {NAMES: [names, "".join(map(str, flags))]}
        text = "\n".join(f"{n} {f}" for n, f in zip(names, flags, strict=False))
        self._digest = digest_of(text.encode())

    def collect(self) -> tuple[float, dict[str, Any]]:
        """Return the digest of names and modes, NaN where they were not read; and both if new."""
        if not self._present:
            return math.nan, {}
        names = self._names
        self._names = {}
        self._present = False
        return self._digest, names
