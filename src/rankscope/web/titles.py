"""What stands above each figure: its title and its unit, on pages and in PNG files alike."""

from collections.abc import Mapping
from typing import Any

TOKENS = "nats per token"

TITLES: dict[str, tuple[str, str]] = {
    "timeline": ("Findings over the steps", ""),
    "loss": ("Averaged loss over the range of the workers", TOKENS),
    "loss_std": ("Loss dispersion", f"std over workers, {TOKENS}"),
    "grad_norm_std": ("Gradient-norm dispersion", "std over workers"),
    "cosine_mean": ("Gradient-direction consistency", "mean cosine over pairs"),
    "map-loss": ("Local loss", TOKENS),
    "map-grad_norm": ("Gradient norm", "L2, before the reduction"),
    "map-cosine_rest": ("Direction", "cosine with the sum of all others"),
    "map-step_seconds": ("Step time", "seconds since the step before"),
    "workers-loss": ("Local loss", TOKENS),
    "workers-grad_norm": ("Gradient norm", "L2, before the reduction"),
    "workers-cosine_rest": ("Direction", "cosine with the sum of all others"),
    "apart-loss": ("Loss, apart from the mean", TOKENS),
    "apart-grad_norm": ("Norm, apart from the mean", ""),
    "apart-cosine_rest": ("Direction, apart from the mean", "cosine"),
    "group-norm": ("Gradient norm of each group", ""),
    "group-cosine": ("Direction of each group", ""),
    "heatmap": ("Cosine of each pair of workers", "mean over the run"),
    "coverage": ("Different samples so far", ""),
    "residual": ("Reduction residual", "relative, logarithmic"),
    "time": ("Time per step", "ms, slowest worker, logarithmic"),
    "interval": ("Steps between measurements", "chosen to stay in the budget"),
    "compare-loss": ("Averaged loss over the range of the workers", TOKENS),
    "compare-loss_std": ("Loss dispersion", f"std over workers, {TOKENS}"),
    "compare-grad_norm_std": ("Gradient-norm dispersion", "std over workers"),
    "compare-cosine_mean": ("Gradient-direction consistency", "mean cosine over pairs"),
}
"""Title and unit by the figure's name."""

_TITLES_WITHOUT_TOKENS = {
    name: (title, unit.replace(TOKENS, "").removesuffix(", "))
    for name, (title, unit) in TITLES.items()
}


def titles_of(values: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
    """Return titles and units of a run's figures, given the values of its assessment."""
    return TITLES if values.get("loss_per_token") else _TITLES_WITHOUT_TOKENS
