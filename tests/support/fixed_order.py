"""Sums in rank order, taken by numpy: what a reduction in fixed order has to give."""

import numpy as np

from rankscope.stats.rounding import round_to_bfloat16


def in_order(local_WP: np.ndarray, divisor: float | None = None) -> np.ndarray:
    """Add up the workers' gradients in fp32, and divide by W or by something else."""
    total_P = local_WP[0].astype(np.float32)
    for row_P in local_WP[1:]:
        total_P = total_P + row_P.astype(np.float32)
    return total_P / np.float32(divisor or len(local_WP))


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round once to a type of 16 bits, if one is named; the result is fp32 again."""
    if dtype == "bf16":
        return round_to_bfloat16(values).astype(np.float32)
    return values.astype(np.float16).astype(np.float32) if dtype == "fp16" else values
