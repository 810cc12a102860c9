"""Steps that a rank only shadows, since it has run out of data inside ``model.join()``.

Its hooks do not fire in them: DDP calls the reduction itself. The only place that all of these
steps pass is a method of DDP's class, which is replaced as long as somebody listens. An attribute
of the model would be copied along with it.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch.nn.parallel import DistributedDataParallel

_METHOD = "_match_all_reduce_for_bwd_pass"
_original: Callable[[DistributedDataParallel], None] | None = getattr(
    DistributedDataParallel, _METHOD, None
)
_listeners: "WeakKeyDictionary[DistributedDataParallel, list[ShadowSteps]]" = WeakKeyDictionary()


class ShadowSteps:
    """Notices the steps that a rank shadows.

    Args:
        model: The wrapped model.
        shadowed: Called after each of them.
    """

    def __init__(self, model: DistributedDataParallel, shadowed: Callable[[], None]) -> None:
        self._model = model
        self.shadowed = shadowed
        _listeners.setdefault(model, []).append(self)
        if _original is not None:
            setattr(DistributedDataParallel, _METHOD, _match_and_tell)

    def remove(self) -> None:
        """Stop listening; a second call does nothing."""
        listeners = _listeners.get(self._model, [])
        if self in listeners:
            listeners.remove(self)
        if not listeners:
            _listeners.pop(self._model, None)
        if not _listeners and _original is not None:
            setattr(DistributedDataParallel, _METHOD, _original)


def _match_and_tell(model: DistributedDataParallel) -> None:
    assert _original is not None
    _original(model)
    for listener in tuple(_listeners.get(model, ())):
        listener.shadowed()
