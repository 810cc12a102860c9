import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.faults.bench import Bench, Score, score
from benchmarks.faults.catalogue import FaultClass, catalogue
from benchmarks.faults.command import main
from benchmarks.faults.injectors import INJECTORS
from benchmarks.faults.job import Trial
from benchmarks.faults.pool import Outcome, WorkerPool
from benchmarks.faults.summary import markdown

from rankscope import Finding, Run, Severity
from rankscope.bus.evidence import Table
from record.run_files import make_finding, write
from record.step_reports import make_report


@pytest.fixture(scope="module")
def bench(folder):
    with Bench(folder) as bench:
        yield bench


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "steps", "delay"),
    [("D5", 8, 0), ("D1", 32, 31), ("T2", 24, 10), ("D25", 44, 20), ("D26", 8, 4), ("M4", 4, 0)],
)
def test_a_fault_is_found_within_some_steps_with_its_cause(bench, folder, name, steps, delay):
    score = bench.run(catalogue()[name], num_steps=steps)
    assert score.problem == ""
    assert score.as_expected
    assert score.delay <= delay
    assert list(folder.glob(f"{name}-w4-s0*"))


@pytest.mark.ranks
def test_a_healthy_job_raises_notes_at_most(bench, folder):
    score = bench.run(catalogue()["H33"], num_steps=24)
    assert score.problem == ""
    assert score.as_expected
    assert not score.false_alarms
    assert len(Run.open(folder / "H33-w4-s0").columns(Table.STEPS, "step")["step"]) == 24


@pytest.mark.ranks
def test_a_rank_that_raises_is_reported_and_the_workers_are_made_anew(tmp_path):
    with WorkerPool(2) as pool:
        broken = Trial("nothing", 2, 0, 4, 2, tmp_path / "broken")
        outcome = pool.run(broken, timeout=60)
        assert outcome.directories == ()
        assert "KeyError" in outcome.problem
        outcome = pool.run(replace(broken, fault="D5", run_dir=tmp_path / "sound"), timeout=60)
    assert outcome.problem == ""
    assert outcome.directories == (tmp_path / "sound",)


@pytest.mark.ranks
def test_ranks_that_hang_are_ended(tmp_path):
    with WorkerPool(2) as pool:
        outcome = pool.run(Trial("D5", 2, 0, 100, 2, tmp_path / "run"), timeout=0.05)
        assert "did not finish" in outcome.problem
        assert not pool._processes


def test_the_readme_counts_what_the_bench_runs() -> None:
    healthy = [fault.healthy for fault in catalogue().values() if not fault.missing]
    counted = f"{healthy.count(False)} real faults and {healthy.count(True)} healthy look-alikes"
    assert counted in (ROOT / "README.md").read_text()


def test_every_fault_is_reproduced_or_says_why_not() -> None:
    assert INJECTORS.keys() == {fault.id for fault in catalogue().values() if not fault.missing}


def test_every_row_states_what_is_expected() -> None:
    silent = {FaultClass.HEALTHY, FaultClass.NONE, FaultClass.TWO_RUNS}
    for fault in catalogue().values():
        loud = fault.fault_class not in silent
        assert fault.expects_finding == bool(fault.causes) == loud, fault.id
        assert fault.healthy == fault.id.startswith("H"), fault.id
        if fault.fault_class in {FaultClass.NONE, FaultClass.TWO_RUNS}:
            assert fault.evidence, f"{fault.id}: an honest line on what evidence there is"


ROOT = Path(__file__).parents[2]
T4, D5, D20, H1 = (catalogue()[name] for name in ("T4", "D5", "D20", "H1"))


def finding(step: int, severity: Severity = Severity.ERROR) -> Finding:
    name = "state.hyperparameters_differ"
    at = dict.fromkeys(("first_step", "last_step", "step"), step)
    return make_finding(name, cause=name, severity=severity, ranks=(1,), **at)


def scored(tmp_path: Path, fault, *findings: Finding, problem: str = "") -> Score:
    run_dir = tmp_path / "run"
    run = write(run_dir, [make_report(step, 4) for step in range(30)])
    run.add_findings(findings)
    run.close("complete")
    return score(fault, Trial(fault.id, 4, 0, 100, 20, run_dir), Outcome((run_dir,), problem, 1.0))


def test_a_fault_that_is_found_as_expected(tmp_path):
    got = scored(tmp_path, T4, finding(23))
    assert (got.detected, got.delay, got.rank_named, got.cause_rank) == (True, 3, True, 1)
    assert got.false_alarms == ()
    assert got.as_expected


def test_a_healthy_look_alike_may_raise_notes_only(tmp_path):
    assert scored(tmp_path / "a", H1, finding(5, severity=Severity.NOTE)).as_expected
    alarmed = scored(tmp_path / "b", H1, finding(5, severity=Severity.WARNING))
    assert alarmed.false_alarms == ("state.hyperparameters_differ",)
    assert not alarmed.as_expected


def test_the_page_of_the_docs_is_of_the_stored_scores():
    stored = json.loads((ROOT / "docs" / "fault-bench.json").read_text())
    page = (ROOT / "docs" / "fault-bench.md").read_text()
    command = re.search(r"Written by `(.*?)`", page)[1]
    planned = re.search(r"of ([\d,]+) runs are still", page)
    number = int(planned[1].replace(",", "")) if planned else len(stored)
    scores = [Score.from_json(one, catalogue()) for one in stored]
    rendered = markdown(scores, list(catalogue().values()), command, number)
    assert of_any_machine(rendered) == of_any_machine(page)


def of_any_machine(page):
    return [line for line in page.splitlines() if not line.startswith("Workers: ")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected ids of faults or --all"),
        (["X1"], "got X1; see"),
        (["D5", "--workers", "1"], "at least 2 workers, got 1"),
    ],
)
def test_bad_usage_is_told(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert said in err


@pytest.mark.ranks
def test_a_run_prints_and_writes_what_is_found_and_goes_on_where_it_stood(capsys, tmp_path):
    file, page = tmp_path / "f.json", tmp_path / "f.md"
    options = ["--steps", "8", "--workers", "2", "--json", str(file), "--markdown", str(page)]
    assert main(["d5", *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith("D5 as expected after 0 steps")
    assert "error  data.duplicate_batches: Ranks 0 and 1 trained on identical batches" in out
    marked = json.loads(file.read_text())
    [score] = marked
    assert (score["id"], score["workers"], score["detected"]) == ("D5", 2, True)
    assert "## Exact faults" in page.read_text()

    score["delay"] = 5  # so that one can see that it was not run again
    file.write_text(json.dumps(marked))
    assert main(["D5", "D7", *options, "--resume"]) == 0
    out, err = capsys.readouterr()
    assert "D5 as expected after 5 steps" in out
    assert "D7 as expected" in out
    assert "D5" not in err
    assert [score["id"] for score in json.loads(file.read_text())] == ["D5", "D7"]
