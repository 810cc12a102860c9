"""What a user reads of a step, on its way from the agent to the training."""

from dataclasses import replace

import pytest

from rankscope.agent.message import pack_report, unpack_report
from rankscope.errors import RankscopeError
from record.step_reports import make_report
from support.same import assert_same


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_report_survives_the_way_but_for_what_stays_behind(num_workers):
    report = make_report(5, num_workers=num_workers)
    gathered = replace(
        report.gathered,
        sketches_WK=None,
        group_sketches_WGK=None,
        consensus=None,
        trace=None,
    )
    assert_same(unpack_report(pack_report(report)), replace(report, gathered=gathered))


@pytest.mark.parametrize("size", [0, 7, 60, -1])
def test_damaged_bytes_are_refused(size):
    with pytest.raises(RankscopeError, match="cannot be read"):
        unpack_report(pack_report(make_report(5, num_workers=2))[:size])
