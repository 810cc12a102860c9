"""The tables of the outside measure: what counts as found, and what the page says of it."""

from support.benchmarks import load_benchmark


def test_every_workload_has_a_job():
    outside, jobs = load_benchmark("outside"), load_benchmark("outside_jobs")
    assert {workload.name for workload in outside.ALL} == set(jobs.JOBS)


def test_the_page_is_of_the_results():
    peers = load_benchmark("peers")
    results = peers.json.loads(peers.RESULTS.read_text())
    assert peers.render(results) in peers.PAGE.read_text()
