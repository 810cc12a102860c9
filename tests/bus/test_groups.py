import pytest

from rankscope.bus.groups import MAX_GROUPS, block_of, group_parameters
from rankscope.errors import UsageError

LLAMA = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.10.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]


def members(groups):
    index_of = groups.index_of
    return {n: [p for p in index_of if index_of[p] == at] for at, n in enumerate(groups.names)}


def test_blocks_embedding_and_head_of_a_language_model():
    groups = group_parameters(LLAMA)
    assert members(groups) == {
        "model.embed_tokens": LLAMA[:1],
        "model.layers.0": LLAMA[1:3],
        "model.layers.1": LLAMA[3:5],
        "model.layers.10": LLAMA[5:6],
        "model.norm": LLAMA[6:7],
        "lm_head": LLAMA[7:],
    }
    assert len(groups) == 6


@pytest.mark.parametrize(
    ("parameter", "group"),
    [
        ("transformer.h.3.attn.c_attn.bias", "transformer.h.3"),
        ("model.layers.7.mlp.experts.31.up.weight", "model.layers.7"),  # the first number
        ("0.weight", "0"),  # a bare nn.Sequential
        ("layer1.0.conv2.weight", "layer1.0"),  # "layer1" is a name, not a number
        ("encoder.layer1.weight", "encoder.layer1"),
        ("norm.weight", "norm"),
        ("scale", "scale"),  # a parameter of the model itself
    ],
)
def test_the_block_of_a_parameter(parameter, group):
    assert block_of(parameter) == group
    assert group_parameters([parameter]).names == (group,)


def test_the_longest_prefix_of_a_mapping_wins_whatever_its_order():
    prefixes = {"model.": "body", "model.layers.1.": "one", "model.layers.1.mlp": "one's mlp"}
    for option in (prefixes, dict(reversed(prefixes.items()))):
        assert members(group_parameters(LLAMA, option)) == {
            "body": [LLAMA[i] for i in (0, 1, 2, 5, 6)],
            "one": LLAMA[3:4],
            "one's mlp": LLAMA[4:5],
            "other": LLAMA[7:],
        }


@pytest.mark.parametrize(("num_blocks", "size"), [(MAX_GROUPS, 1), (MAX_GROUPS + 1, 2), (1000, 8)])
def test_more_groups_than_fit_are_merged_with_their_neighbours(num_blocks, size):
    parameters = [f"layers.{i}.{kind}" for i in range(num_blocks) for kind in ("up", "down")]
    groups = group_parameters(parameters)
    assert len(groups) == -(-num_blocks // size) <= MAX_GROUPS
    assert len(set(groups.names)) == len(groups)
    for i in range(num_blocks):
        for kind in ("up", "down"):
            assert groups.index_of[f"layers.{i}.{kind}"] == i // size
    last = min(size, num_blocks) - 1
    assert groups.names[0] == ("layers.0" if last == 0 else f"layers.0 … layers.{last}")


@pytest.mark.parametrize("option", ["layers", None, ["model."]])
def test_another_option_is_refused(option):
    with pytest.raises(UsageError, match="groups must be 'blocks', 'none', a function or a mapp"):
        group_parameters(LLAMA, option)
