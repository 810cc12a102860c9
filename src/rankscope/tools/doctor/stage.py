"""The parts of the preflight: stages, which rank 0 judges, and functions of the user's."""

import json
import os
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from rankscope import RankscopeError
from rankscope.errors import UsageError
from rankscope.tools.functions import find_function

c10d: Any = dist  # its stores have no types
Store = Any

_ADDRESS = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

PAUSE = 0.01  # seconds between two looks at the store


@dataclass(frozen=True, slots=True)
class RankPlace:
    """This worker's place among the others.

    ``num_ranks`` is the number that the launcher promises, ``local_rank`` and ``num_local`` count
    on this host; ``launched`` means that a launcher such as ``torchrun`` started this worker.
    """

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local: int = 1
    launched: bool = False


def find_place(environment: Mapping[str, str]) -> RankPlace:
    """Read the launcher's variables; UsageError if some are missing, or do not fit together."""
    if "RANK" not in environment:
        return RankPlace()
    missing = [name for name in _ADDRESS if not environment.get(name)]
    if missing:
        raise UsageError(
            f"RANK is set and {' and '.join(missing)} not: the workers cannot find each other; "
            "start rankscope doctor with torchrun"
        )
    rank = _number(environment, "RANK")
    num_ranks = _number(environment, "WORLD_SIZE")
    if not 0 <= rank < num_ranks:
        raise UsageError(
            f"expected RANK from 0 to WORLD_SIZE − 1, got RANK={rank} and WORLD_SIZE={num_ranks}; "
            "correct what the launcher sets"
        )
    return RankPlace(
        rank,
        num_ranks,
        _number(environment, "LOCAL_RANK", rank),
        _number(environment, "LOCAL_WORLD_SIZE", 1),
        launched=True,
    )


def open_stores(place: RankPlace, seconds: float) -> tuple[Store, Store]:
    """Open two connections to the place where workers meet: one for each of a worker's threads."""
    if not place.launched:
        store = c10d.HashStore()
        return store, store
    hosting = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    prefix = f"rankscope-doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    stores = (_connect(seconds, host=hosting), _connect(seconds, host=False))
    first, second = (c10d.PrefixStore(prefix, store) for store in stores)
    return first, second


def choose_device(place: RankPlace) -> torch.device:
    """Return this worker's device, and make it the current one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.get_default_backend_for_device(accelerator) == "gloo":
        return torch.device("cpu")  # none, or one without a backend
    device = torch.device(accelerator.type, place.local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def choose_backend(place: RankPlace, device: torch.device) -> str:
    """Return the device's own backend; gloo where workers share an accelerator."""
    if device.type != "cpu" and place.num_local > torch.accelerator.device_count():
        return "gloo"
    return dist.get_default_backend_for_device(device)


class Meeting:
    """One worker's view of the store in which all workers post.

    They use no collective: a worker that hangs or fails holds up no other, and those that wait for
    its result have the worker's rank.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self.store = store
        self.rank = rank
        self.num_ranks = num_ranks

    def post(self, topic: str, value: Any) -> None:
        """Post this worker's value on a topic: plain JSON values."""
        self.announce(f"{topic}/{self.rank}", value)

    def announce(self, topic: str, value: Any = True) -> None:
        """Set the value of a topic that all workers share."""
        self.store.set(topic, zlib.compress(json.dumps(value).encode()))

    def announced(self, topic: str) -> Any:
        """Return the value that was announced, or None before that."""
        return self._get(topic) if self.store.check([topic]) else None

    def posted(self, topic: str) -> dict[int, Any]:
        """Return the values that workers have posted on a topic so far, by rank."""
        keys = {rank: f"{topic}/{rank}" for rank in range(self.num_ranks)}
        if not self.store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: self._get(key) for rank, key in keys.items()}

    def collect(self, topic: str, until: float) -> dict[int, Any]:
        """Return the values by rank once all workers have posted, or at a time of ``monotonic``."""
        keys = [f"{topic}/{rank}" for rank in range(self.num_ranks)]
        while not self.store.check(keys) and time.monotonic() < until:
            time.sleep(PAUSE)
        return self.posted(topic)

    def wait(self, topics: tuple[str, ...], until: float) -> bool:
        """Wait until one of the topics was announced; return whether it was in time."""
        while not any(self.store.check([topic]) for topic in topics):
            if time.monotonic() > until:
                return False
            time.sleep(PAUSE)
        return True

    def count_in(self, topic: str) -> int:
        """Return how many have called this for a topic, this call included."""
        return int(self.store.add(topic, 1))

    def _get(self, key: str) -> Any:
        return json.loads(zlib.decompress(self.store.get(key)))


def _connect(seconds: float, *, host: bool) -> Store:
    address = os.environ["MASTER_ADDR"]
    port = _number(os.environ, "MASTER_PORT")
    try:
        return c10d.TCPStore(
            address,
            port,
            is_master=host,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"rank {os.environ['RANK']} cannot reach rank 0 at {address}:{port} within "
            f"{seconds:g} s; check MASTER_ADDR, MASTER_PORT and that rank 0 was started"
        ) from error


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError as error:
        raise UsageError(
            f"expected a whole number in {name}, got {text!r}; correct what the launcher sets"
        ) from error


TITLES = {
    "topology": "Ranks and devices",
    "environment": "Environment",
    "model_function": "Function of --model",
    "optimizer_function": "Function of --optimizer",
    "loader_function": "Function of --loader",
    "process_group": "Process group",
    "collectives": "Collectives",
    "repeatability": "Repeated sums",
    "speed": "Speed",
    "bandwidth": "Bandwidth",
    "stragglers": "Slow ranks",
    "model": "Model and optimizer",
    "parameters": "Parameters",
    "buffers": "Buffers",
    "optimizer": "Optimizer",
    "random_numbers": "Random numbers",
    "batch_norm": "Batch normalisation",
    "loader": "Data",
    "shards": "Shards",
    "batch_counts": "Batch counts",
    "loss_weighting": "Loss weighting",
    "epoch_order": "Epoch order",
    "determinism": "Repeated steps",
}
"""Title of each stage and each check."""

Facts = Mapping[str, Any]  # a worker's measurements for a check: plain JSON values


class Status(StrEnum):
    """How a check ended, mildest first."""

    SKIPPED = "skipped"
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def level(self) -> int:
        """Its place among all statuses: an error is the highest."""
        return list(Status).index(self)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the preflight's table.

    ``found`` is a sentence; ``advice`` is empty when there is nothing to do; ``numbers`` are plain
    JSON values; ``ranks`` is empty when it concerns all alike; ``name`` is one of ``TITLES``, which
    the stage fills in.
    """

    status: Status
    found: str
    advice: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    name: str = ""

    @property
    def title(self) -> str:
        """The title of the check."""
        return TITLES[self.name]

    def to_json(self) -> dict[str, Any]:
        """Return the result as the command's JSON document holds it."""
        return {**asdict(self), "title": self.title}


def worst(results: Sequence[CheckResult]) -> Status:
    """Return the gravest status of all; ``OK`` when nothing was worse."""
    return max((result.status for result in results), key=lambda s: s.level, default=Status.OK)


@dataclass(frozen=True, slots=True)
class Options:
    """The user's options.

    Functions are ``MODULE:FUNCTION`` or None; ``batches`` is the most that each rank reads,
    ``seconds`` the time that a worker may take for one stage.
    """

    model: str | None = None
    optimizer: str | None = None
    loader: str | None = None
    batches: int = 200
    seconds: float = 20.0


@dataclass(slots=True)
class Bench:
    """The objects that a worker's checks work with.

    ``functions`` are the user's, by option; ``model`` is set once it was built, ``batch`` (the
    first one of the user's loader) once it was read.
    """

    place: RankPlace
    options: Options
    store: Store
    device: torch.device
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    model: Any = None
    batch: Any = None


Check = Callable[[Sequence[Facts]], CheckResult | None]


@dataclass(frozen=True, slots=True)
class PreflightStage:
    """A part of the preflight; ``topic`` is one of ``TITLES``, that of its result when unfinished.

    ``look`` measures on one worker. ``checks`` turn the facts of all workers, in rank order, into
    a result each, or none; their names are among ``TITLES``. ``together``: workers wait for each
    other inside, so after a failure of one of them nothing that needs the process group can follow.
    When this stage fails, those in ``blocks`` cannot follow; ``advice``: what to do when
    ``look`` fails.
    """

    topic: str
    look: Callable[[Bench], Facts]
    checks: Mapping[str, Check]
    together: bool = False
    needs_group: bool = True
    blocks: tuple[str, ...] = ()
    advice: str = ""

    @property
    def title(self) -> str:
        """Its title."""
        return TITLES[self.topic]

    def judge(self, facts: Sequence[Facts]) -> list[CheckResult]:
        """Return the results of its checks."""
        found = ((name, check(facts)) for name, check in self.checks.items())
        return [replace(result, name=name) for name, result in found if result]


_LIBRARIES = (f"{Path(sys.base_prefix)}/lib/", "site-packages", "dist-packages", "<frozen ")
MAX_MESSAGE = 160  # characters of an error's message

ALONE = CheckResult(Status.SKIPPED, "one rank has nobody to compare with")

FUNCTION_ADVICE = (
    "The function must work on each rank as in the training. The process group exists already: "
    "leave init_process_group out of it."
)

BLOCKS = {"model": "model", "optimizer": "model", "loader": "loader"}  # of each function


def not_given(topic: str, options: str = "") -> PreflightStage:
    """Return a stage that is skipped since its options (in words) were not given."""
    found = f"not asked for: give {options or f'--{topic} MODULE:FUNCTION'}"
    result = CheckResult(Status.SKIPPED, found)
    return PreflightStage(topic, lambda bench: {}, {topic: lambda facts: result}, needs_group=False)


def function_stage(option: str) -> PreflightStage:
    """Return the stage of a function that is named; it has no result when all is well."""

    def look(bench: Bench) -> Facts:
        name = getattr(bench.options, option)
        bench.functions[option] = find_function(f"--{option}", name)
        return {}

    return PreflightStage(
        topic=f"{option}_function",
        look=look,
        checks={},
        needs_group=False,
        blocks=(BLOCKS[option],),
        advice="The module must be importable on every host, and importing it must not start a "
        "training: keep that under if __name__ == '__main__'.",
    )


def in_one_line(error: BaseException) -> str:
    """Return an error and its place in one line: ``ValueError: too long (train.py:31)``."""
    lines = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    if isinstance(error, RankscopeError):
        return lines[0].strip() if lines else message
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f for f in reversed(frames) if _is_the_users(f.filename)), None)
    place = place or (frames[-1] if frames else None)
    where = f" ({Path(place.filename).name}:{place.lineno})" if place else ""
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE].rstrip()} …"
    return f"{message}{where}"


def where_it_is(frame: FrameType | None) -> str:
    """Return where a thread is: its innermost line outside of libraries, as words."""
    innermost = frame
    while frame is not None and not _is_the_users(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "an unknown place"
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


def _is_the_users(filename: str) -> bool:
    return not any(part in filename for part in _LIBRARIES) and not filename.startswith("<")
