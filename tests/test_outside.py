"""The tables of the outside measure: what counts as found, and what the page says of it."""

from dataclasses import replace

from rankscope import Severity
from rankscope.bus.finding import Finding
from support.benchmarks import load_benchmark

FOUND = Finding("x", "state.parameters_differ", Severity.ERROR, (2,), 3, 9, "", "")


def test_a_workload_is_found_by_its_cause_severity_and_worker():
    outside = load_benchmark("outside")
    workload = outside.Workload("a", "b", ("state.parameters_differ",), ranks=(2,), why="because")
    assert outside.judge(workload, [FOUND]) == "found"
    assert outside.judge(workload, [replace(FOUND, ranks=(0, 1))]) == "found, **worker not named**"
    assert outside.judge(workload, [replace(FOUND, severity=Severity.WARNING)]) == "**missed**"
    assert outside.judge(workload, [replace(FOUND, cause="state.schedule")]) == "**missed**"
    row = outside.make_row(workload, outside.Outcome(0, "", ()))
    assert row.endswith("| no finding | **missed**: because |")
    assert "because" not in outside.make_row(workload, outside.Outcome(0, "", (FOUND,)))


def test_a_healthy_workload_tolerates_notes_only():
    outside = load_benchmark("outside")
    healthy = outside.Workload("a", "b", ())
    assert outside.judge(healthy, [replace(FOUND, severity=Severity.NOTE)]) == "silent, rightly"
    assert outside.judge(healthy, [FOUND]) == "**false alarm**"


def test_every_workload_has_a_job():
    outside, jobs = load_benchmark("outside"), load_benchmark("outside_jobs")
    assert {workload.name for workload in outside.ALL} == set(jobs.JOBS)


def test_the_page_is_of_the_results():
    peers = load_benchmark("peers")
    results = peers.json.loads(peers.RESULTS.read_text())
    assert peers.render(results) in peers.PAGE.read_text()
