"""The catalogue: complete, and each row has an injector or a reason."""

from pathlib import Path

from benchmarks.faults.catalogue import FaultClass, catalogue
from benchmarks.faults.injectors import INJECTORS


def test_the_readme_counts_what_the_bench_runs() -> None:
    healthy = [fault.healthy for fault in catalogue().values() if not fault.missing]
    counted = f"{healthy.count(False)} real faults and {healthy.count(True)} healthy look-alikes"
    assert counted in (Path(__file__).parents[2] / "README.md").read_text()


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
