"""Dispersion against sampling, and the gradient noise scale, in words."""

import math
from collections.abc import Callable, Mapping
from typing import Any

Values = dict[str, float | int | None]
"""The numbers of an assessment by name; None where one is undefined."""


def describe_dispersion(values: Values) -> str:
    """Describe the loss dispersion compared with that of sampling, if known."""
    figures = dispersion_figures(values)
    if values["num_workers"] == 1 or values["loss_std"] is None:
        return ""
    if figures is None:
        return (
            "How much dispersion sampling alone would give cannot be known: each worker reported "
            "one loss per step. One loss per sample, or several micro-batches, would show it."
        )
    observed, ratio, expected = figures
    band = _band(values)
    meaning = {
        "about": f"within the {1 / band:.2f} to {band:.2f} that different samples of the same data "
        "may give in so many steps",
        "further": "more than sampling gives: the workers' data, or their state, differ in kind",
        "closer": "less than different samples would give: the workers share data",
    }[spread_in_words(values) or "about"]
    return (
        f"Sampling alone would give a loss std of {expected}; the observed one, {observed}, is "
        f"{ratio} times that{_interval(values, 'dispersion_ratio')}, {meaning}."
    )


def dispersion_figures(values: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the loss std, its ratio to the std by sampling, and the latter, as printed.

    They are rounded so that they divide. The ratio is one of root mean squares over steps, and the
    std a mean over steps; the std by sampling follows from both. None where it is unknown.
    """
    observed = values.get("loss_std")
    ratio = values.get("dispersion_ratio")
    if observed is None or ratio is None:
        return None
    whole = observed / ratio if observed and ratio else values.get("loss_std_expected")
    if not whole or not math.isfinite(whole):
        return None
    texts = short(observed), short(whole)
    shown, expected = (float(text.replace(",", "")) for text in texts)
    return texts[0], f"{shown / expected:.2f}", texts[1]


def describe_gradients(values: Values) -> str:
    """Describe the dispersion of gradients compared with that of micro-batches, if known."""
    ratio = values["gradient_ratio"]
    if ratio is None:
        return ""
    return (
        f"Gradients differ between workers {ratio:.2f} times as much as their micro-batches "
        f"explain{_interval(values, 'gradient_ratio')}."
    )


def describe_noise_scale(values: Values, causes: set[str]) -> str:
    """Describe the gradient noise scale; empty where workers share data."""
    scale = values["noise_scale"]
    low = values["noise_scale_low"]
    batch = values["noise_scale_batch"]
    if batch is None or "data.duplicate_batches" in causes or low is None:
        return ""
    from_micro = values["noise_scale_from_micro"]
    unit = "micro-batches" if from_micro else "workers"
    unit = "samples" if values["noise_scale_in_samples"] else unit
    if scale is None or values["noise_scale_high"] is None:
        size = f"at least {short(low)} {unit} (95 % confidence)"
    else:
        size = f"about {short(scale)} {unit}{_interval(values, 'noise_scale', short)}"
    text = (
        f"The gradient noise scale is {size}, where noise and gradient are equally long; a step "
        f"averages {short(batch)}"
    )
    if not from_micro:
        text += (
            ". Without micro-batches it follows from local and reduced norms alone: it is the "
            "weighted cosine in other words, and cannot separate shared data from quiet gradients"
        )
    return f"{text}."


def _interval(
    values: Values, name: str, show: Callable[[float | None], str] = lambda end: f"{end:.2f}"
) -> str:
    low = values[f"{name}_low"]
    high = values[f"{name}_high"]
    if low is None or high is None:
        return ""
    return f" (95 % interval {show(low)} to {show(high)})"


def spread_in_words(values: Values) -> str | None:
    """Return whether losses lie ``closer``, ``about`` or ``further`` apart than by sampling.

    The band around 1 is 40 % plus three standard errors of the ratio for normal losses, since short
    runs and few workers measure it badly.
    """
    ratio = values["dispersion_ratio"]
    if ratio is None:
        return None
    band = _band(values)
    if ratio > band:
        return "further"
    return "closer" if ratio < 1 / band else "about"


def _band(values: Values) -> float:
    degrees = (values["steps"] or 0) * max((values["num_workers"] or 0) - 1, 1)
    return 1.4 + 3 / math.sqrt(2 * degrees)


def short(value: float | None) -> str:
    """Return a number with three significant digits, if possible without an exponent."""
    if value is None:
        return "an unknown amount"
    if value == 0:
        return "0"
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"
