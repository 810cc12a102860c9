"""How much the probe starts on an accelerator in a step: the same for any number of tensors."""

import importlib.util

import pytest

from support.benchmarks import load_benchmark

MOST = 12

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform"
)


@pytest.mark.slow
def test_the_number_of_launches_does_not_grow_with_the_number_of_tensors():
    launches = load_benchmark("launches")
    rows = launches.measure((5, 10))
    assert [row["tensors"] for row in rows] == [5, 10]
    assert all(row["of"] == rows[0]["of"] for row in rows)
    assert rows[0]["launches"] <= MOST
    assert launches.render(rows).count("\n") == 3
