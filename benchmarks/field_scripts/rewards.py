"""A reward that a model of random weights can earn: one of zero for all leaves no gradient."""

from typing import Any


def variety(completions: list[Any], **_: Any) -> list[float]:
    """Return the share of different characters in each completion."""
    texts = [completion[-1]["content"] for completion in completions]
    return [len(set(text)) / max(len(text), 1) for text in texts]
