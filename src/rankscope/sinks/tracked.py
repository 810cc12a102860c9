"""The tracker's run that the training has open: its name, address, group, tags and notes."""

import logging
import sys
from collections.abc import Callable, Collection
from typing import Any

_log = logging.getLogger("rankscope")

_MOST_TAGS = 32
_MOST_LETTERS = 2000


def open_run_of(sinks: Collection[str]) -> dict[str, Any]:
    """Return facts of the open run of the first tracker that the training has imported, or none."""
    for name, look in _LOOKS.items():
        module = sys.modules.get(name)
        if name not in sinks or module is None:
            continue
        try:
            found = look(module)
        except Exception as error:  # whatever a release of the tracker has changed
            _log.debug("the open run of %s cannot be described: %r", name, error)
            continue
        if found is not None:
            known = {key: _short(value) for key, value in found.items() if value}
            return {"tracker": name, **known}
    return {}


def _wandb(module: Any) -> dict[str, Any] | None:
    run = module.run
    if run is None:
        return None
    tags = list(run.tags or ())
    return {
        "name": run.name, "url": run.url, "group": run.group, "tags": tags, "notes": run.notes
    }  # fmt: skip


def _mlflow(module: Any) -> dict[str, Any] | None:
    run = module.active_run()
    if run is None:
        return None
    info = run.info
    given = run.data.tags
    server = str(module.get_tracking_uri()).rstrip("/")
    path = f"/#/experiments/{info.experiment_id}/runs/{info.run_id}"
    tags = [f"{key}={value}" for key, value in given.items() if not key.startswith("mlflow.")]
    return {
        "name": info.run_name,
        "url": f"{server}{path}" if server.startswith(("http://", "https://")) else "",
        "tags": tags,
        "notes": given.get("mlflow.note.content"),
    }


def _trackio(module: Any) -> dict[str, Any] | None:
    run = module.context_vars.current_run.get()
    return None if run is None else {"name": run.name, "group": run.group}


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(each) for each in value[:_MOST_TAGS]]
    return str(value)[:_MOST_LETTERS]


_LOOKS: dict[str, Callable[[Any], dict[str, Any] | None]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
