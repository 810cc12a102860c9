"""How much sums of gradients differ between orders, types and world sizes, and from the truth.

:func:`measure` takes the local gradients of W workers and returns plain JSON values, which the
figures and the command read (numbers that are undefined or not finite are None; W workers,
"relative" always in Euclidean norm over all elements)::

    {
      "kind": "sums",
      "source": {                     where the gradients are from
        "kind": "recorded" | "synthetic" | "file",
        "name": str,                  such as "built-in model, step 0", "normal", "gradients.npz"
        "num_gradients": int,         gradients that were given (before more were made)
        "num_elements": int,          elements of one gradient
        "num_measured": int           elements that took part (all, or a sample by layer)
      },
      "options": {
        "workers": [int], "orders": int, "types": [str], "seed": int,
        "divide": "before" | "after"  by W before the sum (as DDP does) or after it
      },
      "notes": [str],                 sentences: what was sampled, what was made up
      "reference": {                  how far float64, the reference, is from correctly rounded
        "num_exact": int,             elements that were summed exactly
        "relative": float,            error of float64 there, relative
        "ulp": float                  the largest, in units in the last place of float64
      },
      "worlds": [{                    one per world size, rising
        "workers": int,
        "made_up": int,               how many of the W gradients were made up from the given ones
        "cosine": float,              mean over pairs of workers
        "cancellation": float,        median over elements of sum |x| / |sum x|
        "noise_relative": float       standard error of the mean over workers, relative: how far
                                      other samples of the same data would move it
      }],
      "cells": [{                     one per world size, type and algorithm
        "workers": int,
        "inputs": "float32" | "bfloat16" | "float16",   type of the buffer
        "sums": "float32" | "bfloat16" | "float16",     type of partial sums
        "result": str,                type of the mean that comes back: that of the buffer
        "algorithm": "sequential" | "ring" | "tree" | "halving" | "arrival",
        "num_orders": int,            orders that were tried
        "all_orders": bool,           whether these are all that there are
        "distinct_results": int,      different buffers that came back, of num_orders
        "distinct_per_element": {"mean": float, "largest": int},
        "share_differing": float,     share of elements whose bits depend on the order
        "share_not_finite": float,    share of elements that overflowed in some order (float16);
                                      they are left out of what follows
        "spread_ulp": ULPS,           highest minus lowest result, in units
                                      in the last place of the result's type, over elements
        "spread_relative": float,     norm of (highest - lowest), over the norm of the mean
        "difference_relative": float, typical distance of two orders' results, relative (root mean
                                      square over pairs of orders)
        "error_relative": float,      distance from float64, relative; root mean square over orders
        "error_ulp": ULPS,            over elements, first order tried, in units in the last place
                                      of the result's type
        "predicted_relative": float,  what rounding is expected to give
        "bound_relative": float       what rounding can give at worst (first order)
      }],
      "layers": [{                    one per layer, type and algorithm, at the largest world size
        "layer": str, "num_elements": int, "workers": int,
        "inputs": str, "sums": str, "result": str, "algorithm": str,
        "error_relative": float, "error_ulp": ULPS,
        "predicted_relative": float, "bound_relative": float, "cosine": float
      }],
      "sentences": [str]              three: why two runs differ, whether it matters, what to do
    }

ULPS is ``{"median": float, "p99": float, "largest": float}`` over elements (99 % of them have at
most ``p99``; the largest is that of an element whose gradients cancel almost entirely).

The order of a cell's algorithm is a permutation of the workers (which place in the chain, ring or
tree each of them has); for ``arrival`` it is one permutation for each bucket.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rankscope.files import to_plain
from rankscope.lab.numerics.case import (
    Case,
    Sample,
    SumOptions,
    Values,
    describe_world,
    draw_sample,
)
from rankscope.lab.numerics.gradients import LocalGradients, for_workers
from rankscope.lab.numerics.summation import Scheme, check_reference

__all__ = ["SumOptions", "measure"]


FAR_BEYOND = 3
"""An error so many times what rounding predicts has another reason."""


def measure(
    gradients: LocalGradients,
    options: SumOptions | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Add the gradients up in many ways, and compare the results.

    Args:
        gradients: Local gradients of at least 2 workers.
        options: What to measure.
        progress: Called with the name of the present part, the parts done, and their number.
    """
    options = options or SumOptions()
    sample = draw_sample(gradients, options)
    worlds: list[Values] = []
    cells: list[Values] = []
    layers: list[Values] = []
    arithmetics = list(options.arithmetics)
    todo = [(W, kind) for W in options.workers for kind in arithmetics]
    for done, (num_workers, arithmetic) in enumerate(todo):
        if progress:
            progress(f"sums over {num_workers} workers", done, len(todo))
        if arithmetic is arithmetics[0]:
            values_WN, made_up = for_workers(
                sample.values_WN, num_workers, np.random.default_rng([options.seed, num_workers])
            )
            worlds.append(describe_world(values_WN, made_up, sample))
        case = Case(values_WN, arithmetic, sample, options)
        for scheme in Scheme:
            cells.append(case.cell(scheme))
            if num_workers == options.workers[-1]:
                layers += case.layers(scheme)
    if progress:
        progress("sums", len(todo), len(todo))
    chosen = asdict(options)
    del chosen["max_elements"]
    sums: dict[str, Any] = to_plain(
        {
            "kind": "sums",
            "source": {
                "kind": gradients.kind,
                "name": gradients.name,
                "num_gradients": gradients.num_workers,
                "num_elements": gradients.num_elements,
                "num_measured": sample.values_WN.shape[1],
            },
            "options": chosen,
            "notes": [*_notes(gradients, sample, worlds), *_limits_of_float16(cells, layers)],
            "reference": check_reference(values_WN),
            "worlds": worlds,
            "cells": cells,
            "layers": layers,
        }
    )
    return {**sums, "sentences": sentences(sums)}


def _notes(gradients: LocalGradients, sample: Sample, worlds: Sequence[Values]) -> Iterator[str]:
    count = sample.values_WN.shape[1]
    total = sample.num_total
    if count < total:
        yield f"{count:,} of {total:,} elements were measured, sampled evenly within each layer."
    made_up = [str(world["workers"]) for world in worlds if world["made_up"]]
    if made_up:
        yield (
            f"There are gradients of {gradients.num_workers} workers; for {', '.join(made_up)} "
            "workers the missing ones were made up, with the norm and the cosines of the given "
            "ones: their mean, less what chance adds to it, plus a random mixture of their "
            "deviations from it."
        )


def _limits_of_float16(cells: Sequence[Values], layers: Sequence[Values]) -> Iterator[str]:
    """Report where float16 has too few small or large numbers."""
    lost = {
        layer["layer"]: layer["error_relative"]
        for layer in layers
        if layer["inputs"] == "float16"
        and layer["error_relative"] > FAR_BEYOND * layer["predicted_relative"]
    }
    if lost:
        shown = ", ".join(list(lost)[:3]) + (", …" if len(lost) > 3 else "")
        yield (
            f"float16 is too coarse for the smallest gradients, of {shown}: their error is up to "
            f"{max(lost.values()):.0e}, more than {FAR_BEYOND} times that of rounding, because its "
            "smallest positive number is 6e-08; scale the loss, or use bfloat16."
        )
    if any(cell["share_not_finite"] for cell in cells):
        share = max(cell["share_not_finite"] for cell in cells)
        yield (
            f"Up to {100 * share:.2g} % of the sums overflowed in float16, whose largest number is "
            "65,504; they are left out of its errors."
        )


USUAL_WORKERS = 8
"""World size that sentences are about, when it was measured."""


def sentences(sums: Values) -> list[str]:
    """Return why two runs differ, whether it matters, and what to do, from measured sums."""
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


def types(cell: Values) -> str:
    """Return the types of a reduction in words: ``bfloat16 added in float32``."""
    inputs = str(cell["inputs"])
    sums = str(cell["sums"])
    return inputs if inputs == sums else f"{inputs} added in {sums}"


def _why(cells: Sequence[Values]) -> str:
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


def _whether(cells: Sequence[Values], world: Values) -> str:
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


def _what(cells: Sequence[Values]) -> str:
    text = (
        "What to do: fix the order of the sum (rankscope.fixed_order) or make the sum independent "
        "of it (rankscope.order_free) where the same bits are needed, and let rankscope diff tell "
        "rounding from a bug where they are not"
    )
    for cell in cells:
        wide = [c for c in cells if c["inputs"] == cell["inputs"] and c["sums"] == "float32"]
        if cell["sums"] == "float32" or not wide:
            continue
        coarse = cell["error_relative"]
        fine = wide[0]["error_relative"]
        if coarse is not None and fine is not None and coarse > 1.2 * fine:
            return (
                f"{text}; with {cell['inputs']} gradients keep partial sums in float32, which "
                f"brings the error from {size(coarse)} down to {size(fine)}."
            )
    return f"{text}."
