"""Matrices that consist of copies of one rank's shard."""

from rankscope.evidence.state.roles import alike_shards


def names_of(*starts_W):
    return [found.name for found in alike_shards(starts_W)]


def test_all_matrices_have_to_begin_alike_on_all_ranks():
    one, other = [["a", "0", 1], ["b", "0", 2]], [["a", "1", 1], ["b", "1", 2]]
    assert names_of(one, other) == ["a", "b"]
    assert names_of(one, [["a", "1", 1], ["b", "1", 3]]) == []  # one that repeats on purpose
    assert names_of(one, [["a", "1", 1]]) == []  # one alone that is known


def test_replicas_of_a_shard_are_not_compared_with_each_other():
    one, other = [["a", "0", 1], ["b", "0", 2]], [["a", "1", 3], ["b", "1", 4]]
    assert names_of(one, one) == []
    assert names_of(one, one, other, other) == []
