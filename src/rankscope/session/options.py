"""The rarer options of ``rankscope.watch``, each declared once."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, TypedDict, TypeVar

import torch.distributed as dist

from rankscope.bus.groups import GroupsOption
from rankscope.bus.plan import Tier
from rankscope.errors import UsageError
from rankscope.record.begin import SHARES
from rankscope.wrappers.tap import ReadReduced

_Choice = TypeVar("_Choice", bound=StrEnum)

_COMPARED = ("every", "sketch_width", "overhead_budget", "seed", "resume", "canary_every")


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Rarer options of :func:`rankscope.watch`, which takes each of them by its name as well.

    ::

        options = rankscope.WatchOptions(overhead_budget=0.05, canary=False)
        scope = rankscope.watch(model, optimizer, run_dir="runs/sft", options=options)

    Attributes:
        every: Gradients are measured in steps that are multiples of this; losses and samples in
            all steps.
        sketch_width: Prime width of the gradient sketch; a pairwise cosine errs by about
            ``1/sqrt(sketch_width)`` at most.
        groups: ``"blocks"`` (a transformer block, the embedding, the head), ``"none"``, a
            function from parameter name to group, or a mapping from name prefix to group.
        reduced: How the reduced gradient is read: ``"off"``, ``"norm"`` or ``"sketch"``, which
            audits the reduction. By default the sketch, and in the tier without sketches the norm.
        overhead_budget: Share of the step time that the monitor may take; to stay under it,
            gradients are measured less often, on all workers alike. None: never less often.
        evidence: Whether state that should be equal on all workers is compared exactly:
            parameters, buffers, optimizer state, reduced gradients, random generators, precision.
            Samples, settings and the environment always are.
        seed: Seed of the sketch's signs. It touches no random generator of the training.
        process_group: The data-parallel group; by default the model's own. Under FSDP2 with
            several meshes, that of the one whose parameters are compared.
        flush_seconds: Longest time that measured values stay in the agent's memory.
        hang_seconds: A step that takes longer (and 20 times as long as others) is a hang: a finding
            names the ranks that the others wait for, and where they stand. None: no such finding.
        resume: Whether a run that ``run_dir`` already holds goes on: its findings stay known, and
            its detectors go on where they stood. False: a new attempt that begins with nothing.
        tokenizer: The training's tokenizer (with ``get_vocab()``): its vocabulary is compared.
        canary: Whether all workers replay a batch when a worker differs from the others, to
            distinguish its data from its parameters and its hardware. Under DDP or without a
            wrapper, up to 64 workers.
        canary_every: Steps from one such replay to the next, whatever the findings. None: one
            within the first 50 steps, and others within 0.2 % of the training's time, where they
            cost no memory.
        verify_at: Steps whose gradient is computed again by each worker, one micro-batch at a time
            and without the wrapper, and compared with the optimizer's gradient; and the update of
            some parameters: see :meth:`rankscope.Scope.verify`. Up to 64 workers.
        trace: Whether rank 0 records digest, norm and a short sketch of every parameter and every
            reduced gradient, in steps that are multiples of ``every``, for ``rankscope diff``.
            Under DDP; outside of ``overhead_budget``.
        parity: Number of first steps that are recorded for ``rankscope parity``, in ``parity/`` of
            the run's directory on each host; 0 for none. Outside of ``overhead_budget``.
        agent: Where the monitor's work is done: ``"process"``, one of its own on each host, or
            ``"thread"`` inside this one, where no process may be started. By default the value of
            the environment variable ``RANKSCOPE_AGENT``, else a process.
        announce: Whether rank 0 prints on the error stream (through the logger ``rankscope``) when
            a warning or an error opens, gets worse or closes, and at the end the verdict and the
            command that shows more.
        alerts: Where findings go that open or get worse, one or a list of ``"slack:URL"``,
            ``"webhook:URL"`` and ``"mailto:ADDRESS?smtp=HOST:PORT"``. By default those in the
            environment variable ``RANKSCOPE_ALERTS``. They are never recorded or printed.
        share: Who may read the run: ``"me"``, ``"group"`` or ``"all"``. A directory that exists
            keeps its permissions, and files in it are as readable as the directory.

    Raises:
        UsageError: An option cannot work.
    """

    every: int = 1
    sketch_width: int = 4093
    groups: GroupsOption = "blocks"
    reduced: ReadReduced | str | None = None
    overhead_budget: float | None = 0.01
    evidence: bool = True
    seed: int = 0
    process_group: dist.ProcessGroup | None = None
    flush_seconds: float = 10.0
    hang_seconds: float | None = 120.0
    resume: bool = True
    tokenizer: Any = None
    canary: bool = True
    canary_every: int | None = None
    verify_at: Sequence[int] = ()
    trace: bool = False
    parity: int = 0
    agent: str | None = None
    announce: bool = True
    alerts: str | Sequence[str] = field(default=(), repr=False)
    share: str = "me"

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.reduced is not None:
            choice(ReadReduced, "reduced", self.reduced)
        steps = self.verify_at if isinstance(self.verify_at, Collection) else (True,)
        if any(isinstance(step, bool) or int(step) != step or step < 0 for step in steps):
            raise UsageError(
                f"verify_at expected numbers of steps, such as (20, 40), got {self.verify_at!r}"
            )
        if not _is_number(self.parity, Integral) or self.parity < 0:
            raise UsageError(f"parity expected a number of steps, got {self.parity!r}")
        if self.agent not in (None, "", "process", "thread"):
            raise UsageError(f"agent must be 'process' or 'thread', got {self.agent!r}")
        group = self.process_group
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise UsageError(
                f"process_group expected a group of torch.distributed.new_group, got {group!r}"
            )
        if self.share not in SHARES:
            raise UsageError(f"share must be 'me', 'group' or 'all', got {self.share!r}")

    def _check_kinds(self) -> None:
        for name in ("evidence", "resume", "canary", "trace", "announce"):
            if getattr(self, name) not in (True, False):
                raise UsageError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("overhead_budget", "flush_seconds", "hang_seconds"):
            value = getattr(self, name)
            usable = _is_number(value) and value >= 0
            if not usable and (value is not None or name == "flush_seconds"):
                raise UsageError(f"{name} must be a number of 0 or more, got {value!r}")
        if not _is_number(self.every, Integral) or self.every < 1:
            raise UsageError(
                f"every must be a whole number of steps, 1 or more, got {self.every!r}"
            )

    @classmethod
    def of(cls, options: "WatchOptions | None", named: Mapping[str, Any]) -> "WatchOptions":
        """Merge an object's options with those by name; UsageError for an unknown or double one."""
        known = {each.name: each.default for each in fields(cls)}
        for name in named:
            if name not in known:
                raise UsageError(f"watch() has no option {name!r}{_instead(name, list(known))}")
            if options is not None and getattr(options, name) is not known[name]:
                raise UsageError(f"watch() got {name} by its name and in options; give it once")
        return replace(options or cls(), **named)

    def reads(self, tier: Tier) -> ReadReduced:
        """Return how a tier reads the reduced gradient; UsageError if the option forbids it."""
        scalars = tier is Tier.SCALARS
        usual = ReadReduced.NORM if scalars else ReadReduced.SKETCH
        reduced = usual if self.reduced is None else ReadReduced(self.reduced)
        if scalars and reduced is not usual:
            raise UsageError(f"the scalars tier reads reduced='norm', got '{reduced}'")
        return reduced

    def compared(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks and are recorded, as plain values."""
        flags = {"evidence": bool(self.evidence), "trace": bool(self.trace)}
        return {name: getattr(self, name) for name in _COMPARED} | flags


def _is_number(value: object, kind: type = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


class WatchKeywords(TypedDict, total=False):
    """The fields of :class:`WatchOptions`, as editors and type checkers see them in ``watch``."""

    every: int
    sketch_width: int
    groups: GroupsOption
    reduced: ReadReduced | str | None
    overhead_budget: float | None
    evidence: bool
    seed: int
    process_group: dist.ProcessGroup | None
    flush_seconds: float
    hang_seconds: float | None
    resume: bool
    tokenizer: Any
    canary: bool
    canary_every: int | None
    verify_at: Sequence[int]
    trace: bool
    parity: int
    agent: str | None
    announce: bool
    alerts: str | Sequence[str]
    share: str


def choice(kind: type[_Choice], name: str, value: str) -> _Choice:
    """Return the member of an enumeration by its name."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(str(member)) for member in kind)
        raise UsageError(f"{name} must be one of {known}, got {value!r}") from None


def chosen_tier(tier: Tier | str) -> Tier:
    """Return the tier by its name."""
    if tier == "exact":
        raise UsageError(
            "the tier 'exact' was removed: use tier='sketch', whose cosines err by about 0.02, and "
            "rankscope.fixed_order(model) for its order of summation"
        )
    return choice(Tier, "tier", tier)


_EVERYDAY = ["run_dir", "tier", "plan", "on_finding", "sinks", "loader", "config", "options"]


def _instead(name: str, known: list[str]) -> str:
    """Return the rest of an error message: a similar option, or all options."""
    for nearest in get_close_matches(name, [*known, *_EVERYDAY], n=1):
        return f"; did you mean {nearest!r}?"
    return f", only {', '.join(_EVERYDAY)}, and {', '.join(known)}"
