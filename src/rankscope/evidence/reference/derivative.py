"""The loss against the gradient: directional derivatives by the training's own forward pass.

Blocks of parameters are moved by ``+v`` and ``-v``, and each time all ranks run their saved
micro-batches once more, with all collectives and without a graph. Compared are

    (L(+v) - L(-v)) / 2  and  <g, v>,

with the mean L of the ranks' losses and the gradient g that the optimizer is given. A loss that is
computed outside of the model is not run: the sum of the model's outputs, times the gradients that
the training's backward pass brought them, has the same derivative. There are two
directions: g itself, which shows a factor to many digits, and random signs, which show a part that
g lacks. Each has two lengths, which show the error of the difference. Decisions of the forward
pass, such as the experts of a token and the side of a ReLU, stay those of the parameters at rest.

A parameter that several ranks hold is moved alike on all of them and counts once. Ranks that hold
different parts of one move each its own.

Legend of shapes: P parameters, B blocks, D directions, E lengths, R ranks of the job.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankscope.bus.groups import Groups
from rankscope.evidence.canary.alone import alone
from rankscope.evidence.canary.batch import CanaryDeclined
from rankscope.evidence.canary.cost import check_room
from rankscope.evidence.canary.state import PreservedState, preserved_state
from rankscope.evidence.reference.decisions import Decisions
from rankscope.evidence.reference.micro_batch import LossAgain, MicroBatch
from rankscope.evidence.reference.models import GatheredModel
from rankscope.evidence.reference.slopes import LENGTHS, Slopes, judge_slopes
from rankscope.gradients.sketch import Sketcher
from rankscope.stats.arrays import Floats, Ints

_WIDTH = 31  # of sketches of parameters
_NEAR = 0.25  # relative distance below which two ranks' parameters are copies of one
_CHANGE = 2e-3  # of the loss, by the shorter move along the gradient
_FARTHEST = 0.02  # of the norm of the parameters, by the same
_MOVED = 0.01  # of an element's usual size, by the shorter move along random signs
_COARSER = 5.0  # times as far in 16-bit types
_MOST_SINGLE = 24  # parameters that are also moved one by one
_ATTACHED = (
    "{} adds the gradient of another loss on the way back, as of the balance of experts, and what "
    "backward is called on does not have that loss in it"
)
_SAME_LOSS = 1e-4  # relative: the ranks of a worker compute one loss


_Runnable = tuple[nn.Module, list[Tensor], list[Tensor | None]]
"""A model, the memory of its trained parameters, and their gradients."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Parameters that are moved together: their numbers, and what they are called."""

    places: list[int]
    label: str


class DirectionalDerivative:
    """Measures directional derivatives of one job's loss; all of its ranks measure together."""

    def __init__(
        self,
        module: nn.Module,  # the model itself, not its data-parallel wrapper
        parameters: Mapping[str, Tensor],  # its trained parameters by name
        device: torch.device,
        worker: int,  # number of this rank's worker; the ranks of a worker share its batch
        num_workers: int,
        copy: GatheredModel | None = None,  # None where the model holds its parameters itself
    ) -> None:
        self._copy = copy
        self._module = module
        self._names = tuple(parameters)
        self._parameters = list(parameters.values())
        self._device = device
        self._worker = worker
        self._num_workers = num_workers
        self._gradients: list[Tensor | None] = []

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Check that the gradients of the model and of its outputs can be read."""
        for micro in micro_batches:
            micro.check_kept()
            if micro.direct:
                raise CanaryDeclined(
                    "the loss takes parameters by itself, past the model's outputs"
                )
            if micro.attached is not None and micro.attached.name:
                raise CanaryDeclined(_ATTACHED.format(micro.attached.name))
        if self._copy is not None:
            self._copy.check()
            return
        if any(type(p.data) is not Tensor for p in self._parameters):
            raise CanaryDeclined("its parameters are sharded")
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients or any(g.layout is not torch.strided for g in gradients):
            raise CanaryDeclined("its parameters have no gradients, or sparse ones")
        sizes = [p.numel() for p in self._parameters]
        needed = sum(p.nbytes for p in self._parameters) + 4 * 4 * max(sizes)
        check_room(needed, self._device, "a copy of the parameters that are moved")

    @torch.no_grad()
    def measure(self, micro_batches: Sequence[MicroBatch], clipped: float) -> Slopes:
        """Return what was measured, equal on all ranks; waits for the device."""
        module = self._module
        parameters = self._parameters
        runnable: AbstractContextManager[_Runnable]
        if self._copy is None:
            gradients = [parameter.grad for parameter in parameters]  # the runs set them aside
            runnable = nullcontext((module, parameters, gradients))
        else:
            runnable = self._copy.opened()
        try:
            with runnable as (self._module, self._parameters, self._gradients):
                return self._measure_all(micro_batches, clipped)
        finally:
            self._gradients = []
            self._module = module
            self._parameters = parameters

    def _measure_all(self, micro_batches: Sequence[MicroBatch], clipped: float) -> Slopes:
        first_PR = self._first_holders()
        rank = dist.get_rank()
        shares_P = 1 / (first_PR == first_PR[:, [rank]]).sum(axis=1)
        sums_PX = gather(shares_P[:, None] * self._sums(), self._device).sum(axis=0)
        blocks = _blocks(self._names, self._parameters, first_PR)
        coarse = max(micro.rounds_in for micro in micro_batches) > 1e-6
        with _Losses(self._module, self._device, micro_batches) as losses:
            rest_RX = self._rest(losses, micro_batches)
            moves = _Moves(losses, sums_PX, shares_P, first_PR[:, rank], coarse)
            found = Slopes(
                labels=tuple(block.label for block in blocks),
                **self._measure(blocks, moves, rest_RX),
                loss=float(rest_RX[:, 6].mean()),
                error=float(np.abs(rest_RX[:, 0] - rest_RX[:, 1]).max()),
                scale=float(rest_RX[:, 2].mean()),
                rounds_in=float(rest_RX[:, 4].max()),
                num_ranks=len(rest_RX),
                parts=_are_parts(rest_RX[:, 0], rest_RX[:, 3]),
                clipped=clipped,
            )
            odd = judge_slopes(found, self._num_workers).odd_places
            finer = self._split(blocks, odd)
            if not finer:
                return found
            rows = self._measure(finer, moves, rest_RX)
        return found.refined(odd, [block.label for block in finer], **rows)

    def _split(self, blocks: Sequence[_Block], odd: Sequence[int]) -> list[_Block]:
        """Return the single parameters of blocks that differ; nothing if they are many."""
        many = sum(len(blocks[at].places) for at in odd) > _MOST_SINGLE
        if many or 2 * len(odd) > len(blocks):
            return []
        places = [place for at in odd for place in blocks[at].places]
        return [_Block([place], self._names[place]) for place in places]

    def _measure(
        self, blocks: Sequence[_Block], moves: "_Moves", rest_RX: Floats
    ) -> dict[str, Floats]:
        """Return changes and what the gradient foretells, of all ranks together, by block."""
        changes = np.zeros((len(blocks), 2, len(LENGTHS)))
        given = np.zeros_like(changes)
        usual = np.zeros((len(blocks), 2))
        loss = float(rest_RX[:, 6].mean())
        for at, block in enumerate(blocks):
            steps_DP, usual[at] = _steps(moves.sums_PX, block.places, loss, coarse=moves.coarse)
            for which, steps_P in enumerate(steps_DP):
                for number, length in enumerate(LENGTHS):
                    changes[at, which, number], given[at, which, number] = self._move(
                        block, length * steps_P, moves, random=which > 0
                    )
        both = gather(np.stack([changes / len(rest_RX), given]), self._device).sum(axis=0)
        return {"changes_BDE": both[0], "given_BDE": both[1], "usual_BD": usual}

    def _rest(self, losses: "_Losses", micro_batches: Sequence[MicroBatch]) -> Floats:
        """Return what each rank has at rest ``[R, 7]``.

        The loss, twice; its factor; the worker; the type's epsilon; the relative distance from the
        training's; and the size of the loss's terms.
        """
        first, size, far = losses()
        again, _, _ = losses()
        rounds_in = max(micro.rounds_in for micro in micro_batches)
        scale = sum(micro.loss_scale for micro in micro_batches)
        scale /= 1 if micro_batches[0].returns_loss else len(micro_batches)
        far = max(far, abs(first - again) / max(size, 1e-30))
        own = [first, again, scale, self._worker, rounds_in, far, size]
        rest_RX = gather(np.array(own, np.float64), self._device)
        if not np.isfinite(rest_RX).all():
            raise CanaryDeclined("the loss is not finite")
        far_R = rest_RX[:, 5]
        if (far_R > np.maximum(4e-6, rest_RX[:, 4] / 4)).any():
            raise CanaryDeclined(
                "the forward pass does not repeat itself (its loss differs by "
                f"{far_R.max():.1e} of it)"
            )
        return rest_RX

    def _first_holders(self) -> Ints:
        """Return the first rank that holds the same part of each parameter as a rank ``[P, R]``.

        Copies may have drifted apart. A vector that begins as a constant is near others even where
        it is a part of one. It counts as a copy if it is as long as some axis of a matrix of which
        all ranks hold copies; surely so in a module without a matrix, such as a norm. -1: unknown.
        """
        text = "\n".join(
            f"{n} {p.dim()}" for n, p in zip(self._names, self._parameters, strict=True)
        )
        own = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")
        if len(np.unique(gather(np.array([own], np.float64), self._device))) > 1:
            raise CanaryDeclined("the ranks of the job hold different layers")
        groups = Groups(self._names, {name: at for at, name in enumerate(self._names)})
        sketcher = Sketcher(self._device, groups, _WIDTH)
        totals = sketcher.new_totals()
        named = zip(self._names, self._parameters, strict=True)
        sketcher.measure_many([(name, p.data, 0) for name, p in named], totals)
        sizes = np.array([[p.numel()] for p in self._parameters], np.float64)
        sketches = totals.sketches.double().cpu().numpy()
        held_RPX = gather(np.concatenate([sketches, sizes], axis=1), self._device)
        norms_RP = np.linalg.norm(held_RPX[..., :-1], axis=2)
        first_PR = np.empty(norms_RP.T.shape, np.int64)  # copies may have drifted apart
        equal_PR = np.empty_like(first_PR)
        for rank in range(len(held_RPX)):
            far_RP = np.linalg.norm(held_RPX - held_RPX[rank], axis=2)
            near_RP = far_RP <= _NEAR * np.maximum(norms_RP, norms_RP[rank])
            first_PR[:, rank] = near_RP.argmax(axis=0)
            equal_PR[:, rank] = (far_RP == 0).argmax(axis=0)
        copied_P = (first_PR == 0).all(axis=1)
        matrices = [p for p, copied in zip(self._parameters, copied_P, strict=True) if copied]
        widths = {size for p in matrices if p.dim() > 1 for size in p.shape}
        constant = [not p.numel() or bool((p == p.reshape(-1)[0]).all()) for p in self._parameters]
        constant_P = gather(np.array(constant, np.float64), self._device).max(axis=0)
        divided = {
            name.rpartition(".")[0]
            for name, p, copied in zip(self._names, self._parameters, copied_P, strict=True)
            if p.dim() > 1 and not copied
        }
        for at, parameter in enumerate(self._parameters):
            if parameter.dim() > 1:
                continue
            if parameter.numel() in widths:
                if self._names[at].rpartition(".")[0] not in divided:
                    first_PR[at] = 0
            else:
                first_PR[at] = -1 if constant_P[at] else equal_PR[at]
        return first_PR

    def _sums(self) -> Floats:
        """Return squares of this rank's gradients and parameters, and their sizes ``[P, 3]``."""
        rows = []
        for gradient, parameter in zip(self._gradients, self._parameters, strict=True):
            size = float(parameter.numel())
            rows.append([_square(gradient), _square(parameter), size])
        return np.array(rows)

    def _move(
        self, block: _Block, steps_P: Floats, moves: "_Moves", *, random: bool
    ) -> tuple[float, float]:
        """Move a block up and down and put it back."""
        kept = {at: self._parameters[at].data.clone() for at in block.places}
        found = []
        try:
            for sign in (1.0, -1.0):
                along = 0.0
                for at, before in kept.items():
                    parameter = self._parameters[at]
                    gradient = self._gradients[at]
                    way = None if gradient is None else gradient.float()
                    if random:
                        way = random_signs(f"{self._names[at]} {moves.first_P[at]}", parameter)
                    if way is not None:
                        moved = torch.add(before.float(), way, alpha=sign * float(steps_P[at]))
                        parameter.data.copy_(moved)
                    if gradient is not None:
                        by = (parameter.data.float() - before.float()).mul_(gradient)
                        along += float(by.sum(dtype=torch.float64)) * float(moves.shares_P[at])
                found.append((moves.losses().total, along))
                for at, before in kept.items():
                    self._parameters[at].data.copy_(before)
        finally:
            for at, before in kept.items():
                self._parameters[at].data.copy_(before)
        (up, along_up), (down, along_down) = found
        return (up - down) / 2, (along_up - along_down) / 2


@dataclass(frozen=True, slots=True)
class _Moves:
    """What all moves have in common."""

    losses: "_Losses"  # runs the micro-batches
    sums_PX: Floats  # squares of gradients and parameters, and sizes, over all ranks ``[P, 3]``
    shares_P: Floats  # one over the number of ranks with the same part of a parameter
    first_P: Ints  # the first of these ranks
    coarse: bool  # 16-bit types round the loss


class _Losses:
    """Runs micro-batches once more, with their collectives; all else is put back at its end.

    A call returns their loss, as the backward passes were called on it.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, micro_batches: Sequence[MicroBatch]
    ) -> None:
        self._module = module
        self._device = device
        self._micro_batches = micro_batches
        self._decisions = [Decisions() for _ in micro_batches]
        self._state = preserved_state(module, device, seed=None)
        self._run: PreservedState | None = None

    def __enter__(self) -> "_Losses":
        self._run = self._state.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._state.__exit__(*error)

    def __call__(self) -> LossAgain:
        assert self._run is not None
        found = []
        for micro, decisions in zip(self._micro_batches, self._decisions, strict=True):
            context = alone(self._device, self._run, micro.autocast, communicates=True)
            with context, torch.no_grad():
                found.append(micro.loss_again(self._module, decisions))
        totals, sizes, fars = zip(*found, strict=True)
        return LossAgain(sum(totals), sum(sizes), max(fars))


def _steps(
    sums_PX: Floats, places: Sequence[int], loss: float, *, coarse: bool
) -> tuple[Floats, list[float]]:
    """Return the shorter move of each parameter in both directions, and their usual changes."""
    sums_X = sums_PX[places].sum(axis=0)
    along, usual = move_lengths(sums_X, loss, coarse=coarse)
    usual_P = _MOVED * np.sqrt(sums_PX[:, 1] / np.maximum(sums_PX[:, 2], 1))
    signs_P = np.maximum((_COARSER if coarse else 1.0) * usual_P, 0.1 * usual)
    spread = math.sqrt(float((signs_P[places] ** 2 * sums_PX[places, 0]).sum()))
    return np.stack([np.full(len(sums_PX), along), signs_P]), [along * sums_X[0], spread]


def move_lengths(sums_X: Floats, loss: float, *, coarse: bool) -> tuple[float, float]:
    """Return the shorter move along a gradient, over it, and along random signs.

    ``sums_X`` are the squares of the gradient and of what is moved, and the number of elements.
    """
    gradients, squares, size = map(float, sums_X)
    farther = _COARSER if coarse else 1.0
    along = 0.0
    if gradients:
        far = _FARTHEST * math.sqrt(squares / gradients)
        along = farther * min(_CHANGE * loss / gradients, far)
    return along, farther * _MOVED * math.sqrt(squares / max(size, 1))


def _blocks(names: Sequence[str], parameters: Sequence[Tensor], first_PR: Ints) -> list[_Block]:
    """Return at most eight blocks: vectors apart, and apart what each rank has of its own."""
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for at, parameter in enumerate(parameters):
        if (first_PR[at] >= 0).all():
            own = len(np.unique(first_PR[at])) > 1
            kinds.setdefault((parameter.dim() < 2, own), []).append(at)
    blocks = []
    for (vectors, _), places in sorted(kinds.items()):
        for part in [places] if vectors else _by_depth(names, places):
            more = f" (and {len(part) - 1} more)" if part[1:] else ""
            blocks.append(_Block(part, f"{names[part[0]]}{more}"))
    return blocks


def _by_depth(names: Sequence[str], places: Sequence[int]) -> list[list[int]]:
    """Return at most three parts of a list: the first layer's, the last one's, and the rest."""
    layers: dict[str, list[int]] = {}
    for at in places:
        parts = names[at].split(".")
        numbered = next((n for n, part in enumerate(parts) if part.isdigit()), None)
        key = ".".join(parts[:-1] if numbered is None else parts[: numbered + 1])
        layers.setdefault(key, []).append(at)
    first, *rest = layers.values()
    if len(rest) < 2:
        return [first, *rest]
    return [first, [at for layer in rest[:-1] for at in layer], rest[-1]]


def random_signs(text: str, parameter: Tensor) -> Tensor:
    """Return random signs, the same for the same text; float32, shaped as the parameter."""
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")
    draw = torch.Generator(parameter.device).manual_seed(seed)
    signs = torch.empty_like(parameter, dtype=torch.float32).uniform_(-1, 1, generator=draw)
    return signs.sign_()


def _square(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.float().square().sum(dtype=torch.float64))


def _are_parts(losses_R: Floats, workers_R: Floats) -> bool:
    """Return whether the ranks of some worker have losses of their own."""
    for worker in np.unique(workers_R):
        own = losses_R[workers_R == worker]
        if np.ptp(own) > _SAME_LOSS * np.abs(own).max():
            return True
    return False


def gather(values: Floats, device: torch.device) -> Floats:
    """Return the numbers of all ranks ``[R, ...]``; all of them call it."""
    own = torch.from_numpy(np.ascontiguousarray(values, np.float64)).to(device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return torch.stack(found).cpu().numpy()
