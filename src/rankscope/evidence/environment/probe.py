"""The optimizer's settings and the precision of the forward pass, step by step."""

import logging
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.bus.probe import Evaluated, Job, MessagePart, Probe, Ready, StepEnd
from rankscope.evidence.environment import MODES, PRECISION, SETTINGS
from rankscope.gradients.host import number_of
from rankscope.gradients.names import canonical_name
from rankscope.stats.arrays import digest_of
from rankscope.wrappers.facts import FLAGS_EVERY, PrecisionMeter
from rankscope.wrappers.living import frozen_modules, label_of, living_modules
from rankscope.wrappers.optimizers import JointOptimizer

_log = logging.getLogger("rankscope")

_DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LISTED_EVERY = 16  # readings between two looks for modules that were replaced


class ModeMeter(Probe):
    """Reads the mode of every module in steps that are multiples of ``FLAGS_EVERY``, and the first.

    Also in the step with which a training in evaluation mode begins. Frozen modules outside of the
    model, such as a teacher, are read with it. Those with the shapes of one of its parts are left
    out: averages of the weights are often evaluated on one worker alone.

    The names are sent only when a mode has changed. Dropout is off (1) where each such layer beside
    trained parameters is in evaluation mode. It is 2 for a model with batch normalisation in its
    place that was in training mode before, and is in evaluation mode as a whole.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[tuple[str, nn.Module]] = []
        self._outside: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._dropouts: list[nn.Module] = []
        self._has_norms = False
        self._has_trained = False  # in training mode
        self._off = 0
        self._flags: bytes | None = None
        self._digest = math.nan
        self._present = False
        self._names: dict[str, Any] = {}
        self._step = 0

    def begin_step(self, step: int, *, paused: bool) -> None:
        """Note the step's number."""
        self._step = step

    def before_forward(self, step: int, *, first: bool) -> None:
        """Read the modes of the step's first forward pass; later ones are the same."""
        if first:
            self.read(step)

    def on_evaluation(self, output: Any, kwargs: Mapping[str, Any]) -> Evaluated:
        """Read the modes once this pass in evaluation mode proves to be trained on."""
        return Evaluated(
            lambda: None,
            lambda forward: None if forward else self.read(self._step, due=True),
        )

    def collect(self, end: StepEnd) -> Ready:
        """Return the columns, and names with modes."""
        columns, names = self.take()
        return Ready(MessagePart(columns, names=names))

    def read(self, step: int, *, due: bool = False) -> None:
        """Read them if that is due, in a forward pass that trains, or was trained on."""
        if self._flags is not None and step % FLAGS_EVERY and not due:
            return
        self._present = True
        if step % (_LISTED_EVERY * FLAGS_EVERY) == 0 or not self._parts:
            self._parts = list(self._module.named_modules())
            self._outside = list(_frozen_beside(self._module))
            self._dropouts = list(_dropouts(self._module))
            self._has_norms = any(isinstance(part, _NORMS) for _, part in self._parts)
        self._has_trained |= self._module.training
        if self._dropouts:
            self._off = int(not any(each.training for each in self._dropouts))
        else:
            evaluates = self._has_norms and self._has_trained and not self._module.training
            self._off = 2 if evaluates else 0
        beside = [(name, part) for name, one in self._outside if (part := one()) is not None]
        flags = bytes([part.training for _, part in (*self._parts, *beside)])
        if flags == self._flags:
            return
        self._flags = flags
        names = [*(canonical_name(name) for name, _ in self._parts), *(name for name, _ in beside)]
        self._names = {MODES: [names, "".join(map(str, flags))]}
        text = "\n".join(f"{n} {f}" for n, f in zip(names, flags, strict=False))
        self._digest = digest_of(text.encode())

    def take(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the columns, NaN where modes were not read; and names with modes, if new."""
        if not self._present:
            return {MODES: math.nan, "dropout_off": math.nan}, {}
        names = self._names
        self._names = {}
        self._present = False
        return {MODES: self._digest, "dropout_off": self._off}, names


def _frozen_beside(model: nn.Module) -> Iterator[tuple[str, weakref.ref[nn.Module]]]:
    """Yield the parts of frozen modules outside of a model, which are no copies of its parts."""
    try:
        parts = list(model.modules())
        shapes = [[p.shape for p in part.parameters()] for part in parts]
        beside = list(frozen_modules(living_modules(set(map(id, parts)))))
    except Exception as error:  # whatever other modules of the process are
        _log.debug("modes of frozen modules are not compared: %r", error)
        return
    labels = [label_of(each) for each in beside]
    for label, each in zip(labels, beside, strict=True):
        if labels.count(label) == 1 and [p.shape for p in each.parameters()] not in shapes:
            for name, part in each.named_modules():
                yield f"{label}.{name}".rstrip("."), weakref.ref(part)


def _dropouts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the dropout layers in parts of a model that hold trained parameters."""
    for part in module.modules():
        layers = [each for each in part.children() if isinstance(each, _DROPOUT) and each.p > 0]
        if layers and any(parameter.requires_grad for parameter in part.parameters()):
            yield from layers


_NO_SETTINGS = frozenset(
    {"params", "param_names", "lr", "initial_lr", "max_lr", "min_lr", "base_lr"}
)
_PARAMETERS = frozenset({"params", "param_names"})
_FIXED = (bool, int, float, str, type(None))

_MOST_NAMED = 64
_LONGEST = 60


class OptimizerMeter(Probe):
    """Counts calls of ``optimizer.step`` and reads the settings of the last one.

    A gradient scaler skips some calls. The settings are the learning rate and the weight decay of
    the first parameter group, a digest of the other groups' rates, and one of all other settings,
    without bounds that a scheduler keeps in the groups (``max_lr``). Unreadable settings (tensors
    on an accelerator, an optimizer without parameter groups) are left out.

    Of several optimizers, the settings of all count, and the calls of the one that was called most.

    ``parameters``: those of the model, in the order that they have on all workers. Which of them
    the optimizer holds is a digest: each worker's may hold others, with other settings.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | JointOptimizer | None,
        parameters: Iterable[Tensor] = (),
    ) -> None:
        self._places = {id(parameter): n for n, parameter in enumerate(parameters)}
        self._held_lists: list[tuple[int, int]] = []
        self._held: dict[str, int] = {}
        self._known = optimizer is not None
        self._joint = optimizer if isinstance(optimizer, JointOptimizer) else None
        self._calls: Counter[int] = Counter()
        self._lr = float("nan")
        self._weight_decay = float("nan")
        self._groups: dict[int, _GroupSettings] = {}
        self._texts: dict[str, str] = {}
        self._named: dict[str, dict[str, str]] = {}  # to be sent, when some have changed
        self._values: list[object] = []  # of all groups: while they live, their ids are theirs
        self._seen: list[int] = []
        self._digests: dict[str, int] = {}
        self._optimizer = optimizer
        self._rate_of_pass: object = None
        self._num_changes = 0

    def before_forward(self, step: int, *, first: bool) -> None:
        """Note the learning rate as a forward pass begins: a schedule should move with updates."""
        groups = getattr(self._optimizer, "param_groups", None)
        rate = groups[0].get("lr") if isinstance(groups, list) and groups else None
        rate = rate if isinstance(rate, float) else None
        if not first and rate != self._rate_of_pass:
            self._num_changes += 1
        self._rate_of_pass = rate

    def after_update(self, optimizer: Any, *, complete: bool) -> None:
        """Count a call of ``optimizer.step`` that has ended, and read the settings."""
        self._calls[id(optimizer)] += 1
        self._read(self._joint or optimizer)

    def collect(self, end: StepEnd) -> Ready:
        """Return settings and calls."""
        return Ready(MessagePart(self.take(), names=self.named()))

    def take(self) -> dict[str, float]:
        """Return the settings' columns and the count (NaN when unknown); count from 0 again."""
        steps = max(self._calls.values(), default=0)
        self._calls.clear()
        values: dict[str, float] = {
            "lr": self._lr,
            "weight_decay": self._weight_decay,
            "optimizer_steps": steps if self._known else float("nan"),
            "lr_changes": self._num_changes if self._known else float("nan"),
        }
        self._num_changes = 0
        return {**values, **self._digests, **self._held}

    def named(self) -> dict[str, dict[str, str]]:
        """Return all settings but those with columns, by name, if some have changed; else none."""
        named, self._named = self._named, {}
        return named

    def _read(self, optimizer: Any) -> None:
        groups = getattr(optimizer, "param_groups", None)
        if isinstance(groups, list) and self._is_known(groups):
            return
        groups = groups if isinstance(groups, Sequence) else ()
        groups = [group for group in groups if isinstance(group, Mapping)]
        first = groups[0] if groups else {}
        self._lr = number_of(first.get("lr"))
        self._weight_decay = number_of(first.get("weight_decay"))
        self._read_held(groups)
        rates = [_plain(group.get("lr")) for group in groups[1:]]  # the first has a column
        texts = {"rates_digest": repr(rates)} if rates else {}
        if groups:
            texts["settings_digest"] = repr(list(map(self._text_of, range(len(groups)), groups)))
        if texts != self._texts:
            if texts.get("settings_digest") != self._texts.get("settings_digest"):
                self._named = {SETTINGS: self._words(groups)}
            self._texts = texts
            self._digests = {name: digest_of(text.encode()) for name, text in texts.items()}
        named = [(name, value) for group in groups for name, value in group.items()]
        self._values = [value for name, value in named if name not in _PARAMETERS]
        known = bool(groups) and all(map(_is_fixed, self._values))
        self._seen = [id(value) for _, value in named] if known else []

    def _read_held(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Digest which of the model's parameters the groups hold, if their lists have changed."""
        lists = [each for g in groups if isinstance(each := g.get("params"), Sequence)]
        seen = [(id(each), len(each)) for each in lists]
        if seen == self._held_lists:
            return
        self._held_lists = seen
        held = {self._places.get(id(parameter), -1) for each in lists for parameter in each} - {-1}
        self._held = {"held_digest": digest_of(repr(sorted(held)).encode())} if held else {}

    def _is_known(self, groups: list[Any]) -> bool:
        """Return whether all settings are the same immutable objects as in the last call."""
        try:
            return self._seen == [id(value) for group in groups for value in group.values()] != []
        except AttributeError:  # no mapping
            return False

    def _words(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return each setting as text, with the number of its parameter group if that matters."""
        shared = self._groups[0].settings
        words = {"the number of parameter groups": str(len(groups))}
        words |= {name: value[:_LONGEST] for name, value in shared.items()}
        for number in range(1, len(groups)):
            for name, value in self._groups[number].settings.items():
                if value != shared.get(name):
                    words[f"{name} of parameter group {number}"] = value[:_LONGEST]
        return dict(list(words.items())[:_MOST_NAMED])

    def _text_of(self, number: int, group: Mapping[str, Any]) -> str:
        """Return the settings of a parameter group as text, from a cache until some change."""
        omitted = _NO_SETTINGS if number else _NO_SETTINGS | {"weight_decay"}
        others = {name: value for name, value in group.items() if name not in omitted}
        known = self._groups.get(number)
        if known is None or not known.holds(list(others.values())):
            known = self._groups[number] = _GroupSettings(others)
        return known.text


class _GroupSettings:
    """Settings of one parameter group, without those that have columns, in plain form."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        plain = [(name, _plain(settings.get(name))) for name in sorted(map(str, settings))]
        self.text = repr([(name, value) for name, value in plain if value is not None])
        self.settings = {name: repr(value) for name, value in plain if value is not None}
        self._values = list(settings.values())
        self._ids = list(map(id, self._values))
        self._fixed = all(map(_is_fixed, self._values))

    def holds(self, values: list[Any]) -> bool:
        """Return whether these are the same objects, and none of them can have changed inside."""
        return self._fixed and self._ids == list(map(id, values))


def _is_fixed(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, _FIXED)


def _plain(value: object) -> object:
    """Return numbers as float (0 and False are one), text, and sequences of these; else None."""
    if isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)):
        parts = [_plain(part) for part in value]
        return None if None in parts else tuple(parts)
    number = number_of(value)
    return None if number != number else number


class PrecisionProbe(Probe):
    """Collects the precision of each step's first forward pass.

    The settings are sent with the first step that has them.
    """

    def __init__(self, meter: PrecisionMeter) -> None:
        self._meter = meter
        self._precision = math.nan

    def before_forward(self, step: int, *, first: bool) -> None:
        """Read the precision of the step's first forward pass; later ones have the same."""
        if first:
            self._precision = self._meter.code(step)

    def collect(self, end: StepEnd) -> Ready | None:
        """Return the precision of a step after which workers are comparable."""
        if not end.comparable:
            return None
        words = self._meter.take_words()
        names = {PRECISION: words} if words else {}
        return Ready(MessagePart({"precision": self._precision}, names=names))


def make_probe(job: Job) -> tuple[Probe, ...]:
    """Return the probes of settings, and of precision and modes where these are compared."""
    wrapped = job.wrapped
    settings = OptimizerMeter(job.optimizer, wrapped.parameters.values())
    if not job.exact:
        return (settings,)
    precisions = PrecisionMeter(wrapped.module, wrapped.device)
    return settings, PrecisionProbe(precisions), ModeMeter(wrapped.module)
