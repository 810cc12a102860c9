"""Names under which tensors are recorded, where layouts or ranks call one parameter otherwise.

A rule has the name of a parameter in the other layout, and its names in this one, of which there
may be several: this layout has split what the other one has fused, along the first dimension. Each
``*`` in the names stands for any text, the same one in all names of the rule.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rankscope.errors import UnsupportedError
from rankscope.evidence.parity.figures import Part

Rule = tuple[str, Sequence[str]]
"""A name of the other layout, and its names in this one."""


class Portion(NamedTuple):
    """What a tensor of this rank is in the other layout, or among the tensors of all ranks."""

    name: str
    shape: tuple[int, ...]
    first: int  # row at which it begins


class Naming:
    """Names of tensors in the other layout; without rules, their own.

    ``of_ranks`` has the tensors that are others, or parts of others, among those of all ranks: the
    rules hold for what they are there.

    Raises UnsupportedError: parts of a fused parameter are not there, or do not fit together.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        shapes: Mapping[str, tuple[int, ...]],
        of_ranks: Mapping[str, Portion] | None = None,
    ) -> None:
        self._pieces = dict(of_ranks or {})
        wholes = {n: self._pieces.get(n, Portion(n, shape, 0)) for n, shape in shapes.items()}
        whole_shapes = {piece.name: piece.shape for piece in wholes.values()}
        for name, (whole, _, first) in wholes.items():
            for other, own in rules:
                found = next((found for each in own if (found := _match(each, whole))), None)
                if found is not None:
                    piece = _piece(whole, other, own, found, whole_shapes)
                    self._pieces[name] = piece._replace(first=piece.first + first)
                    break

    def of(self, name: str) -> str:
        """Return the name of a tensor in the other layout."""
        piece = self._pieces.get(name)
        return name if piece is None else piece.name

    def shape(self, name: str, own: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the tensor in the other layout."""
        piece = self._pieces.get(name)
        return tuple(own) if piece is None else piece.shape

    def placed(self, name: str, part: Part) -> Part:
        """Return a part of a tensor as one of that in the other layout."""
        piece = self._pieces.get(name)
        if piece is None:
            return part
        if len(part.shape) == len(piece.shape):
            first = (part.first[0] + piece.first, *part.first[1:]) if part.first else ()
            return part._replace(shape=piece.shape, first=first)
        row = math.prod(piece.shape[1:])  # a part of the flat tensor
        return part._replace(
            shape=(math.prod(piece.shape),), first=(part.first[0] + piece.first * row,)
        )


def _match(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch("(.+)".join(map(re.escape, pattern.split("*"))), name)


def _filled(pattern: str, found: re.Match[str]) -> str:
    texts = iter(found.groups())
    return re.sub(r"\*", lambda _: next(texts, "*"), pattern)


def _piece(
    name: str,
    other: str,
    own: Sequence[str],
    found: re.Match[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> Portion:
    names = [_filled(each, found) for each in own]
    missing = [each for each in names if each not in shapes]
    if missing:
        raise UnsupportedError(f"no parameter is called {missing[0]}, a part of {other}")
    of_all = [shapes[each] for each in names]
    if len(names) == 1:
        return Portion(_filled(other, found), of_all[0], 0)
    if not all(of_all) or len({shape[1:] for shape in of_all}) > 1:
        sizes = ", ".join(" × ".join(map(str, shape)) for shape in of_all)
        raise UnsupportedError(f"the parts of {other} do not fit together: {sizes}")
    first = sum(shape[0] for shape in of_all[: names.index(name)])
    shape = (sum(shape[0] for shape in of_all), *of_all[0][1:])
    return Portion(_filled(other, found), shape, first)
