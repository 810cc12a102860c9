"""Undoing what losses were multiplied by, against gradients of the loss as it is."""

import numpy as np
import pytest

from rankscope.bus.step import GatheredStep
from rankscope.bus.steps import undo_common_scale
from support.streams import worker_columns

W, K, G, NARROW = 4, 50, 3, 7
FLOAT32 = 2.0**-22


def seen_by_hooks(factors_WM):
    """Return a step of W workers whose losses were multiplied by these factors, and its truth.

    Vectors stand for gradients, and stand for their own sketches too. The truth is the gradient
    of the mean over micro-batches of the losses as they are.
    """
    rng = np.random.default_rng(0)
    factors_WM = np.asarray(factors_WM, float)
    num_micro = factors_WM.shape[1]
    micro_WMK = rng.standard_normal((W, num_micro, K)) + rng.standard_normal(K)
    true_WK = micro_WMK.mean(axis=1)
    local_WK = np.einsum("wm,wmk->wk", factors_WM, micro_WMK)
    narrow_WGN = rng.standard_normal((W, G, NARROW))
    scales_W = factors_WM.sum(axis=1)
    workers = worker_columns(W) | {
        "loss": np.arange(1.0, 1 + W),
        "loss_weight": np.full(W, 9.0),
        "grad_scale": scales_W,
        "grad_norm": np.linalg.norm(local_WK, axis=1),
        "grad_max": np.abs(local_WK).max(axis=1),
        "reduced_norm": np.full(W, np.linalg.norm(local_WK.mean(axis=0))),
        "grad_nonfinite": np.full(W, 0),
        "lr": np.full(W, 0.1),
    }
    own_norms_WM = np.linalg.norm(factors_WM[:, :, None] * micro_WMK, axis=2)
    step = GatheredStep(
        step=0,
        time=0.0,
        observed=True,
        workers=workers,
        sketches_WK=local_WK.astype(np.float32),
        samples=tuple(np.arange(3) for _ in range(W)),
        micro_losses=tuple(np.ones(num_micro) for _ in range(W)),
        micro_weights=tuple(np.ones(num_micro) for _ in range(W)),
        micro_norms=tuple(own_norms_WM) if num_micro > 1 else (np.empty(0),) * W,
        groups=tuple(f"layers.{group}" for group in range(G)),
        group_norms_WG=np.linalg.norm(narrow_WGN, axis=2) * np.abs(scales_W)[:, None],
        group_sketches_WGK=(narrow_WGN * scales_W[:, None, None]).astype(np.float32),
        reduced_products_W=local_WK @ local_WK.mean(axis=0),
        residuals_WG=np.full((W, G), 0.1),
        total_residuals_W=np.full(W, 0.1),
        reduced_copies=W,
    )
    return step, true_WK, micro_WMK, narrow_WGN


ALIKE = {
    "a scaler": [[65536.0]] * W,
    "a scaler and accumulation": [[65536.0 / 3] * 3] * W,
    "accumulation, divided by 2": [[0.5, 0.5]] * W,
    "accumulation, divided by 3": [[1 / 3] * 3] * W,
    "accumulation, not divided": [[1.0] * 4] * W,
    "a negative factor": [[-8.0]] * W,
}


@pytest.mark.parametrize("factors", ALIKE.values(), ids=ALIKE.keys())
def test_gradients_are_those_of_the_loss_as_it_is(factors):
    step, true_WK, micro_WMK, narrow_WGN = seen_by_hooks(factors)
    sign = np.sign(factors[0][0])
    undone = undo_common_scale(step)
    norms_W = np.linalg.norm(true_WK, axis=1)
    mean_K = true_WK.mean(axis=0)
    np.testing.assert_allclose(undone.workers["grad_norm"], norms_W, rtol=1e-12)
    np.testing.assert_allclose(undone.workers["grad_max"], np.abs(true_WK).max(axis=1), rtol=1e-12)
    np.testing.assert_allclose(undone.workers["reduced_norm"], np.linalg.norm(mean_K), rtol=1e-12)
    np.testing.assert_allclose(undone.sketches_WK, sign * true_WK, rtol=FLOAT32)
    np.testing.assert_allclose(undone.reduced_products_W, true_WK @ mean_K, rtol=1e-9)
    np.testing.assert_allclose(undone.group_sketches_WGK, sign * narrow_WGN, rtol=FLOAT32)
    np.testing.assert_allclose(
        undone.group_norms_WG, np.linalg.norm(narrow_WGN, axis=2), rtol=1e-12
    )
    if len(factors[0]) > 1:
        np.testing.assert_allclose(
            undone.micro_norms, np.linalg.norm(micro_WMK, axis=2), rtol=1e-12
        )
    else:
        assert [len(norms) for norms in undone.micro_norms] == [0] * W
