"""Training or evaluation mode of every module, as a training's forward pass meets it."""

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from rankscope.evidence.environment.facts import FLAGS_EVERY
from rankscope.gradients.fingerprint import digest_of
from rankscope.gradients.names import canonical_name

NAMES = "modes"
"""Key of the modes among the names of a step's message."""

_DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
_LISTED_EVERY = 16  # readings between two looks for modules that were replaced


class ModeMeter:
    """Reads the mode of every module in steps that are multiples of ``FLAGS_EVERY``, and the first.

    The names are sent only when a mode has changed. And it tells whether dropout is off: each such
    layer beside trained parameters is in evaluation mode.

    Args:
        module: The model inside the wrapper.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[tuple[str, nn.Module]] = []
        self._dropouts: list[nn.Module] = []
        self._off = False
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
            self._dropouts = list(_dropouts(self._module))
        self._off = bool(self._dropouts) and not any(each.training for each in self._dropouts)
        flags = bytes([part.training for _, part in self._parts])
        if flags == self._flags:
            return
        self._flags = flags
        names = [canonical_name(name) for name, _ in self._parts]
        self._names = {NAMES: [names, "".join(map(str, flags))]}
        text = "\n".join(f"{n} {f}" for n, f in zip(names, flags, strict=False))
        self._digest = digest_of(text.encode())

    def collect(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the columns, NaN where modes were not read; and names with modes, if new."""
        if not self._present:
            return {NAMES: math.nan, "dropout_off": math.nan}, {}
        names = self._names
        self._names = {}
        self._present = False
        return {NAMES: self._digest, "dropout_off": self._off}, names


def _dropouts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the dropout layers in parts of a model that hold trained parameters."""
    for part in module.modules():
        layers = [each for each in part.children() if isinstance(each, _DROPOUT) and each.p > 0]
        if layers and any(parameter.requires_grad for parameter in part.parameters()):
            yield from layers
