"""Parts that a layout has split are measured as the parameter that the other one has fused."""

import pytest
import torch

from rankscope.errors import UnsupportedError
from rankscope.evidence.parity.figures import Part, part_of
from rankscope.evidence.parity.held import Naming

RULES = [("block.*.qkv", ["h.*.q", "h.*.k", "h.*.v"]), ("head.*", ["lm.*"])]
SHAPES = {"h.0.q": (6, 5), "h.0.k": (2, 5), "h.0.v": (2, 5), "lm.weight": (3, 5), "norm": (5,)}


def test_names_are_those_of_the_other_layout():
    naming = Naming(RULES, SHAPES)
    assert [naming.of(name) for name in SHAPES] == [
        *["block.0.qkv"] * 3, "head.weight", "norm"
    ]  # fmt: skip
    assert naming.shape("h.0.v", (2, 5)) == (10, 5)
    assert naming.placed("h.0.v", part_of(torch.ones(2, 5))).first == (8, 0)
    flat = Part(torch.ones(3), (10,), (2,))
    assert naming.placed("h.0.k", flat)[1:3] == ((50,), (32,))


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"h.0.q": (6, 5), "h.0.k": (2, 5)}, "no parameter is called h.0.v, a part of"),
        ({"h.0.q": (6, 5), "h.0.k": (2, 4), "h.0.v": (2, 5)}, "6 × 5, 2 × 4, 2 × 5"),
    ],
)
def test_parts_that_are_missing_or_do_not_fit_are_refused(shapes, expected):
    with pytest.raises(UnsupportedError, match=expected):
        Naming(RULES, shapes)
