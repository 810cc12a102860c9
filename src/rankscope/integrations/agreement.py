"""Whether all ranks begin to watch, or none: asked through the store, without a collective.

A rank that waits in a collective for one that never comes would hold up the training. So each
rank notes in the store that it is ready; one of them, the last to be ready or the first to lose
patience, writes down the answer, and the store sees to it that there is only one.
"""

import time
from typing import Any

PATIENCE_SECONDS = 120.0
_GO = "go"
_POLL_SECONDS = 0.01


def agree(
    store: Any, num_ranks: int, problem: str = "", patience_seconds: float = PATIENCE_SECONDS
) -> str:
    """Return why watching must not begin, the same on all ranks; empty if it may.

    Args:
        store: One of torch's stores, in a part of its own for this question.
        num_ranks: How many ranks must be ready.
        problem: Why this rank cannot begin; empty if it can.
        patience_seconds: How long to wait for the others.
    """
    if problem:
        return _answer(store, problem)
    if store.add("ready", 1) >= num_ranks:
        return _answer(store, _GO)
    end = time.monotonic() + patience_seconds
    while not store.check(["answer"]):
        if time.monotonic() > end:
            ready = store.add("ready", 0)
            return _answer(
                store,
                f"after {patience_seconds:.0f} s, {ready} of {num_ranks} ranks had begun to train "
                "under rankscope run; start all ranks with it",
            )
        time.sleep(_POLL_SECONDS)
    return _answer(store, _GO)  # it is there already


def _answer(store: Any, mine: str) -> str:
    """Write the answer unless there is one, and return it."""
    answer: bytes = store.compare_set("answer", "", mine)
    text = answer.decode()
    return "" if text == _GO else text
