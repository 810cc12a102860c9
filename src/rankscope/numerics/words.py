"""What measured sums mean, in three plain sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

USUAL_WORKERS = 8
"""World size that is spoken of, when it was measured."""

Cell = Mapping[str, Any]


def sentences(sums: Mapping[str, Any]) -> list[str]:
    """Say why two runs differ, whether it matters, and what to do.

    Args:
        sums: The JSON form of measured sums, without its sentences.
    """
    numbers = [world["workers"] for world in sums["worlds"]]
    workers = USUAL_WORKERS if USUAL_WORKERS in numbers else numbers[-1]
    [world] = [world for world in sums["worlds"] if world["workers"] == workers]
    cells = [c for c in sums["cells"] if c["workers"] == workers and c["algorithm"] == "ring"]
    return [_why(cells), _whether(cells, world), _what(cells)]


def size(value: float | None) -> str:
    """Return a relative size in a few characters: ``2e-08``, ``0.4 %`` or ``61 %``."""
    if value is None:
        return "?"
    if value == 0:
        return "0"
    if value < 1e-3:
        return f"{value:.0e}"
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 9.5 else f"{percent:.1g} %"


def types(cell: Cell) -> str:
    """Return the types of a reduction in words: ``bfloat16 added in float32``."""
    inputs, sums = str(cell["inputs"]), str(cell["sums"])
    return inputs if inputs == sums else f"{inputs} added in {sums}"


def _why(cells: Sequence[Cell]) -> str:
    cell = next((cell for cell in cells if cell["distinct_results"] > 1), cells[0])
    orders = f"{'all ' if cell['all_orders'] else ''}{cell['num_orders']} orders"
    if cell["distinct_results"] == 1:
        return (
            f"Why two runs differ: not because of the order of these sums; the same "
            f"{cell['workers']} gradients gave the same bits in {orders}."
        )
    return (
        f"Why two runs differ: the same {cell['workers']} gradients, added up around a ring in "
        f"{orders} ({types(cell)}), came back as {cell['distinct_results']} different results, "
        f"and {100 * cell['share_differing']:.1f} % of the elements depend on the order."
    )


def _whether(cells: Sequence[Cell], world: Mapping[str, Any]) -> str:
    differing = [cell for cell in cells if cell["difference_relative"]]
    same = [types(cell) for cell in cells if cell["difference_relative"] == 0]
    parts = [f"by {size(cell['difference_relative'])} in {types(cell)}" for cell in differing]
    if same:
        parts.append(f"not at all in {' and '.join(same)}")
    text = f"Does it matter: two orders differ {', '.join(parts)} (of the gradient's length)"
    noise = world["noise_relative"]
    largest = max((cell["difference_relative"] for cell in differing), default=0.0)
    if not noise or not differing:
        return f"{text}."
    verdict = (
        f"other samples of the same data would move it by {size(noise)}, so no step is worse for "
        "it, but the weights part from the first differing bit on"
        if largest < noise / 10
        else f"other samples of the same data would move it by {size(noise)}, so the coarsest of "
        "these sums adds a noise that is not small beside that of the data"
    )
    return f"{text}; {verdict}."


def _what(cells: Sequence[Cell]) -> str:
    text = (
        "What to do: fix the order of the sum (rankscope.fixed_order) or make the sum independent "
        "of it (rankscope.order_free) where the same bits are needed, and let rankscope diff tell "
        "rounding from a bug where they are not"
    )
    for cell in cells:
        wide = [c for c in cells if c["inputs"] == cell["inputs"] and c["sums"] == "float32"]
        if cell["sums"] == "float32" or not wide:
            continue
        coarse, fine = cell["error_relative"], wide[0]["error_relative"]
        if coarse is not None and fine is not None and coarse > 1.2 * fine:
            return (
                f"{text}; with {cell['inputs']} gradients keep partial sums in float32, which "
                f"brings the error from {size(coarse)} down to {size(fine)}."
            )
    return f"{text}."
