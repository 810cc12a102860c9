"""The expected dispersion of gradient norms, against gradients whose dispersion is known."""

import numpy as np
import pytest

from rankscope.core.norm_null import stds_of_norms

SIZE, STEPS = 100, 128
EVEN = np.full(SIZE, SIZE**-0.5)
STEEP = 1 / np.arange(1, SIZE + 1) ** 0.5
STEEP /= np.linalg.norm(STEEP)


def equal(rng, shape):
    return np.ones(shape)


def heavy(rng, shape):
    """Factors with heavy tails: one in a hundred is ten times the middle one, or more."""
    return np.exp(rng.standard_normal(shape))


def draw(workers, micro, *, signal, noise=EVEN, whole=equal, noisy=equal, seed=0):
    """Gradients ``[T, W, M, P]``: a true one and noise, scaled together and the noise alone."""
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(SIZE)
    truth *= signal / np.linalg.norm(truth)
    shape = (STEPS, workers, micro, 1)
    noise = noise * rng.standard_normal((STEPS, workers, micro, SIZE))
    return whole(rng, shape) * (truth + noisy(rng, shape) * noise)


def seen(gradients):
    """Return what a record knows of gradients: norms of micro-batches, of workers, and cosines."""
    local = gradients.mean(axis=2)
    norms = np.linalg.norm(local, axis=2)
    cosines = np.einsum("tip,tjp->tij", local, local) / (norms[:, :, None] * norms[:, None])
    return np.linalg.norm(gradients, axis=3), norms, cosines


def over_expected(gradients):
    micro, norms, cosines = seen(gradients)
    expected = stds_of_norms(micro, norms, cosines)
    return float(np.sqrt(np.mean(norms.var(axis=1)) / np.mean(expected**2)))


@pytest.mark.parametrize(("workers", "micro"), [(4, 4), (8, 2), (8, 8), (16, 4)])
@pytest.mark.parametrize("signal", [0.1, 0.5, 3.0])
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"noise": STEEP},
        {"whole": heavy},
        {"noisy": heavy},
        {"whole": heavy, "noise": STEEP},
    ],
    ids=["even", "steep", "heavy", "heavy noise", "steep and heavy"],
)
def test_healthy_workers_disperse_as_expected(kind, signal, workers, micro):
    ratio = over_expected(draw(workers, micro, signal=signal, **kind))
    assert ratio == pytest.approx(1, abs=0.15)


def test_all_that_varies_may_be_the_length():
    rng = np.random.default_rng(0)
    gradients = heavy(rng, (STEPS, 8, 4, 1)) * EVEN
    assert over_expected(gradients) == pytest.approx(1, abs=0.1)


def test_without_noise_none_is_expected():
    micro, norms, cosines = seen(np.broadcast_to(EVEN, (STEPS, 4, 4, SIZE)))
    assert stds_of_norms(micro, norms, cosines) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("signal", [0.1, 0.5, 3.0])
def test_a_worker_with_a_scaled_loss_is_beyond_what_is_expected(signal):
    gradients = draw(8, 4, signal=signal)
    healthy = stds_of_norms(*seen(gradients))
    gradients[:, 3] *= 1.5
    micro, norms, cosines = seen(gradients)
    assert over_expected(gradients) > 2.5
    faulty = stds_of_norms(micro, norms, cosines)
    assert np.mean(faulty) == pytest.approx(np.mean(healthy), rel=0.1)  # nothing of it is taken in


def test_a_worker_with_other_data_is_beyond_what_is_expected():
    gradients = draw(8, 4, signal=0.3, whole=heavy)
    gradients[:, 5] = 3 * draw(1, 4, signal=0.3, whole=heavy, seed=1)[:, 0]
    assert over_expected(gradients) > 1.4


def test_of_a_fault_in_a_single_step_most_is_left():
    gradients = draw(8, 4, signal=3.0)
    gradients[60, 3] *= 1.5
    micro, norms, cosines = seen(gradients)
    expected = stds_of_norms(micro, norms, cosines)
    assert norms[60].std() > 1.7 * expected[60]
    assert np.median(expected[55:65]) == pytest.approx(norms[:60].std(axis=1).mean(), rel=0.3)


def test_shared_data_do_not_pull_it_to_zero():
    own = draw(8, 4, signal=0.5, whole=heavy)
    shared = np.repeat(own[:, :1], 8, axis=1)
    micro, norms, cosines = seen(shared)
    assert norms.std(axis=1).max() < 1e-12
    alone = stds_of_norms(*seen(own))
    expected = stds_of_norms(micro, norms, cosines)
    assert 0.4 < np.sqrt(np.mean(expected**2) / np.mean(alone**2)) < 1


def test_it_has_the_unit_of_the_norms_also_far_from_one():
    micro, norms, cosines = seen(draw(4, 3, signal=0.5))
    expected = stds_of_norms(micro, norms, cosines)
    for unit in (2.0**-600, 2.0**600):
        scaled = stds_of_norms(unit * micro, unit * norms, cosines)
        assert scaled / unit == pytest.approx(expected, rel=1e-9)


def test_what_is_not_known_is_left_out():
    micro, norms, cosines = seen(draw(4, 3, signal=0.5))
    micro[3, 1, 2], norms[5, 0], cosines[7, 1, 2], micro[9, 0, 0] = np.nan, np.inf, np.nan, 0.0
    cosines[11, 2, 2] = np.nan  # the diagonal is not read
    expected = stds_of_norms(micro, norms, cosines)
    assert np.flatnonzero(np.isnan(expected)).tolist() == [3, 5, 7, 9]
    assert len(stds_of_norms(micro[:0], norms[:0], cosines[:0])) == 0
    for few in (
        (micro[:, :3], norms[:, :3], cosines[:, :3, :3]),
        (micro[:, :, :1], norms, cosines),
    ):
        with pytest.raises(ValueError, match="expected W"):
            stds_of_norms(*few)
