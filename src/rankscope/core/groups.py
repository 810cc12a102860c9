"""Named groups of parameters: by default one per transformer block, the embedding and the head."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rankscope.errors import UsageError

MAX_GROUPS = 128
"""More groups than these are merged with their neighbours: each costs 1 kB a step and worker."""

GroupsOption = Literal["blocks", "none"] | Callable[[str], str] | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Groups:
    """Which parameter belongs to which group.

    Attributes:
        names: Name of each group ``[G]``, in the order in which the model declares them.
        index_of: Group index by parameter name.
    """

    names: tuple[str, ...]
    index_of: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.names)


def group_parameters(parameters: Iterable[str], option: GroupsOption = "blocks") -> Groups:
    """Assign parameters to groups.

    Args:
        parameters: Parameter names, in the model's order.
        option: ``"blocks"``: the name up to and including its first number, so
            ``model.layers.3.mlp.up.weight`` belongs to ``model.layers.3``; without a number, the
            module that holds the parameter. ``"none"``: all in one group. Or a function from
            parameter name to group name, or a mapping from name prefixes to group names (the
            longest prefix wins; parameters without one form the group ``other``).

    Returns:
        At most ``MAX_GROUPS`` groups; beyond, neighbours are merged and named after their first
        and last.

    Raises:
        UsageError: ``option`` is none of these.

    Example:
        >>> group_parameters(["embed.weight", "layers.0.up", "layers.0.down", "layers.1.up"]).names
        ('embed', 'layers.0', 'layers.1')
    """
    name_of = _naming(option)
    group_of = {parameter: name_of(parameter) for parameter in parameters}
    names = tuple(dict.fromkeys(group_of.values()))
    size = -(-len(names) // MAX_GROUPS)
    merged = tuple(_span(names[first : first + size]) for first in range(0, len(names), size or 1))
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


def _span(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
