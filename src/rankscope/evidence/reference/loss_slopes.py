"""Directional derivatives of a loss that exchanges tensors, by the outputs of the model."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.cost import check_room
from rankscope.evidence.reference.derivative import gather, move_lengths, random_signs
from rankscope.evidence.reference.loss_tape import NOT_REPEATED, SAME_LOSS
from rankscope.evidence.reference.micro_batch import MicroBatch
from rankscope.evidence.reference.slopes import LENGTHS, Slopes
from rankscope.gradients.digest import digest_tensor

LABEL = "the outputs of the model"


def why_not_moved(micro: MicroBatch, device: torch.device) -> str:
    """Return why the loss of a micro-batch cannot be run again; empty if it can."""
    tape = micro.tape
    assert tape is not None
    try:
        check_room(4 * sum(o.nbytes for o in tape.outputs), device, "moved outputs")
        tape.check(math.nan if micro.root is None else float(micro.root))
    except CanaryDeclined as reason:
        return str(reason)
    return ""


def measure_loss(micro: MicroBatch, device: torch.device, worker: int, num_workers: int) -> Slopes:
    """Return how the loss changes where the outputs are moved; all ranks of the job call it."""
    tape = micro.tape
    assert tape is not None
    gradients = micro.arrived
    rounds_in = micro.rounds_in
    outputs = tape.outputs
    first = tape.again(outputs)
    again = tape.again(outputs)
    squares = sum(_square(g) for g in gradients if g is not None)
    norms = sum(map(_square, outputs))
    digest = _digest([*outputs, *(g for g in gradients if g is not None)])
    own = [first, again, worker, rounds_in, digest, squares, norms, sum(o.numel() for o in outputs)]
    rest_RX = gather(np.array(own, np.float64), device)
    if not np.isfinite(rest_RX).all():
        raise CanaryDeclined("the loss is not finite")
    if (np.abs(rest_RX[:, 0] - rest_RX[:, 1]) > SAME_LOSS * np.abs(rest_RX[:, 0])).any():
        raise CanaryDeclined(NOT_REPEATED)
    alike_R = (rest_RX[:, 2] == worker) & (rest_RX[:, 4] == digest)
    share = 1 / int(alike_R.sum())  # ranks of a worker with equal outputs move them alike
    loss = float(np.abs(rest_RX[:, 0]).mean())
    coarse = bool(rest_RX[:, 3].max() > 1e-6)
    sums_X = rest_RX[:, 5:8].sum(axis=0) / [num_workers, 1, 1]
    along, size = move_lengths(sums_X, loss, coarse=coarse)
    changes_DE = np.zeros((2, len(LENGTHS)))
    given_DE = np.zeros_like(changes_DE)
    for which in range(2):
        ways = [
            g if which == 0 else random_signs(f"{worker} {digest} {at}", o)
            for at, (o, g) in enumerate(zip(outputs, gradients, strict=True))
        ]
        for number, length in enumerate(LENGTHS):
            step = length * (along if which == 0 else size)
            ends = [_moved(outputs, ways, sign * step) for sign in (1.0, -1.0)]
            up, down = (tape.again(end) for end in ends)
            changes_DE[which, number] = (up - down) / 2
            given_DE[which, number] = share * sum(
                float(((u.double() - d.double()) * g.double()).sum()) / 2
                for u, d, g in zip(*ends, gradients, strict=True)
                if g is not None
            )
    both = gather(np.stack([changes_DE / len(rest_RX), given_DE / num_workers]), device).sum(axis=0)
    usual = [along * sums_X[0], size * math.sqrt(sums_X[0] / num_workers)]
    return Slopes(
        labels=(LABEL,),
        changes_BDE=both[:1],
        given_BDE=both[1:],
        usual_BD=np.array([usual]),
        loss=loss,
        error=float(np.abs(rest_RX[:, 0] - rest_RX[:, 1]).max()),
        scale=1.0,
        rounds_in=float(rest_RX[:, 3].max()),
        num_ranks=len(rest_RX),
        parts=False,
        clipped=math.nan,
    )


def _moved(outputs: Sequence[Tensor], ways: Sequence[Tensor | None], step: float) -> list[Tensor]:
    return [
        o.clone() if way is None else torch.add(o.float(), way.float(), alpha=step).to(o.dtype)
        for o, way in zip(outputs, ways, strict=True)
    ]


def _digest(tensors: Sequence[Tensor]) -> float:
    """Return a number of the content of tensors that float64 holds."""
    total = 0
    for tensor in tensors:
        total = (31 * total + int(digest_tensor(tensor))) % (1 << 52)
    return float(total)


def _square(tensor: Tensor) -> float:
    return float(tensor.float().square().sum(dtype=torch.float64))
