"""The catalogue: complete, and each row has an injector or a reason."""

import re
from pathlib import Path

import pytest
from benchmarks.faults.catalogue import Fault, FaultClass, UsageError, catalogue, select
from benchmarks.faults.injectors import INJECTORS

from rankscope import Severity
from rankscope.bus.rules import RULES

FAULTS = {
    "D": [1, 2, 4, 5, 6, 7, 8, 9, 11, 13, 14, 15, 16, 17, *range(19, 28)],
    "S": [1, 2, 3, 4, 5, 6, 8],
    "Y": [1, 2, 3, 4, 5, 7, 10, 11, 12, 13],
    "T": [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 15, 17],
    "N": [1, 2, 3, 4, 5, 6, 8, 9],
    "A": [1, 2, 3, 4, 5],
    "L": [1, 2, 3, 4],
    "M": [1, 2, 3, 4],
    "P": [1, 2, 3, 4, 5, 6],
    "H": [*range(1, 17), 21, 22, 23, 31, 32, 33],
}


def is_report(name: str) -> bool:
    """Return whether an entry is of a public report, its right version, or of a canary's answer."""
    return name.startswith(("C", "HP")) or (name[0] == "P" and int(name[1:]) > FAULTS["P"][-1])


def test_the_catalogue_is_complete_and_in_order() -> None:
    names = [name for name in catalogue() if not is_report(name)]
    assert names == [f"{kind}{n}" for kind, ns in FAULTS.items() for n in ns]


def test_the_readme_counts_what_the_bench_runs() -> None:
    healthy = [fault.healthy for fault in catalogue().values() if not fault.missing]
    counted = f"{healthy.count(False)} real faults and {healthy.count(True)} healthy look-alikes"
    assert counted in (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.parametrize("fault", catalogue().values(), ids=lambda fault: fault.id)
def test_every_fault_is_reproduced_or_says_why_not(fault: Fault) -> None:
    assert (fault.id in INJECTORS) != bool(fault.missing)


def test_no_injector_is_without_a_fault() -> None:
    assert INJECTORS.keys() <= catalogue().keys()


@pytest.mark.parametrize("fault", catalogue().values(), ids=lambda fault: fault.id)
def test_every_row_states_what_is_expected(fault: Fault) -> None:
    silent = {FaultClass.HEALTHY, FaultClass.NONE, FaultClass.TWO_RUNS}
    assert fault.expects_finding == bool(fault.causes) == (fault.fault_class not in silent)
    assert fault.healthy == fault.id.startswith("H")
    assert fault.mechanism[0].isupper()
    assert not fault.mechanism.endswith(".")
    if fault.fault_class in {FaultClass.NONE, FaultClass.TWO_RUNS}:
        assert fault.evidence, "an honest line on what evidence there is"


def test_expected_causes_have_stable_names() -> None:
    kinds = {cause.split(".")[0] for cause in RULES}
    for fault in catalogue().values():
        for cause in fault.causes:
            assert re.fullmatch(r"[a-z]+\.[a-z_]+", cause)
            assert cause.split(".")[0] in kinds | {"rng", "env", "loss", "sync", "state"}


def test_only_where_the_catalogue_says_note_does_a_note_count() -> None:
    assert catalogue()["D11"].threshold is Severity.NOTE
    assert catalogue()["N8"].threshold is Severity.NOTE
    assert catalogue()["D1"].threshold is Severity.WARNING
    assert catalogue()["H1"].threshold is Severity.WARNING


def test_faults_are_selected_by_id_in_the_order_given() -> None:
    assert [fault.id for fault in select(["t2", "D1"])] == ["T2", "D1"]


def test_an_unknown_id_is_told() -> None:
    with pytest.raises(UsageError, match=r"got X9; see .*catalogue\.toml"):
        select(["D1", "X9"])
