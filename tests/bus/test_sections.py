"""Groups cut into sections: every element in one of them, none too large, none missing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankscope.bus.groups import SECTION_ELEMENTS, cut_sections, group_parameters


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=12),
    limit=st.integers(1, 50),
)
def test_every_element_is_in_one_section_of_its_group(sizes, limit):
    counts = {f"layers.{group}.p{index}": size for index, (group, size) in enumerate(sizes)}
    groups = group_parameters(counts)
    cut = cut_sections(counts, groups, section_elements=limit)
    held = np.zeros(len(cut), int)
    for name, size in counts.items():
        position = 0
        for section, start, stop in cut.ranges[name]:
            assert start == position <= stop
            assert cut.group_of[section] == groups.index_of[name]
            held[section] += stop - start
            position = stop
        assert position == size
    assert tuple(held) == cut.sizes
    assert max(held) <= limit
    totals = [sum(counts[n] for n in counts if groups.index_of[n] == g) for g in range(len(groups))]
    assert list(cut.counts) == [max(1, -(-total // limit)) for total in totals]  # no more
    assert cut.group_of == tuple(sorted(cut.group_of))


def test_no_section_of_a_large_model_is_larger_than_ten_million():
    sizes = {"embed.w": 128_256 * 2048, "layers.0.w": 40_000_000, "norm.w": 2048}
    cut = cut_sections(sizes, group_parameters(sizes))
    assert SECTION_ELEMENTS == 10_000_000
    assert max(cut.sizes) <= SECTION_ELEMENTS
    assert sum(cut.sizes) == sum(sizes.values())
    assert cut.counts == (27, 5, 1)
    assert all(piece.start % 64 == 0 for pieces in cut.ranges.values() for piece in pieces)
