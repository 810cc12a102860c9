"""Named groups of parameters: by default one per transformer block, the embedding and the head.

A group is cut into sections, which are audited one by one, because a changed element drowns in a
long vector: the error of a reduction is relative to the norm of the vector, and grows with its
size. So a section has at most 10 M elements; a parameter that does not fit into the rest of a
section is split by element ranges.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from rankscope.errors import UsageError

MAX_GROUPS = 128
"""More groups than these are merged with their neighbours: each costs 1 kB a step and worker."""

GroupsOption = Literal["blocks", "none"] | Callable[[str], str] | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Groups:
    """Which parameter belongs to which group."""

    # name of each group ``[G]``, in the order in which the model declares them
    names: tuple[str, ...]
    index_of: Mapping[str, int]  # group index by parameter name

    def __len__(self) -> int:
        return len(self.names)


def group_parameters(parameters: Iterable[str], option: GroupsOption = "blocks") -> Groups:
    """Assign parameters, in the model's order, to ``MAX_GROUPS`` groups at most.

    ``"blocks"``: the name up to and including its first number, so ``model.layers.3.mlp.up.weight``
    belongs to ``model.layers.3``; without a number, the module that holds the parameter.
    ``"none"``: all in one group. Of a mapping from name prefixes to groups, the longest prefix
    wins; parameters without one form the group ``other``. Beyond ``MAX_GROUPS``, neighbours are
    merged and named after their first and last.

    Example:
        >>> group_parameters(["embed.weight", "layers.0.up", "layers.0.down", "layers.1.up"]).names
        ('embed', 'layers.0', 'layers.1')
    """
    name_of = _naming(option)
    group_of = {parameter: name_of(parameter) for parameter in parameters}
    names = tuple(dict.fromkeys(group_of.values()))
    size = -(-len(names) // MAX_GROUPS)
    parts = [names[first : first + size] for first in range(0, len(names), size or 1)]
    merged = tuple(p[0] if len(p) == 1 else f"{p[0]} … {p[-1]}" for p in parts)
    position = {name: index // max(size, 1) for index, name in enumerate(names)}
    return Groups(merged, {parameter: position[name] for parameter, name in group_of.items()})


def block_of(parameter: str) -> str:
    """Return the default group of a parameter name."""
    parts = parameter.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or parameter


def _naming(option: GroupsOption) -> Callable[[str], str]:
    if option == "blocks":
        return block_of
    if option == "none":
        return lambda parameter: "all"
    if isinstance(option, Mapping):
        prefixes = sorted(option, key=len, reverse=True)
        return lambda parameter: next(
            (option[prefix] for prefix in prefixes if parameter.startswith(prefix)), "other"
        )
    if callable(option):
        return lambda parameter: str(option(parameter))
    raise UsageError(
        f"groups must be 'blocks', 'none', a function or a mapping of prefixes, got {option!r}"
    )


SECTION_ELEMENTS = 10_000_000
"""Elements in a section, at most."""

MAX_SECTIONS = 1024
"""More sections would cost too much to send; beyond, each section is larger than 10 M elements."""

_ALIGNED = 64  # a range begins at a multiple of this, where sections are long enough


class Range(NamedTuple):
    """Consecutive elements of a parameter, all in one section."""

    section: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Sections:
    """Which elements belong to which section."""

    groups: tuple[str, ...]  # names of the groups ``[G]``
    # index of the group of each section ``[S]``; ascending, and every group has one
    group_of: tuple[int, ...]
    sizes: tuple[int, ...]  # elements in each section ``[S]``
    ranges: Mapping[str, tuple[Range, ...]]  # by parameter, the ranges that make it up, in order

    def __len__(self) -> int:
        return len(self.group_of)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many sections each group has ``[G]``."""
        return tuple(len(list(sections)) for _, sections in groupby(self.group_of))


def cut_sections(
    sizes: Mapping[str, int],
    groups: Groups,
    *,
    section_elements: int = SECTION_ELEMENTS,
) -> Sections:
    """Cut each group into as few sections as possible, of nearly equal sizes.

    ``sizes`` are elements of each parameter, in the model's order. Where ``section_elements`` makes
    more than ``MAX_SECTIONS`` sections, it is doubled until it does not (a single section for each
    group is always allowed).

    Example:
        >>> groups = Groups(("a", "b"), {"a.x": 0, "a.y": 0, "b.z": 1})
        >>> cut = cut_sections({"a.x": 3, "a.y": 5, "b.z": 2}, groups, section_elements=4)
        >>> cut.counts, cut.ranges["a.y"]
        ((2, 1), (Range(section=0, start=0, stop=1), Range(section=1, start=1, stop=5)))
    """
    totals = [0] * len(groups)
    for name, size in sizes.items():
        totals[groups.index_of[name]] += size
    aligned = _ALIGNED if section_elements >= _ALIGNED**2 else 1
    largest = section_elements - (aligned - 1)  # the remainder goes to the next one
    while True:
        counts = [max(1, -(-total // largest)) for total in totals]
        if sum(counts) <= max(MAX_SECTIONS, len(groups)):
            break
        largest *= 2
    first = 0
    group_of = list[int]()
    ranges: dict[str, tuple[Range, ...]] = {}
    for group, (total, count) in enumerate(zip(totals, counts, strict=True)):
        members = {n: s for n, s in sizes.items() if groups.index_of[n] == group}
        ends = [(part + 1) * total // count for part in range(count)]
        ranges |= _cut(members, ends, first, aligned)
        group_of += [group] * count
        first += count
    lengths = [0] * first
    for name in sizes:
        for piece in ranges[name]:
            lengths[piece.section] += piece.stop - piece.start
    return Sections(groups.names, tuple(group_of), tuple(lengths), ranges)


def _cut(
    sizes: Mapping[str, int],  # elements of each parameter of the group
    ends: list[int],  # of sections, in elements of the group
    first: int,  # number of the group's first section
    aligned: int,  # parameters are cut at multiples of this, below where sections end
) -> dict[str, tuple[Range, ...]]:
    """Cut the parameters of one group where its sections end."""
    begin = 0
    part = 0
    ranges = {}
    for name, size in sizes.items():
        pieces = []
        at = 0
        while ends[part] < begin + size and part + 1 < len(ends):
            cut = max(at, (ends[part] - begin) // aligned * aligned)
            if cut > at:
                pieces.append(Range(first + part, at, cut))
            at = cut
            part = part + 1
        if at < size or not pieces:
            pieces.append(Range(first + part, at, size))
        ranges[name] = tuple(pieces)
        begin += size
    return ranges
