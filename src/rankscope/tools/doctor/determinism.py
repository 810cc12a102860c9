"""Whether forward and backward of the user's model repeat bit for bit; if not, which operators."""

import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.bus.bundles import PlainBatch
from rankscope.bus.words import first_of, name_ranks
from rankscope.errors import RankscopeError
from rankscope.private import find, lacking
from rankscope.tools.doctor.stage import (
    Bench,
    CheckResult,
    Facts,
    PreflightStage,
    Status,
)
from rankscope.tools.replay import as_inputs, digest_of_run
from rankscope.wrappers.passes import in_backward

RUNS = 4  # runs of the same batch that are compared
SHARE_OF_TIME = 0.4  # share of a stage's time that the runs may take
SHARE_OF_TWO = 0.8  # the same where there are only two of them, as few as can be compared

_SEED = 20
_ALERT = re.compile(r"^(.*?) does not have a deterministic implementation")
_SHOWN = 4

_UNINITIALISED = ("empty", "new_empty", "resize")  # begin operators whose result has no value yet
_NO_REPEAT = ("c10d", "_c10d_functional", "c10d_functional", "profiler", "inductor", "prims")
_BACKWARD = "in the backward pass"
_FORWARD = "in the forward pass"

_tree_flatten: Any = find("torch.utils._pytree.tree_flatten")
_tree_map: Any = find("torch.utils._pytree.tree_map")

Run = Callable[[], int]  # runs the batch and returns a digest of all bits of loss and gradient


def look(bench: Bench) -> Facts:
    """Run one batch several times: as it is, by operators, with deterministic algorithms."""
    module = bench.model
    if not isinstance(module, FullyShardedDataParallel):  # inside of it are parts of a model
        module = getattr(module, "module", module)
    if not isinstance(module, nn.Module) or bench.batch is None:
        return {"declined": "there is no model, or no batch to run"}
    missing = lacking("operators")
    if missing:
        return {"declined": f"torch {torch.__version__} lacks {', '.join(missing)}"}
    try:
        batch = as_inputs(module, bench.batch)
        device = next((p.device for p in module.parameters()), bench.device)
        return _run_all(module, batch, device, bench.options.seconds)
    except RankscopeError as declined:
        return {"declined": f"one batch could not be run: {declined}"}


def _judge(facts: Sequence[Facts]) -> CheckResult:
    """Report whether steps repeat, which operators do not, and the effect of the flag."""
    declined = next((fact["declined"] for fact in facts if "declined" in fact), None)
    if declined is not None:
        return CheckResult(Status.SKIPPED, declined)
    numbers = {"ranks": [dict(fact) for fact in facts]}
    ranks = tuple(
        rank for rank, fact in enumerate(facts) if fact["different"] > 1 or fact["operators"]
    )
    operators = _merged(facts, "operators")
    if ranks:
        return _unrepeatable(facts, ranks, operators, numbers)
    alerts = _merged(facts, "alerts")
    found = (
        f"{facts[0]['runs']} runs of the same batch with the same random numbers, forward and "
        "backward, gave the same bits"
    )
    repeated = min(fact["operators_repeated"] for fact in facts)
    if repeated:
        found += f", and so did {repeated:,} operators one by one"
    if alerts:
        advice = (
            "They can give other bits from run to run, for other inputs or under load. Where runs "
            "must repeat, replace them."
        )
        found += f"; torch has no deterministic implementation of {first_of(alerts, _SHOWN)}"
        return CheckResult(Status.NOTE, found, advice, numbers)
    return CheckResult(Status.OK, found, numbers=numbers)


def _unrepeatable(
    facts: Sequence[Facts], ranks: tuple[int, ...], operators: list[str], numbers: dict[str, Any]
) -> CheckResult:
    who = "on all ranks" if len(ranks) == len(facts) else f"on {name_ranks(ranks)}"
    found = f"the same batch gave other bits from run to run {who}"
    fixed = all(facts[rank]["fixed"] for rank in ranks)
    if operators:
        found += f": {first_of(operators, _SHOWN)}"
    if fixed:
        cost = float(median(fact["cost"] for fact in facts if fact["cost"] is not None))
        advice = (
            "torch.use_deterministic_algorithms(True) gives the same bits each time; a step takes "
            f"{cost:.2g} times as long with it."
        )
        if any(fact["device"] == "cuda" for fact in facts):
            advice += " Set CUBLAS_WORKSPACE_CONFIG=:4096:8 as well, before the start."
    elif operators:
        advice = (
            "No flag of torch changes that. Replace the operators that are named, or accept that "
            "two runs of the training will differ."
        )
    else:
        found += ", and no operator of torch did when run twice"
        advice = (
            "The difference comes from outside of torch's operators: the time, random numbers that "
            "are not torch's, an order of threads, or memory that was never set. Look at what the "
            "model's forward pass calls."
        )
    alerts = _merged(facts, "alerts")
    if alerts and not fixed:
        advice += f" torch has no deterministic implementation of {first_of(alerts, _SHOWN)}."
    return CheckResult(Status.WARNING, found, advice, numbers, ranks)


def _run_all(
    module: nn.Module, batch: PlainBatch, device: torch.device, seconds: float
) -> dict[str, Any]:
    run = partial(_run, module, batch, device)
    began = time.monotonic()
    digests = [run()]  # the first run also warms up
    one = time.monotonic() - began

    plain_seconds: list[float] = []

    def room(runs: float, share: float = SHARE_OF_TIME) -> bool:
        usual = min([one, *plain_seconds])  # the first run is often slow
        return time.monotonic() - began + runs * usual < share * seconds

    flagged_seconds: list[float] = []
    flagged: list[int] = []
    alerts: set[str] = set()
    if not room(1, SHARE_OF_TWO):
        return {"declined": f"a run of one batch takes {one:.0f} s: raise --seconds to repeat it"}
    while len(digests) < RUNS and (room(2) or len(digests) < 2):
        _timed(run, digests, plain_seconds)
        if room(1):
            with _deterministic(alerts):
                _timed(run, flagged, flagged_seconds)
    operators: RepeatedOperators | None = None
    if room(6) or len(set(digests)) > 1:
        operators = RepeatedOperators(device)
        run(operators)
    return {
        "runs": len(digests),
        "different": len(set(digests)),
        "fixed": len(flagged) > 1 and len(set(flagged)) == 1,
        "flagged_runs": len(flagged),
        "cost": median(flagged_seconds) / median(plain_seconds) if flagged_seconds else None,
        "operators": {} if operators is None else dict(operators.differing),
        "operators_repeated": 0 if operators is None else operators.num_repeated,
        "alerts": sorted(alerts),
        "device": device.type,
    }


def _run(
    module: nn.Module,
    batch: PlainBatch,
    device: torch.device,
    mode: AbstractContextManager[Any] | None = None,
) -> int:
    with mode or nullcontext():
        return digest_of_run(module, batch, device, seed=_SEED)


def _timed(run: Run, digests: list[int], seconds: list[float]) -> None:
    began = time.perf_counter()
    digests.append(run())
    seconds.append(time.perf_counter() - began)


@contextmanager
def _deterministic(alerts: set[str]) -> Iterator[None]:
    """Use deterministic algorithms, and collect the operators that have none."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for warning in caught:
            found = _ALERT.match(str(warning.message))
            if found:
                alerts.add(found.group(1))
    finally:
        torch.set_warn_always(always)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[2:]


def _merged(facts: Sequence[Facts], key: str) -> list[str]:
    return sorted({str(name) for fact in facts for name in fact[key]})


class RepeatedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operator twice on the same inputs; the computation gets the first results.

    A comparison of two whole runs only shows the first operator that differs: all that follow
    differ as well. Here each operator repeats on its own, below autograd, in forward and backward
    alike. ``differing`` counts the calls that differed by name and pass
    (``aten::index_add in the backward pass``), ``num_repeated`` all that were repeated.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._on_device: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.num_repeated = 0
        self.differing: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and run it again where a repetition is meaningful."""
        kwargs = kwargs or {}
        if not _repeatable(func):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            inputs, others = _tree_map(_copied, (args, kwargs))
            again = self._after_same_state(func, inputs, others)
            result = func(*args, **kwargs)
            before = _tensors((args, kwargs, result))
            after = _tensors((inputs, others, again()))
        else:
            again = self._after_same_state(func, args, kwargs)
            result = func(*args, **kwargs)
            before = _tensors(result)
            after = _tensors(again())
        self.num_repeated += 1
        if not all(map(same_bits, before, after)):
            where = _BACKWARD if in_backward() else _FORWARD
            self.differing[f"{func._schema.name} {where}"] += 1
        return result

    def _after_same_state(self, func: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
        """Return a function that runs an operator again from the present random state."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return lambda: func(*args, **kwargs)
        leaves = _tree_flatten((args, kwargs))[0]
        generators = [value for value in leaves if isinstance(value, torch.Generator)]
        before = self._states(generators)

        def again() -> Any:
            after = self._states(generators)
            self._put_back(generators, before)
            try:
                return func(*args, **kwargs)
            finally:
                self._put_back(generators, after)

        return again

    def _states(self, generators: Sequence[torch.Generator]) -> list[Tensor]:
        """Return the states of given generators, and of torch's own."""
        states = [*(g.get_state() for g in generators), torch.get_rng_state()]
        if self._on_device is not None:
            states.append(self._on_device.get_rng_state(self._device))
        return states

    def _put_back(self, generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(state)
        torch.set_rng_state(states[len(generators)])
        if self._on_device is not None:
            self._on_device.set_rng_state(states[-1], self._device)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same bits, if they have plain bits."""
    if first is second or first.layout is not torch.strided or first.is_meta:
        return True
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_quantized or not first.numel():
        return True
    return torch.equal(_bits(first), _bits(second))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain if plain.dtype is torch.bool else plain.reshape(-1).view(torch.uint8)


def _repeatable(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace in _NO_REPEAT:
        return False
    name = schema.name.partition("::")[2].lstrip("_")
    return not (name.startswith(_UNINITIALISED) or getattr(func, "is_view", False))


def _copied(value: Any) -> Any:
    plain = isinstance(value, Tensor) and value.layout is torch.strided
    return value.detach().clone() if plain else value


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in _tree_flatten(values)[0] if isinstance(value, Tensor)]


STAGE = PreflightStage("determinism", look, {"determinism": _judge}, needs_group=False)
