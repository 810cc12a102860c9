import os
import socket
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rankscope.bus.evidence import Source, Table
from rankscope.bus.finding import Severity
from rankscope.evidence import columns_of
from rankscope.sinks import base
from rankscope.sinks.prometheus import PrometheusSink
from record.step_reports import make_report
from sinks.findings import FINDING, finding, run_info


@pytest.fixture
def serve(tmp_path):
    started = []

    def start(**changes):
        sink = PrometheusSink(0)
        sink.open(run_info(tmp_path, **changes))
        started.append(sink)
        return sink

    yield start
    for sink in started:
        sink.close()


def scrape(sink):
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return {(one.name, *sorted(one.labels.items())): one.value for one in samples}


def known(name, *labels):
    return (f"rankscope_{name}", *labels)


def test_a_scrape_holds_the_numbers_of_the_latest_step_and_no_others(serve):
    sink = serve()
    for step in (2, 3):
        values = base.step_values(make_report(step), (), {})
        sink.step(values)
    expected = {
        known("run_info", ("run", "run")): 1,
        known("step"): 3,
        known("step_timestamp_seconds"): values.time,
        **{known(name): value for name, value in values.values.items()},
        **{known("findings_open", ("severity", str(severity))): 0 for severity in Severity},
    }
    for signal in base.WORKER_SIGNALS:
        spread = values.spread(signal.name)
        if spread is not None:
            ends = (spread.low, spread.mean, spread.high)
            for which, value in zip(base.SPREAD, ends, strict=True):
                expected[known(f"workers_{signal.name}", ("over", which))] = value
        for rank, value in values.by_rank(signal.name).items():
            expected[known(f"worker_{signal.name}", ("rank", str(rank)))] = value
    assert scrape(sink) == expected


def test_the_number_of_series_is_bounded(serve):
    num_workers = base.MAX_RANKS
    sink = serve()
    report = make_report(0, num_workers)
    for signal in columns_of(Table.WORKERS, Source.LOCAL):
        report.gathered.workers[signal.name][:] = 1
    derived = {name: np.ones(num_workers) for name in report.derived}
    report = replace(report, derived=derived, values=dict.fromkeys(report.values, 1.0))
    sink.step(base.step_values(report, range(base.MAX_NAMED)))
    for number in range(5000):
        sink.finding(finding(id=f"f{number}", ranks=(number % num_workers,)))
    read = scrape(sink)
    bound = 3 + len(base.STEP_SIGNALS) + 3 + 1 + len(base.WORKER_SIGNALS) * (3 + base.MAX_RANKS)
    assert len(read) == bound
    assert read[known("findings", ("cause", FINDING.cause), ("severity", "warning"))] == 5000


def test_it_stops_while_another_process_still_holds_its_socket(tmp_path):
    first = PrometheusSink(0)
    first.open(run_info(tmp_path))
    held = os.dup(first._server.fileno())  # as a data loader's worker does, forked from here
    try:
        first.close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", first.port), timeout=60)
        second = PrometheusSink(first.port)
        second.open(run_info(tmp_path))
        assert known("run_info", ("run", "run")) in scrape(second)
        second.close()
    finally:
        os.close(held)
