"""The local loss of a worker, before anything averages it.

A loss arrives in units: one scalar per micro-batch, or one value per sample. Each unit carries a
weight, the number of its label tokens. The spread between units later shows how much dispersion
*between* workers sampling alone would give.

A DTensor counts if each rank holds all of it. To read any other would communicate: it is declined
with one line in the log.
"""

import logging
import math
from array import array as typed_array
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankscope.bus.probe import (
    Awaited,
    Content,
    Evaluated,
    Job,
    MessagePart,
    Pending,
    Probe,
    StepEnd,
)
from rankscope.bus.steps import LEAST_SCALER
from rankscope.gradients.host import Numbers, OnHost, copy_numbers
from rankscope.gradients.kernels.native import count_labels
from rankscope.stats.tokens import IGNORED_LABEL
from rankscope.wrappers.backward_loss import unscaled
from rankscope.wrappers.labels import count_label_tokens, is_spread, labels_in, own, shifts_labels
from rankscope.wrappers.loss_form import (
    averaged_tokens,
    divisor_of,
    is_mean,
    origin_of,
    read_form,
)
from rankscope.wrappers.passes import hook_gradient
from rankscope.wrappers.surroundings import outside
from rankscope.wrappers.untraced import untraced

_log = logging.getLogger("rankscope")


class TokenSum(NamedTuple):
    """A loss that is a sum over label tokens divided by a number."""

    tokens: Numbers  # number of label tokens ``[1]``
    divisor: Numbers  # divisor of the sum ``[1]``: the number of all workers' tokens, perhaps


class MicroBatchLoss(NamedTuple):
    """Losses of one micro-batch."""

    values: Numbers  # one or more ``[U]``
    weights: Numbers | None  # label tokens behind each ``[U]``, None if unknown
    multiplier: "_Multiplier | None" = None  # reads their multiplier before backward
    forward: int = 0  # number of the forward pass
    # None where they are known to be means, or the user's own. Else the constant in the multiplier,
    # of which only one over the number of micro-batches can be separated from the loss itself; NaN:
    # all of the multiplier.
    constant: Numbers | None = None
    # tokens and divisor of a sum over label tokens; None for other losses
    summed: TokenSum | None = None

    @property
    def ready(self) -> bool:
        """Whether all of it can be read without waiting for the device."""
        numbers = (self.values, self.weights, self.constant, *(self.summed or ()))
        return all(each is None or each.ready for each in numbers)


class _Multiplier:
    """The factor between a loss and the value on which ``backward`` was called.

    It is the gradient that arrives at the loss: scaler, accumulation divisor and any other factor
    together. The hook returns nothing, so the gradient stays as it is. The recorded loss is the
    given one divided by ``unit``.

    Where backward does not pass through a loss that is a quotient, as of a sum that is trained on
    and logged per token, ``of_dividend`` is the factor as far as the dividend shows it.
    """

    def __init__(self, loss: Any, unit: Tensor | None = None, *, begun: bool = False) -> None:
        self.value: Tensor | float | None = None
        self.of_dividend: Tensor | None = None
        self._unit = unit
        if begun:
            self.value = 1.0 if unit is None else unit
        elif loss.grad_fn is None:
            loss.register_hook(self._see)
        else:
            hook_gradient(loss, self._see)
            divisor = divisor_of(loss.grad_fn)
            node, place = loss.grad_fn.next_functions[0]
            if divisor is not None and node is not None:
                node.register_prehook(partial(self._see_dividend, place, own(divisor)))

    @untraced
    def _see_dividend(self, place: int, divisor: Tensor, gradients: Sequence[Any]) -> None:
        gradient = gradients[place]
        if gradient is None or is_spread(gradient):
            return
        try:
            outside(self._read_dividend, own(gradient), divisor)
        except Exception:  # the backward pass goes on, and the factor is unknown
            _log.debug("the multiplier of a dividend could not be read", exc_info=True)

    def _read_dividend(self, gradient: Tensor, divisor: Tensor) -> None:
        self.of_dividend = gradient.sum(dtype=torch.float64) * _moved(divisor, gradient.device)

    @untraced
    def _see(self, gradient: Tensor | None) -> None:
        try:
            outside(self._read, gradient)
        except Exception:  # the backward pass goes on, and the factor is unknown
            _log.debug("the multiplier of a loss could not be read", exc_info=True)

    def _read(self, gradient: Tensor | None) -> None:
        if self._unit is None and _is_number_on_host(gradient):
            self.value = gradient.item()
        elif gradient is not None and not is_spread(gradient):
            gradient = own(gradient)
            value = gradient.sum(dtype=torch.promote_types(gradient.dtype, torch.float32))
            unit = self._unit
            self.value = value if unit is None else value * _moved(unit, value.device)


class LossMeter:
    """Collects the losses of one step; given losses take precedence over those of outputs.

    ``shifted``: whether the model predicts the next token, so that the first label of each sequence
    is not a target.
    """

    def __init__(self, *, shifted: bool) -> None:
        self._shifted = shifted
        self._given: list[MicroBatchLoss] = []
        self._seen: list[MicroBatchLoss] = []
        self._spare: list[MicroBatchLoss] = []
        self._declined = False
        self._own_mean: bool | None = None  # the model's loss, whatever number it is given

    def give(
        self,
        value: Tensor | float,
        weight: Tensor | float | None = None,
        forward: int = 0,
        *,
        factor: Tensor | float | None = None,
        constant: Tensor | float | None = None,
        summed: tuple[Tensor | float, Tensor | float] | None = None,
        spare: bool = False,
        begun: bool = False,
    ) -> None:
        """Add the loss of a micro-batch: a scalar, or one value per sample ``[B]``.

        ``weight``: number of label tokens, like ``value``; None: that of which ``value`` is the
        mean, or a multiple of it, if autograd shows that. ``factor``: multiplier that ``value``
        contains already; the recorded loss is without it, and the recorded multiplier includes it.
        ``constant``: see :class:`MicroBatchLoss`. ``summed``: number of label tokens that ``value``
        sums over, and the sum's divisor. ``spare``: whether it only counts if backward did not pass
        through the losses in the model's outputs. ``begun``: whether its backward pass is under
        way, with a gradient of 1.

        What is no loss was declined before, see :func:`rankscope.wrappers.labels.problem_of`.
        """
        if any(map(is_spread, (value, weight, factor))):
            self._decline()
            return
        alone = weight is None and factor is None and summed is None
        if alone and isinstance(value, Tensor) and value.dim() == 0:
            found = unscaled(value, {})
            weight = found.tokens
            factor = None if weight is None else found.factor
        unit = None if factor is None else _in_double(factor)
        multiplier = _Multiplier(value, unit, begun=True) if begun else _multiplier(value, unit)
        values = _in_double(value).reshape(-1)
        if unit is not None:
            values = _over_unit(unit, values)
        weights = None if weight is None else _in_double(weight).reshape(-1)
        copy = None if weights is None else _copy(weights)
        whole = None if summed is None else TokenSum(*(_copy(_in_double(n)) for n in summed))
        part = None if constant is None else _copy(_in_double(constant))
        loss = MicroBatchLoss(_copy(values), copy, multiplier, forward, part, whole)
        (self._spare if spare else self._given).append(loss)

    def see(self, output: Any, kwargs: Mapping[str, Any], forward: int = 0) -> None:
        """Pick the loss up from a model's output, and its label tokens from the inputs.

        A model that gets ``num_items_in_batch`` (from Trainer) divides the sum over its tokens by
        that number, which counts those of other micro-batches and workers as well. The recorded
        loss is the mean over its own tokens. Some models ignore the number and return that mean:
        the first loss decides, if autograd shows its origin, and waits for the device.
        """
        mapped = isinstance(output, (dict, Mapping))
        loss = output.get("loss") if mapped else getattr(output, "loss", None)
        if _is_number_on_host(loss) and "num_items_in_batch" not in kwargs:
            self._see_on_host(loss, kwargs, forward)
            return
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        if is_spread(loss):
            self._decline()
            return
        weights = count_label_tokens(kwargs, shifted=self._shifted)
        values = own(loss).reshape(1)
        unit = _unit(kwargs.get("num_items_in_batch"), weights)
        constant = None if unit is not None else _constant_of(loss)
        if unit is not None and self._is_own_mean(loss, weights, kwargs["num_items_in_batch"]):
            unit = None
        if unit is not None:
            values = _over_unit(unit, values)
        if weights is None:
            weights = _averaged(loss)
        copy = None if weights is None else _copy(weights)
        multiplier = _multiplier(loss, unit)
        self._seen.append(MicroBatchLoss(_copy(values), copy, multiplier, forward, constant))

    def _see_on_host(self, loss: Tensor, kwargs: Mapping[str, Any], forward: int) -> None:
        """Add a loss that can be read at once."""
        labels, first = labels_in(kwargs, shifted=self._shifted)
        count = None if labels is None else count_labels(labels, IGNORED_LABEL, first=first)
        weights: Numbers | None
        if count is not None:
            weights = OnHost(np.array([count], np.float64))
        else:
            counted = count_label_tokens(kwargs, shifted=self._shifted)
            counted = _averaged(loss) if counted is None else counted
            weights = None if counted is None else _copy(counted)
        values = OnHost(np.array([loss.item()]))
        multiplier = _multiplier(loss)
        constant = _constant_of(loss)
        self._seen.append(MicroBatchLoss(values, weights, multiplier, forward, constant))

    @property
    def num_given(self) -> tuple[int, int]:
        """How many losses were given in this step: counting and spare ones."""
        return len(self._given), len(self._spare)

    def move(self, num_given: tuple[int, int], to: "LossMeter") -> None:
        """Move the losses given since ``num_given`` to another meter."""
        given, spare = num_given
        to._given += self._given[given:]
        to._spare += self._spare[spare:]
        del self._given[given:], self._spare[spare:]

    def absorb(self, other: "LossMeter", forward: int) -> None:
        """Add the losses of another meter, all of the forward pass ``forward``."""
        for mine, others in (
            (self._given, other._given),
            (self._seen, other._seen),
            (self._spare, other._spare),
        ):
            mine += [micro._replace(forward=forward) for micro in others]

    def _is_own_mean(self, loss: Tensor, own: Any, num_items: Any) -> bool:
        """Return whether the model averages over its own tokens; decided once."""
        if self._own_mean is None:
            self._own_mean = False
            try:
                form = read_form(loss, own, num_items, 1)
                self._own_mean = form is not None and not form.divided_by_all
            except Exception:
                _log.debug("how a loss came about could not be read", exc_info=True)
        return self._own_mean

    def _decline(self) -> None:
        if not self._declined:
            self._declined = True
            _log.warning(
                "a loss is not recorded: each rank holds a part of it (a DTensor that is not "
                "replicated); give scope.loss() the local loss. The rest is measured as before"
            )

    def collect(self, idle: Collection[int] = ()) -> tuple[list[MicroBatchLoss], Numbers | None]:
        """Return the losses since the last call without ``idle`` forward passes, and start again.

        The second result holds their multipliers before backward (float64 ``[M]``); None when one
        is unknown.
        """
        given = self._given
        seen = self._seen
        spare = self._spare
        self._given = []
        self._seen = []
        self._spare = []
        if idle:
            given, seen, spare = (
                [micro for micro in micros if micro.forward not in idle]
                for micros in (given, seen, spare)
            )
        multipliers = _multipliers(given) or _multipliers(seen)
        if given or multipliers is not None:
            return given or seen, multipliers
        multipliers = _multipliers(spare)  # backward passed through no other loss
        return (seen or spare) if multipliers is None else spare, multipliers


def _is_number_on_host(tensor: Any) -> TypeGuard[Tensor]:
    """Return whether a tensor is a real number in the host's memory, which is quick to read."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.numel() == 1
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
    )


def _averaged(loss: Tensor) -> Tensor | None:
    """Return the number of label tokens whose mean a loss is ``[1]``, None if unknown."""
    tokens = averaged_tokens(origin_of(loss))
    return None if tokens is None else _in_double(tokens).reshape(1)


def _constant_of(loss: Tensor) -> Numbers | None:
    return None if is_mean(loss) else OnHost(np.array(math.nan))


def _multiplier(loss: Any, unit: Tensor | None = None) -> _Multiplier | None:
    watched = isinstance(loss, Tensor) and loss.requires_grad
    return _Multiplier(loss, None if unit is None else unit.sum()) if watched else None


def _copy(numbers: Tensor) -> Numbers:
    return copy_numbers(numbers, torch.float64)


def _in_double(value: Any) -> Tensor:
    """Return a tensor in float64 where it lives, and any other number on the host."""
    if isinstance(value, Tensor):
        return own(value).to(torch.float64)
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a few numbers to a device; from the host without waiting for the device."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def _unit(num_items: Any, weights: Tensor | None) -> Tensor | None:
    """Return own label tokens per token that the loss was divided by ``[1]``, None if all."""
    if weights is None or not isinstance(num_items, (int, float, Tensor)) or is_spread(num_items):
        return None
    items = _moved(_in_double(num_items), weights.device)
    return weights / items if items.numel() == 1 else None


def _over_unit(unit: Tensor, values: Tensor) -> Tensor:
    """Return values over their unit; those without a token stay 0."""
    unit = _moved(unit, values.device)
    values = values.to(torch.float64)
    return torch.where(unit == 0, values, values / unit)


def _multipliers(collected: Sequence[MicroBatchLoss]) -> Numbers | None:
    factors: list[Tensor | float] = []
    for micro in collected:
        if micro.multiplier is None:
            return None
        value = micro.multiplier.value
        value = micro.multiplier.of_dividend if value is None else value
        if value is None:
            return None
        factors.append(value)
    if not factors:
        return None
    tensors = [factor for factor in factors if isinstance(factor, Tensor)]
    if not tensors:
        return OnHost(np.array(factors))
    device = tensors[0].device
    if len(factors) == 1:
        return _copy(tensors[0].reshape(1))
    together = [_moved(_in_double(factor).reshape(()), device) for factor in factors]
    return _copy(torch.stack(together))


_DOUBLE = 8  # bytes
_NAN = np.full(1, np.nan).tobytes()


def read_losses(
    losses: Sequence[MicroBatchLoss],
    multipliers: Numbers | None,  # of the losses before backward; None if unknown
    summed_workers: float,  # how many workers' gradients the reduction adds up: 1 for their mean
    scheduled: float = math.nan,  # a pipeline's factor on gradients after backward; NaN without
) -> MessagePart:
    """Wait for the device; return losses and weights, one micro-batch after the other."""
    if multipliers is not None and any(one.constant is not None for one in losses):
        factors_M = multipliers.numpy()
        scheduled = scheduled if math.isfinite(scheduled) else 1.0
        return MessagePart(arrays=_trained_losses(losses, factors_M, summed_workers, scheduled))
    parts = _loss_parts(losses, [_packed(micro.values) for micro in losses])
    if multipliers is not None:
        parts["multipliers_M"] = _packed(multipliers)
    return MessagePart(arrays=parts)


class LossProbe(Probe):
    """Collects the losses of one worker's steps."""

    def __init__(self, *, shifted: bool) -> None:
        self._new_meter = partial(LossMeter, shifted=shifted)
        self._meter = self._new_meter()
        self._before_update = (0, 0)

    def give_loss(self, value: Any, weight: Any, forward: int, **more: Any) -> None:
        """Add the loss that the user has given of a micro-batch."""
        self._meter.give(value, weight, forward, **more)

    def after_update(self, optimizer: Any, *, complete: bool) -> None:
        """Note which losses were given before the optimizer's call."""
        self._before_update = self._meter.num_given

    def take_later(self, num_passes: int) -> Callable[[int], None]:
        """Take losses out of the step that belong to the next, whose backward pass begins.

        They were given after the optimizer's call, and the step has one of each of its passes. The
        function returned puts them into the step by then, as those of a forward pass.
        """
        later = self._new_meter()
        if self._before_update[0] >= num_passes:
            self._meter.move(self._before_update, later)
        return partial(self._meter.absorb, later)

    def on_output(self, output: Any, kwargs: Mapping[str, Any], forward: int) -> None:
        """Read the loss in the model's output, if any."""
        self._meter.see(output, kwargs, forward)

    def on_evaluation(self, output: Any, kwargs: Mapping[str, Any]) -> Evaluated:
        """Keep the loss apart until it proves to be trained on."""
        losses = self._new_meter()
        losses.see(output, kwargs)
        move = partial(self._meter.move, self._meter.num_given, losses)
        return Evaluated(move, partial(self._meter.absorb, losses))

    def collect(self, end: StepEnd) -> Pending:
        """Return the losses of the step's forward passes that had a backward pass."""
        losses, multipliers = self._meter.collect(end.idle)
        given = losses, multipliers, end.summed_workers, end.schedule_scale
        return Awaited([multipliers, *losses], partial(read_losses, *given))

    def abort(self) -> None:
        """Forget the step's losses."""
        self._meter.collect()


def make_probe(job: Job) -> LossProbe:
    """Return the probe of losses."""
    return LossProbe(shifted=shifts_labels(job.wrapped.module))


def _trained_losses(
    collected: Sequence[MicroBatchLoss],
    multipliers_M: NDArray[Any],
    summed_workers: float,
    scheduled: float,
) -> dict[str, Content]:
    """Return losses of unknown form, scaled as in the call of backward, and by a schedule after it.

    One over the number of micro-batches makes their sum a mean. Any other constant may belong to
    the loss (a sum over terms or tokens, divided by their number), or not. So it stays in: then
    the mean over micro-batches is the sum of the backward calls' values, and the mean over workers
    is the common trained loss, whether the reduction takes a mean or a sum. A large factor is a
    gradient scaler's, which is no part of the loss.
    """
    count = len(collected)
    losses = []
    multipliers = np.array(multipliers_M, np.float64)
    known = _token_means(collected, multipliers_M, summed_workers)
    for number, micro in enumerate(collected):
        values: NDArray[Any] = micro.values.numpy()
        if micro.constant is not None:
            constant = float(micro.constant.numpy().item())
            share = count * (float(multipliers[number]) if math.isnan(constant) else constant)
            share *= scheduled
            if share and abs(share) < LEAST_SCALER and not math.isclose(share, 1, rel_tol=1e-3):
                values = values * share
                multipliers[number] /= share
            values = values * summed_workers
        losses.append(_packed(values))
    return {**_loss_parts(collected, losses), **known, "multipliers_M": multipliers.tobytes()}


def _token_means(
    collected: Sequence[MicroBatchLoss], multipliers_M: NDArray[Any], summed_workers: float
) -> dict[str, Content]:
    """Return sums over label tokens as means, if their divisor counts all workers' tokens."""
    rows = []
    for micro, multiplier in zip(collected, multipliers_M, strict=True):
        if micro.summed is None or micro.constant is None:
            return {}
        count, divisor = (float(number.numpy().item()) for number in micro.summed)
        mean = float(micro.values.numpy().item()) * divisor / count if count else 0.0
        weight = float(multiplier) * summed_workers * count / divisor
        constant = float(micro.constant.numpy().item())
        rows.append((count, divisor / constant if constant else math.nan, mean, weight))
    return {"sums_M4": np.array(rows, np.float64).tobytes()}


def _loss_parts(collected: Sequence[MicroBatchLoss], losses: list[bytes]) -> dict[str, Content]:
    units = typed_array("q", [len(each) // _DOUBLE for each in losses])
    weights = [
        _NAN * count if micro.weights is None else _packed(micro.weights)
        for micro, count in zip(collected, units, strict=True)
    ]
    return {
        "losses_U": b"".join(losses),
        "weights_U": b"".join(weights),
        "units_M": units.tobytes(),
    }


def _packed(numbers: Numbers | NDArray[Any]) -> bytes:
    array = numbers if isinstance(numbers, np.ndarray) else numbers.numpy()
    return array.astype(np.float64, copy=False).tobytes()
