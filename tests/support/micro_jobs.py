"""Simulated jobs that accumulate over micro-batches, with gradients whose noise is known."""

import math
from dataclasses import replace

import numpy as np

from rankscope.bus.step import GatheredStep
from rankscope.stats.spread import weighted_means_and_sems
from support.streams import gathered

SIZE = 60
TRUTH = np.full(SIZE, 0.1)


def lists(values):
    return tuple(np.asarray(worker, float) for worker in values)


def mean_and_sem(values_U, weights_U) -> tuple[float, float]:
    """Return the loss of one worker, and its standard error."""
    [mean], [sem] = weighted_means_and_sems(values_U, weights_U, np.array([len(values_U)]))
    return float(mean), float(sem)


def micro_step(t, losses, *, gradients=None, weights=None, samples=None, **columns) -> GatheredStep:
    """Return a step with these losses of micro-batches ``[W, M]``, and gradients ``[W, M, P]``."""
    losses = lists(losses)
    weights = lists(np.full(len(worker), 50.0) if weights is None else weights for worker in losses)
    pairs = [mean_and_sem(v, w) for v, w in zip(losses, weights, strict=True)]
    columns = {"loss": [m for m, _ in pairs], "loss_sem": [s for _, s in pairs], **columns}
    norms = ()
    if gradients is not None:
        local = gradients.mean(axis=1)
        norms = lists(np.linalg.norm(gradients, axis=2))
        columns["grad_norm"] = np.linalg.norm(local, axis=1)
        columns["reduced_norm"] = np.full(len(losses), np.linalg.norm(local.mean(axis=0)))
    samples = [np.empty(0, np.int64)] * len(losses) if samples is None else samples
    step = gathered(t, samples, **columns)
    return replace(
        step,
        observed=gradients is not None,
        reduced_copies=len(losses),
        micro_losses=losses,
        micro_weights=weights,
        micro_norms=norms,
        micro_scales=lists(np.full(len(worker), 1 / len(worker)) for worker in losses),
    )


class Job:
    """Workers that draw units at random; what goes wrong is a parameter."""

    def __init__(
        self, seed=0, *, workers=8, micro=4, shared=0.0, kinds=0.0, gradients=False, named=False
    ):
        self.rng = np.random.default_rng(seed)
        self.shape = workers, micro
        self.shared, self.gradients, self.named = shared, gradients, named
        self.offsets_W = kinds * self.rng.standard_normal(workers)

    def step(self, t):
        workers, micro = self.shape
        own = self.mix(self.rng.standard_normal((workers, micro)))
        losses = 3 + math.exp(-t / 100) + 0.3 * (own + self.offsets_W[:, None])
        gradients = samples = None
        if self.gradients:
            noise = self.mix(self.rng.standard_normal((workers, micro, SIZE)))
            gradients = TRUTH + noise * (1 + 0.3 * self.offsets_W[:, None, None])
        columns = {}
        if self.named:
            samples = np.arange(t * workers, (t + 1) * workers).reshape(workers, 1)
            columns["batch_digest"] = samples[:, 0]
        return micro_step(t, losses, gradients=gradients, samples=samples, **columns)

    def mix(self, draws):
        return np.sqrt(1 - self.shared**2) * draws + self.shared * draws[:1]
