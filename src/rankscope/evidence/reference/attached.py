"""Losses that a forward pass attaches: their gradient joins the way back, and their value does not.

The balance of experts is often trained so. A function of autograd hands on a tensor as it is; on
the way back, it hands on that tensor's gradient, and gives one to a number beside it. What backward
is called on does not have this number in it, so that no move of parameters shows its derivative.
"""

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from rankscope.evidence.reference.direct import LEAF, Edge, nodes_between


class AttachedLosses:
    """Finds them in one forward pass, as its backward pass runs."""

    def __init__(self, outputs: Collection[Edge], inputs: Collection[Edge]) -> None:
        self.name = ""
        """The function that attaches one; empty without."""
        for node in nodes_between(inputs, outputs):
            if isinstance(node, BackwardCFunction) and (places := _numbers_of(node)):
                node.register_hook(partial(self._receive, type(node).__name__, places))

    def _receive(
        self,
        name: str,
        places: Sequence[int],
        handed: Sequence[Tensor | None],
        arrived: Sequence[Tensor | None],
    ) -> None:
        """See whether a node hands on what arrived, and gives a number a gradient of its own.

        It never raises into the backward pass.
        """
        try:
            came = {one.data_ptr() for one in arrived if one is not None}
            gone = [None if one is None else one.data_ptr() for one in handed]
        except Exception:  # tensors without memory
            return
        if any(gone[place] not in (None, *came) for place in places) and came.intersection(gone):
            self.name = name.removesuffix("Backward")


def _numbers_of(node: Any) -> list[int]:
    """Return which inputs of a node are single numbers that were computed; none of a lone input."""
    following = [(one, at) for one, at in node.next_functions]
    if sum(one is not None for one, _ in following) < 2:
        return []
    return [
        place
        for place, (one, at) in enumerate(following)
        if one is not None and one.name() != LEAF and _size(one, at) == 1
    ]


def _size(node: Any, number: int) -> int:
    """Return the number of elements of an output of a node; 0 where torch does not tell."""
    known = getattr(node, "_input_metadata", ())
    return math.prod(known[number].shape) if number < len(known) else 0
