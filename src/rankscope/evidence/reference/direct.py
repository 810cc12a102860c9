"""What a loss takes of a model past its outputs: a penalty on weights, a temperature.

The gradient that a parameter gets there is in no forward pass that is run again. It is the one of
the edges that lead to the parameter from nodes outside of the forward pass.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rankscope.evidence.canary.replay import in_short
from rankscope.wrappers.surroundings import outside

Edge = tuple[Any, int]
"""A node of an autograd graph, and the number of one of its outputs."""


LEAF = "torch::autograd::AccumulateGrad"


class DirectGradients:
    """The gradients that parameters get past a model's outputs, in one backward pass."""

    def __init__(
        self,
        roots: Iterable[Tensor],  # on which backward is called
        outputs: Collection[Edge],  # of the model, in all forward passes of the step
        parameters: Mapping[int, str],  # names of those that count, by id
        inputs: Collection[Edge] = (),  # of the model, as far as they have a graph
    ) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.takes_inner = False
        """Whether the loss takes a value that the model computed and did not return.

        A gradient of what computes it has come through the model's outputs as well.
        """
        self.lost = ""
        """The error that kept a gradient from being kept; empty without."""
        self._outputs = outputs
        self._inputs = inputs
        self._names = parameters
        self._handles: list[Any] = []
        self._watch([*((root.grad_fn, root.output_nr) for root in roots), *inputs])

    def _watch(self, edges: Sequence[Edge]) -> None:
        inside = nodes_between(self._inputs, self._outputs)
        waiting = [node for node, number in edges if (node, number) not in self._outputs]
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaves: dict[str, list[int]] = defaultdict(list)
            for place, (following, number) in enumerate(node.next_functions):
                if following is None or (following, number) in self._outputs:
                    continue
                if following.name() != LEAF:
                    waiting.append(following)
                elif (name := self._names.get(id(following.variable))) is not None:
                    leaves[name].append(place)
            if leaves and node in inside:
                self.takes_inner = True
            elif leaves:
                self._handles.append(node.register_hook(partial(self._receive, leaves)))

    def _receive(
        self,
        leaves: Mapping[str, Sequence[int]],
        gradients: Sequence[Tensor | None],
        _: Sequence[Tensor | None],
    ) -> None:
        """Keep what a node hands to parameters; never raises into the backward pass."""
        try:
            outside(self._keep, leaves, gradients)
        except Exception as error:
            self.lost = in_short(error)

    @torch.no_grad()
    def _keep(
        self, leaves: Mapping[str, Sequence[int]], gradients: Sequence[Tensor | None]
    ) -> None:
        for name, places in leaves.items():
            for gradient in (gradients[place] for place in places):
                if gradient is None:
                    continue
                before = self.by_name.get(name)
                self.by_name[name] = gradient.clone() if before is None else before + gradient

    def remove(self) -> None:
        """Leave the graph alone."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def nodes_between(inputs: Collection[Edge], outputs: Iterable[Edge]) -> set[Any]:
    """Return the nodes from which outputs were computed, theirs among them, up to inputs."""
    waiting = list(outputs)
    seen: set[Any] = set()
    while waiting:
        edge = waiting.pop()
        node, _ = edge
        if node is not None and node not in seen and edge not in inputs:
            seen.add(node)
            waiting += node.next_functions
    return seen
