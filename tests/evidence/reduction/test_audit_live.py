"""The audit of reductions on real ranks: what it finds live, and again in the record."""

import pytest

from rankscope import Run
from rankscope.verdict.diagnosis import diagnose_run
from support import audit_jobs
from support.ranks import run_ranks

CAUSE = "numerics.reduction_error"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    found = run_ranks(audit_jobs.train, 3, str(folder))[0]
    return {kind: (found[kind], Run.open(folder / kind)) for kind in audit_jobs.KINDS}


def audited(jobs, kind):
    return [one for one in jobs[kind][0] if one["cause"] == CAUSE]


@pytest.mark.parametrize("kind", audit_jobs.KINDS)
def test_the_record_tells_the_same_again(jobs, kind):
    found, run = jobs[kind]
    assert [finding.to_json() for finding in diagnose_run(run)] == found


def test_a_healthy_job(jobs):
    assert audited(jobs, "healthy") == []


def test_an_element_that_every_worker_got_wrong(jobs):
    (finding,) = audited(jobs, "element")
    assert finding["id"] == "reduction-spike"
    assert finding["severity"] == "error"
    assert finding["first_step"] == finding["last_step"] == audit_jobs.AT
    assert finding["ranks"] == [0, 1, 2]
    assert finding["groups"] == ["0"]


def test_an_element_that_one_worker_got_wrong(jobs):
    (finding,) = audited(jobs, "one worker")
    assert finding["id"] == "reduction-one-worker"
    assert finding["first_step"] == audit_jobs.AT
    assert finding["ranks"] == [1]
    assert finding["groups"] == ["0"]


def test_a_hook_that_begins_to_compress_later(jobs):
    (finding,) = audited(jobs, "compression")
    assert (finding["id"], finding["severity"]) == ("reduction-lossy", "warning")
    assert finding["first_step"] == audit_jobs.AT
    assert finding["groups"] == ["0"]


def test_a_reduction_in_bfloat16(jobs):
    (finding,) = audited(jobs, "bfloat16")
    assert finding["id"] == CAUSE
    assert finding["evidence"]["fits"] == "bfloat16"
    assert finding["groups"] == ["0", "2"]
