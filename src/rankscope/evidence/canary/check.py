"""Whether canaries can run in a training."""

import logging

import torch

from rankscope.bus.step import MAX_PAIRED_WORKERS
from rankscope.errors import UnsupportedError, UsageError
from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.replay import check_module
from rankscope.private import lacking
from rankscope.wrappers.find import Wrapped

_log = logging.getLogger("rankscope")


def check_canary(wrapped: Wrapped, *, wanted: bool, every: int | None) -> bool:
    """Return whether canaries run in a training."""
    if every is not None and (every < 1 or not wanted):
        raise UsageError(
            f"canary_every expected at least 1 step, and canary=True, got {every} and {wanted}"
        )
    if not wanted:
        return False
    reason = _why_not(wrapped)
    if reason and every is not None:
        raise UnsupportedError(f"canary_every cannot be kept: {reason}; leave it out")
    if reason:
        _log.info("no canaries in this run: %s", reason)
    return not reason


def _why_not(wrapped: Wrapped) -> str:
    num_workers = wrapped.group.size()
    if wrapped.kind.no_canary:
        return wrapped.kind.no_canary
    if any(kind.__name__ == "LightningModule" for kind in type(wrapped.module).__mro__):
        return (
            "Lightning runs training_step in place of the model's forward pass, with all that it "
            "logs, which a canary cannot repeat"
        )
    if not 2 <= num_workers <= MAX_PAIRED_WORKERS:
        return f"canaries compare 2 to {MAX_PAIRED_WORKERS} workers, got {num_workers}"
    missing = lacking("canary")
    if missing:
        return f"torch {torch.__version__} lacks {', '.join(missing)}"
    try:
        check_module(wrapped.module)
    except CanaryDeclined as declined:
        return str(declined)
    return ""
