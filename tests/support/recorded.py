"""What real ranks record of their gradients, held against the truth in float64."""

from dataclasses import dataclass

import numpy as np

from rankscope.bus.evidence import Table

WIDTH = 1021
SKETCH_NORM_ERROR = (2 / WIDTH) ** 0.5
"""Standard deviation of a squared norm that comes from a sketch, relative."""


@dataclass(frozen=True)
class Truth:
    """One worker's step, computed on a copy of the model that nothing wraps."""

    gradient: dict[str, np.ndarray]  # float64 by parameter, averaged over micro-batches
    micro_norms: list[float]  # of each micro-batch's own gradient
    loss: float = float("nan")  # mean over micro-batches, whatever their tokens
    tokens: int = 0  # label tokens in all micro-batches

    @property
    def whole(self):
        return np.concatenate(list(self.gradient.values()))

    @property
    def norm(self):
        return float(np.linalg.norm(self.whole))

    @property
    def largest(self):
        return float(np.abs(self.whole).max())


class Recorded:
    """A run and its truth, over steps and workers: columns are [T] or [T, W], gradients [W, P]."""

    def __init__(self, run, truths_WT):
        self.run = run
        self.truths = truths_WT
        self.num_steps, self.num_workers = len(truths_WT[0]), len(truths_WT)
        self.steps = np.flatnonzero(self.column("observed"))
        self.overflowed_TW = np.zeros((self.num_steps, self.num_workers), bool)

    def column(self, name):
        return self.run.columns(Table.STEPS, name)[name]

    def per_worker(self, name):
        return self.run.per_worker(name)[1]

    def truth(self, name):
        return np.array([[getattr(one, name) for one in of_worker] for of_worker in self.truths]).T

    def gradients(self, step):
        return np.array([of_worker[step].whole for of_worker in self.truths])

    def fine_steps(self):
        return [step for step in self.steps.tolist() if not self.overflowed_TW[step].any()]

    def check_norms(self, rtol=1e-6):
        fine = ~self.overflowed_TW[self.steps]
        for column, name in {"grad_norm": "norm", "grad_max": "largest"}.items():
            found, exact = self.per_worker(column)[self.steps], self.truth(name)[self.steps]
            assert not np.isfinite(found[~fine]).any()
            if name == "norm" or not self.per_worker("grad_norm_estimated").any():
                np.testing.assert_allclose(found[fine], exact[fine], rtol=rtol)

    def check_groups(self, rtol=1e-6):
        names = {name: group_of(name) for name in self.truths[0][0].gradient}
        rows = self.run.columns(Table.GROUPS, "step", "rank", "group", "grad_norm")
        assert set(rows["group"]) == set(names.values())
        for step, rank, group, norm in zip(*rows.values(), strict=True):
            if not self.overflowed_TW[step, rank]:
                gradient = self.truths[rank][step].gradient
                parts = [vector for name, vector in gradient.items() if names[name] == group]
                np.testing.assert_allclose(norm, np.linalg.norm(np.concatenate(parts)), rtol=rtol)

    def check_reduced(self, rtol, *, sketched=True):
        expected = [np.linalg.norm(self.gradients(step).mean(axis=0)) for step in self.steps]
        found = self.column("grad_norm_reduced")[self.steps]
        np.testing.assert_allclose(found, expected, rtol=rtol)
        residuals = self.column("reduction_residual")[self.steps]
        assert (residuals < rtol).all() if sketched else np.isnan(residuals).all()

    def check_micro_norms(self, first=1e-6, others=4 * SKETCH_NORM_ERROR):
        """Hold norms of micro-batches against the truth, within relative errors."""
        rows = self.run.columns(Table.MICRO, "step", "rank", "micro", "grad_norm")
        for step, rank, micro, norm in zip(*rows.values(), strict=True):
            if step in self.steps and not self.overflowed_TW[step, rank]:
                exact = self.truths[rank][step].micro_norms[micro]
                np.testing.assert_allclose(norm, exact, rtol=others if micro else first)

    def weighted_cosine(self, step):
        """Return the cosine over all pairs, each with the product of its norms as its weight."""
        gram = self.gradients(step) @ self.gradients(step).T
        norms = np.sqrt(gram.diagonal())
        upper = np.triu_indices(self.num_workers, 1)
        return float(gram[upper].sum() / np.outer(norms, norms)[upper].sum())

    def cosine_errors(self):
        """Return the errors of all pairs in the fine steps ``[T, pairs]``."""
        _, cosines_TWW = self.run.cosines()
        upper = np.triu_indices(self.num_workers, 1)
        errors = []
        for step in self.fine_steps():
            row = self.steps.tolist().index(step)
            errors.append((cosines_TWW[row] - cosines(self.gradients(step)))[upper])
        return np.array(errors)


def group_of(parameter):
    parts = parameter.split(".")
    return ".".join(parts[: 2 if parts[0] in ("blocks", "layers") else 1])


def cosines(gradients_WP):
    units = gradients_WP / np.linalg.norm(gradients_WP, axis=1)[:, None]
    return units @ units.T
