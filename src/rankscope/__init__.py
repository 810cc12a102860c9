"""See every worker of a data-parallel training job before all-reduce averages it away.

::

    import rankscope

    scope = rankscope.watch(model, optimizer, run_dir="runs/sft")
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scope.close()

Importing this package imports nothing heavy; torch is imported with the first name that needs it.
"""

import logging
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rankscope.version import __version__

if TYPE_CHECKING:
    from rankscope.bus.finding import Finding as Finding
    from rankscope.bus.finding import Severity as Severity
    from rankscope.bus.plan import Tier as Tier
    from rankscope.bus.step import StepReport as StepReport
    from rankscope.errors import RankscopeError as RankscopeError
    from rankscope.lab.reductions.fixed_order import fixed_order as fixed_order
    from rankscope.lab.reductions.order_free import order_free as order_free
    from rankscope.record import Run as Run
    from rankscope.session.options import WatchOptions as WatchOptions
    from rankscope.session.scope import Scope as Scope
    from rankscope.session.start import watch as watch
    from rankscope.verdict.words import LoadedRun as LoadedRun
    from rankscope.verdict.words import load as load

_HOMES = {
    "Finding": "rankscope.bus.finding",
    "LoadedRun": "rankscope.verdict.words",
    "RankscopeError": "rankscope.errors",
    "Run": "rankscope.record",
    "Scope": "rankscope.session.scope",
    "Severity": "rankscope.bus.finding",
    "StepReport": "rankscope.bus.step",
    "Tier": "rankscope.bus.plan",
    "WatchOptions": "rankscope.session.options",
    "fixed_order": "rankscope.lab.reductions.fixed_order",
    "load": "rankscope.verdict.words",
    "order_free": "rankscope.lab.reductions.order_free",
    "watch": "rankscope.session.start",
}

__all__ = [
    "Finding",
    "LoadedRun",
    "RankscopeError",
    "Run",
    "Scope",
    "Severity",
    "StepReport",
    "Tier",
    "WatchOptions",
    "__version__",
    "fixed_order",
    "load",
    "order_free",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(_imported(_HOMES[name]), name)
    raise AttributeError(f"module 'rankscope' has no attribute {name!r}")


def _imported(home: str) -> ModuleType:
    try:
        return import_module(home)
    except ImportError as error:
        if not (error.name or "").startswith("torch."):
            raise
        from rankscope.errors import UnsupportedError

        raise UnsupportedError(
            f"rankscope {__version__} expected another release of torch: {error}"
        ) from error


def __dir__() -> list[str]:
    return __all__


def _keep_log_handlers_out() -> None:
    """Let no handler or filter of the program's own raise from a line of ours into its training."""
    log = logging.getLogger("rankscope")
    handle = log.handle

    def handle_quietly(record: logging.LogRecord) -> None:
        with suppress(Exception):
            handle(record)

    log.handle = handle_quietly  # type: ignore[method-assign]


_keep_log_handlers_out()
