"""Messages that were packed together, against the same messages one by one."""

import json

import numpy as np
import pytest

from rankscope.agent.message import ARRAYS, StepMessage
from rankscope.agent.summary import PARTS, as_columns, pack_block, unpack_blocks

HOSTS = {"one": [8], "some": [8, 8, 3, 1, 8]}


def messages_of(num_workers, seed):
    """Return messages with much in common, and with the rest of any length."""
    rng = np.random.default_rng(seed)
    made = []
    for rank in range(num_workers):
        arrays = {}
        for array in ARRAYS:
            length = int(rng.choice([0, 5, 5, 5, rng.integers(9)]))
            bits = rng.integers(0, 256, length * np.dtype(array.dtype).itemsize).astype(np.uint8)
            arrays[array.name] = bits.view(array.dtype)
        arrays["slots"] = np.array([7, rank, -rank, 2**31, 2**31 * rank, -(2**31), 2**62])
        arrays["samples_B"] = np.full(seed % 3, rank * (2**40 if seed % 2 else 1))
        if rank % 3 == 0:
            named = json.dumps({"changed": rank // 6}).encode()
            arrays["names"] = np.frombuffer(named, np.uint8)
        else:
            arrays["names"] = np.empty(0, np.uint8)
        made.append(StepMessage(4, rank / 7, rank % 2, **arrays))
    return made


def stored(block):
    return {name: np.asarray(block[name], dtype).tobytes() for name, dtype in PARTS}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sizes", HOSTS.values(), ids=HOSTS)
def test_what_was_packed_comes_back_in_the_order_of_the_ranks(sizes, seed):
    expected = messages_of(sum(sizes), seed)
    order = np.random.default_rng(seed).permutation(len(expected)).astype(np.int32)
    ranks = np.split(order, np.cumsum(sizes)[:-1])
    blocks = [stored(pack_block(as_columns([expected[r] for r in own]))) for own in ranks]
    parts = {name: [block[name] for block in blocks] for name, _ in PARTS}
    found = unpack_blocks(4, ranks, parts)
    assert found.times_W.tolist() == [message.time for message in expected]
    assert found.items_W.tolist() == [message.items for message in expected]
    for array in ARRAYS:
        rows = found[array.name].rows
        assert all(row.dtype == array.dtype for row in rows)
        own = [getattr(message, array.name).tobytes() for message in expected]
        assert [row.tobytes() for row in rows] == own, array.name
    named = [{"changed": rank // 6} if rank % 3 == 0 else {} for rank in range(len(expected))]
    assert list(found.named) == named
    assert found.measured.tolist() == [message.measured for message in expected]
