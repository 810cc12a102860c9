"""The dashboard for Grafana and the Prometheus sink.

::

    python -m rankscope.sinks.grafana > rankscope-dashboard.json
"""

import sys
from importlib.resources import files


def dashboard() -> str:
    """Return the dashboard as JSON text that Grafana imports."""
    return files("rankscope.sinks").joinpath("grafana.json").read_text("utf-8")


if __name__ == "__main__":
    sys.stdout.write(dashboard())
