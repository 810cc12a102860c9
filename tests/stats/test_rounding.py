"""What rounding explains, held against torch's own types."""

import pytest
import torch

from rankscope.stats.rounding import UNIT_ROUNDOFF


@pytest.mark.parametrize("name", UNIT_ROUNDOFF)
def test_the_unit_roundoff_is_half_of_the_distance_between_numbers(name):
    assert torch.finfo(getattr(torch, name)).eps / 2 == UNIT_ROUNDOFF[name]
