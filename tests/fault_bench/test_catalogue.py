"""The catalogue: complete, and each row has an injector or a reason."""

import re
from pathlib import Path

import pytest
from benchmarks.faults.catalogue import FaultClass, UsageError, catalogue, select
from benchmarks.faults.injectors import INJECTORS

from rankscope.bus.detector import RULES

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


def test_expected_causes_have_stable_names() -> None:
    kinds = {cause.split(".")[0] for cause in RULES}
    for fault in catalogue().values():
        for cause in fault.causes:
            assert re.fullmatch(r"[a-z]+\.[a-z_]+", cause)
            assert cause.split(".")[0] in kinds | {"rng", "env", "loss", "sync", "state"}


def test_an_unknown_id_is_told() -> None:
    with pytest.raises(UsageError, match=r"got X9; see .*catalogue\.toml"):
        select(["D1", "X9"])
