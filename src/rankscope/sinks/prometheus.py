"""Prometheus: the latest values, at an address that a Prometheus server scrapes.

The number of series is bounded for any job: a gauge per column of the steps table, three per
column of the workers table, at most 64 ranks, and one per cause and severity of findings.
"""

import contextlib
import logging
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from rankscope.bus.evidence import Column
from rankscope.bus.finding import Finding, Severity
from rankscope.sinks.base import SPREAD, STEP_SIGNALS, WORKER_SIGNALS, RunInfo, StepValues

_log = logging.getLogger("rankscope")


class PrometheusSink:
    """Serves the latest values under ``/metrics``, from a registry of its own.

    In steps without measured gradients, values that depend on them stay as they were.

    Args:
        port: Port to listen at; 0 for a free one, which is logged.
        host: Address to listen at; other machines reach it only if this is not the loopback.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.port = port
        self.host = host
        self._run = ""
        self._server: Any = None
        self._lock = threading.Lock()
        self._steps: dict[str, float] = {}
        self._spreads: dict[str, tuple[float, ...]] = {}
        self._ranks: dict[str, dict[int, float]] = {}
        self._latest: StepValues | None = None
        self._findings: dict[str, Finding] = {}
        self._seen: set[tuple[str, Severity]] = set()

    def open(self, run: RunInfo) -> None:
        """Listen."""
        self._run = run.run_dir.name
        for finding in run.findings:
            self.finding(finding)
        registry = CollectorRegistry()
        registry.register(self)
        self._server, _ = start_http_server(self.port, self.host, registry)
        self.port = self._server.server_port
        _log.info("metrics for Prometheus at http://%s:%d/metrics", self.host, self.port)

    def step(self, step: StepValues) -> None:
        """Replace the values by those of a step."""
        spreads = {s.name: step.spread(s.name) for s in WORKER_SIGNALS}
        known = {name: (s.low, s.mean, s.high) for name, s in spreads.items() if s is not None}
        ranks = {s.name: values for s in WORKER_SIGNALS if (values := step.by_rank(s.name))}
        with self._lock:
            keep = not step.observed
            self._steps = {**(self._steps if keep else {}), **step.values}
            self._spreads = {**(self._spreads if keep else {}), **known}
            self._ranks = {**(self._ranks if keep else {}), **ranks}
            self._latest = step

    def finding(self, finding: Finding) -> None:
        """Count a finding while it is open."""
        with self._lock:
            self._seen.add((finding.cause, finding.severity))
            if finding.status == "open":
                self._findings[finding.id] = finding
            else:
                self._findings.pop(finding.id, None)

    def close(self) -> None:
        """Stop listening, also where forked processes hold the socket, as data loaders' do."""
        if self._server is not None:
            self._server.shutdown()
            with contextlib.suppress(OSError):
                self._server.socket.shutdown(socket.SHUT_RDWR)
            self._server.server_close()

    def describe(self) -> list[Any]:
        """Return nothing: the metrics depend on the run."""
        return []

    def collect(self) -> list[Any]:
        """Return the latest values; called at each scrape, in the server's thread."""
        with self._lock:
            return [*self._of_steps(), *self._of_workers(), *self._of_findings()]

    def _of_steps(self) -> Iterator[Any]:
        yield _gauge("run_info", "name of the run's directory", {(self._run,): 1.0}, "run")
        if self._latest is not None:
            yield _gauge("step", "the last step that all workers have reported", self._latest.step)
            yield _gauge("step_timestamp_seconds", "Unix time of that step", self._latest.time)

        for signal in STEP_SIGNALS:
            if signal.name in self._steps:
                yield _gauge(signal.name, _help(signal), self._steps[signal.name])

    def _of_workers(self) -> Iterator[Any]:
        for signal in WORKER_SIGNALS:
            if signal.name in self._spreads:
                spread = zip(SPREAD, self._spreads[signal.name], strict=True)
                values = {(which,): value for which, value in spread}
                yield _gauge(f"workers_{signal.name}", _help(signal), values, "over")
            if signal.name in self._ranks:
                by_rank = self._ranks[signal.name].items()
                values = {(str(rank),): value for rank, value in by_rank}
                yield _gauge(f"worker_{signal.name}", _help(signal), values, "rank")

    def _of_findings(self) -> Iterator[Any]:
        counts = Counter((f.cause, f.severity) for f in self._findings.values())
        by_cause = {(cause, str(s)): float(counts[cause, s]) for cause, s in sorted(self._seen)}
        totals = Counter(finding.severity for finding in self._findings.values())
        by_severity = {(str(severity),): float(totals[severity]) for severity in Severity}
        yield _gauge("findings_open", "open findings", by_severity, "severity")
        yield _gauge("findings", "open findings by cause", by_cause, "cause", "severity")


def _help(signal: Column) -> str:
    return f"{signal.meaning} ({signal.unit})" if signal.unit else signal.meaning


def _gauge(name: str, text: str, values: Mapping[Any, float] | float, *labels: str) -> Any:
    family = GaugeMetricFamily(f"rankscope_{name}", text, labels=labels)
    for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric(key, value)
    return family
