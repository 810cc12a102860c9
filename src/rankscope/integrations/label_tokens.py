"""The user's function from a batch to its number of label tokens, as adapters call it."""

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

_log = logging.getLogger("rankscope")

Weigh = Callable[..., Tensor | float]  # a batch's label tokens, or one number per sample


class LabelTokens:
    """Calls the user's function, until its first exception; without one, numbers are unknown."""

    def __init__(self, weigh: Weigh | None) -> None:
        self._weigh = weigh

    @property
    def known(self) -> bool:
        """Whether there is a function."""
        return self._weigh is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | float | None:
        """Return the function's result for a batch; None without one."""
        if self._weigh is None:
            return None
        try:
            return self._weigh(*args, **kwargs)
        except Exception as error:
            self._weigh = None
            _log.warning(
                "weight expected a function from a batch to its number of label tokens, but it "
                "raised %s: %s; losses are recorded without weights from now on",
                type(error).__name__,
                error,
            )
            return None
