"""The loss of one worker, and its standard error."""

import numpy as np

from rankscope.stats.spread import weighted_means_and_sems


def mean_and_sem(values_U, weights_U) -> tuple[float, float]:
    [mean], [sem] = weighted_means_and_sems(values_U, weights_U, np.array([len(values_U)]))
    return float(mean), float(sem)
