"""Settings of a training that all ranks should share, as far as they are in reach.

They are read once, as a run begins; the gather with which it begins carries them to rank 0.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from rankscope.bus.environment import OF_USER, Setting, plain_settings
from rankscope.wrappers.datasets import quietly, settings_of
from rankscope.wrappers.living import framework, live_objects
from rankscope.wrappers.optimizers import all_of
from rankscope.wrappers.wrapped import Wrapped

_ACCELERATOR = (
    *("mixed_precision", "gradient_accumulation_steps", "step_scheduler_with_optimizer"),
    *("even_batches", "split_batches", "dispatch_batches", "use_seedable_sampler"),
)
_LIGHTNING = (
    *("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("max_epochs", "max_steps", "limit_train_batches", "use_distributed_sampler"),
    *("reload_dataloaders_every_n_epochs", "overfit_batches", "detect_anomaly"),
)
_LOSSES = "torch.nn.modules.loss"
_MOVES = ("last_epoch", "total_iters_done", "best", "num_bad_epochs", "cooldown_counter")


def given_settings(
    wrapped: Wrapped, optimizer: Any, config: Mapping[str, Any] | None
) -> dict[str, Setting]:
    """Return the settings of a training by dotted name; the first part says whose they are.

    They are the arguments of a Trainer of Transformers or Lightning, of Accelerate and DeepSpeed,
    of schedulers of the learning rate and loss modules, the optimizer's class, and the user's.
    """
    held = {id(parameter) for parameter in wrapped.module.parameters()}
    found: dict[str, Setting] = {}
    readers: tuple[Callable[[], Iterable[tuple[str, Any]]], ...] = (
        lambda: _of_transformers(held),
        lambda: _of_lightning(held),
        lambda: _of_accelerate(held),
        lambda: _of_deepspeed(wrapped),
        lambda: _of_schedulers(optimizer),
        _of_losses,
        lambda: [("optimizer", {"class": [type(each).__name__ for each in all_of(optimizer)]})],
        lambda: [(OF_USER, config or {})],
    )
    for read in readers:
        found |= quietly(lambda read=read: dict(_plain(read())))  # type: ignore[misc]
    return found


def _plain(given: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Setting]]:
    for owner, values in given:
        yield from plain_settings(_without_objects(values), owner).items()


def _without_objects(value: Any) -> Any:
    """Return nested plain values; of other objects, their class."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, Mapping):
        return {str(key): _without_objects(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_objects(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # NaN differs from itself
    if value is None or type(value) in (bool, int, float, str):
        return value
    return type(value).__name__


def _trains(model: Any, held: set[int]) -> bool:
    return isinstance(model, nn.Module) and any(id(p) in held for p in model.parameters())


def _of_transformers(held: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of the Trainers that train a model at present."""
    kind = framework("transformers.trainer")
    for trainer in live_objects(kind)[kind] if kind else ():
        if trainer.is_in_train and _trains(trainer.model, held):
            names = type(trainer.args).__dataclass_fields__
            values = {name: getattr(trainer.args, name, None) for name in names if name[0] != "_"}
            yield type(trainer.args).__name__, values


def _of_lightning(held: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of the Trainer of a LightningModule, and what the module has saved."""
    modules: list[nn.Module] = live_objects(nn.Module)[nn.Module]
    for module in modules:
        is_lightning = any(kind.__name__ == "LightningModule" for kind in type(module).__mro__)
        if is_lightning and _trains(module, held):
            yield "Trainer", settings_of(_trainer_of(module), _LIGHTNING)
            yield f"{OF_USER}.hparams", dict(getattr(module, "hparams", {}))


def _trainer_of(module: Any) -> Any:
    """Return a LightningModule's Trainer; None outside of one, where its property raises."""
    try:
        return module.trainer
    except RuntimeError:
        return None


def _of_accelerate(held: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of the accelerator of a model; one of an earlier training may live on."""
    kind = framework("accelerate.accelerator")
    living = live_objects(kind)[kind] if kind else []
    own = [a for a in living if any(_trains(each, held) for each in getattr(a, "_models", ()))]
    for accelerator in (own or living)[:1]:
        yield "Accelerator", settings_of(accelerator, _ACCELERATOR)


def _of_deepspeed(wrapped: Wrapped) -> Iterator[tuple[str, Any]]:
    if wrapped.kind.engine and isinstance(wrapped.wrapper.config, Mapping):
        yield "DeepSpeed", wrapped.wrapper.config


def _of_schedulers(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of the schedulers of an optimizer's learning rate."""
    own = {id(each) for each in all_of(optimizer)}
    schedulers: list[LRScheduler] = live_objects(LRScheduler)[LRScheduler]
    for scheduler in schedulers:
        inner = getattr(scheduler.optimizer, "optimizer", None)  # of Accelerate
        if {id(scheduler.optimizer), id(inner)} & own:
            names = [n for n in vars(scheduler) if n[0] != "_" and n not in _MOVES]
            yield type(scheduler).__name__, settings_of(scheduler, names)


def _of_losses() -> Iterator[tuple[str, Any]]:
    """Yield the settings of loss modules: those of a class that all ranks have as many of."""
    modules: list[nn.Module] = live_objects(nn.Module)[nn.Module]
    losses = [m for m in modules if _LOSSES in (kind.__module__ for kind in type(m).__mro__)]
    numbers = Counter(type(each) for each in losses)
    for kind, number in numbers.items():
        values: dict[str, set[Any]] = {}
        for loss in (each for each in losses if type(each) is kind):
            weight = getattr(loss, "weight", None)
            plain = settings_of(loss, [name for name in vars(loss) if name[0] != "_"])
            plain |= {"weighted": isinstance(weight, Tensor)}
            for name in plain.keys() - {"training"}:
                values.setdefault(name, set()).add(plain[name])
        owner = kind.__name__ if number == 1 else f"{number} {kind.__name__}"
        yield owner, {name: " or ".join(sorted(map(str, each))) for name, each in values.items()}
