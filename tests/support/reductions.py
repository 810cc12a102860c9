"""Simulated gradients, reduced in some type or corrupted, and how the audit sees them."""

from dataclasses import replace

import numpy as np

from rankscope.bus.step import StepReport
from rankscope.evidence.reduction.audit import ReductionAudit
from rankscope.stats.direction import gram, leave_one_out
from rankscope.stats.rounding import round_to_bfloat16
from support.stepping import describe, evidence_of
from support.streams import gathered as unobserved

SIZES = {"embed": 600, "blocks.0": 300, "blocks.1": 300, "norm": 32}
FLOOR = 4e-7  # what sketches of large sections leave


def to_type(values, dtype):
    return round_to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)


def reduced(gradients_WP, dtype="float32"):
    total = np.zeros(gradients_WP.shape[1], np.float32)
    for gradient in gradients_WP:
        total = to_type(total + to_type(gradient, dtype), dtype).astype(np.float32)
    return to_type(total / len(gradients_WP), dtype).astype(np.float32)


def gradients(rng, num_workers, sizes, scale=1.0, common=0.3):
    return {
        name: (
            scale * (rng.standard_normal((num_workers, n)) + common * rng.standard_normal(n))
        ).astype(np.float32)
        for name, n in sizes.items()
    }


def audited(step, local, results_W, rng, floor=FLOOR, **columns):
    """Return a step's record: W results of each group, against the mean in float64."""
    norms, cosines, residuals = [], [], []
    for name, own in local.items():
        own_WP = own.astype(np.float64)
        mean_P = own_WP.mean(axis=0)
        norms.append(np.linalg.norm(own_WP, axis=1))
        cosines.append(leave_one_out(gram(own_WP)))
        distances = [np.linalg.norm(result[name] - mean_P) for result in results_W]
        lengths = [np.linalg.norm(result[name].astype(np.float64)) for result in results_W]
        noise = floor * np.linalg.norm(own_WP) / len(own_WP) * np.exp(0.02 * rng.standard_normal())
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.hypot(distances, noise) / lengths
        each[np.array(lengths) == 0] = 0.0
        residuals.append(np.where(np.isfinite(each), each, np.nan))
    num_workers = len(results_W)
    one = replace(
        unobserved(step, [[]] * num_workers, **columns),
        observed=True,
        groups=tuple(local),
        group_norms_WG=np.stack(norms, axis=1),
        residuals_WG=np.stack(residuals, axis=1),
    )
    values = {"reduction_residual": float(np.nanmax(residuals))}
    return StepReport(one, values, group_cosine_rest_WG=np.stack(cosines, axis=1))


def watch(num_steps, make, num_workers=4, reduced_in=None, detector=None, seed=0):
    """Return the evidence, the last of each kind, of steps ``make(t, rng)``: gradients, results."""
    rng = np.random.default_rng(seed)
    detector = detector or ReductionAudit(num_workers, reduced_in)
    told = {}
    for t in range(num_steps):
        local, results_W = make(t, rng)
        for evidence in evidence_of(detector, audited(t, local, results_W, rng)):
            describe(evidence)
            told.setdefault(evidence.key, []).append((t, evidence))
    for evidence in detector.close():
        told.setdefault(evidence.key, []).append((num_steps, evidence))
    return told


def healthy(num_workers=4, dtype="float32", sizes=SIZES, **kinds):
    def make(t, rng):
        local = gradients(rng, num_workers, sizes, **kinds)
        result = {name: reduced(own, dtype) for name, own in local.items()}
        return local, [result] * num_workers

    return make


def flipped(values, rng, bit):
    """Flip a bit of one element whose magnitude is among the largest 1 %."""
    values = values.copy()
    largest = np.argsort(np.abs(values))[-max(len(values) // 100, 1) :]
    values.view(np.uint32)[rng.choice(largest)] ^= np.uint32(1 << bit)
    return values
