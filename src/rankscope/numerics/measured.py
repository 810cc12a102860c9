"""What a measurement of sums is asked for, and what it returns, as plain values."""

from collections.abc import Iterator
from dataclasses import dataclass

from rankscope.errors import UsageError
from rankscope.numerics.summation import TYPES, Arithmetic, Divide

MAX_WORKERS = 1024
MAX_ORDERS = 1000
MAX_ELEMENTS = 8192


@dataclass(frozen=True, slots=True)
class SumOptions:
    """What is measured.

    Attributes:
        workers: World sizes, rising, each at least 2.
        orders: Orders to try, at least 2; up to five workers all there are are tried instead.
        types: Types of the buffer; 16-bit ones are summed in 32 bits and in 16 bits.
        seed: Decides the orders, and gradients that are made up.
        divide: When the sum is divided by W.
        max_elements: Elements that take part, at most; more are sampled by layer.

    Raises:
        UsageError: One of these cannot be.
    """

    workers: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    orders: int = 32
    types: tuple[str, ...] = TYPES
    seed: int = 0
    divide: Divide = Divide.BEFORE
    max_elements: int = MAX_ELEMENTS

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", tuple(sorted(set(self.workers))))
        if not self.workers or self.workers[0] < 2 or self.workers[-1] > MAX_WORKERS:
            raise UsageError(
                f"expected numbers of workers from 2 to {MAX_WORKERS}, got "
                f"{', '.join(map(str, self.workers)) or 'none'}"
            )
        if not 2 <= self.orders <= MAX_ORDERS:
            raise UsageError(f"expected from 2 to {MAX_ORDERS} orders, got {self.orders}")
        unknown = [name for name in self.types if name not in TYPES]
        if unknown or not self.types:
            raise UsageError(
                f"expected some of the types {', '.join(TYPES)}, got {', '.join(unknown) or 'none'}"
            )
        if self.max_elements < 1:
            raise UsageError(f"expected at least one element, got {self.max_elements}")

    @property
    def arithmetics(self) -> Iterator[Arithmetic]:
        """All combinations of types."""
        for inputs in self.types:
            for sums in dict.fromkeys(("float32", inputs)):
                yield Arithmetic(inputs, sums, self.divide)


@dataclass(frozen=True, slots=True)
class Ulps:
    """Distances over elements, in units in the last place; 99 % have at most ``p99``."""

    median: float
    p99: float
    largest: float


@dataclass(frozen=True, slots=True)
class PerElement:
    """Different values of one element, over elements."""

    mean: float
    largest: int


@dataclass(frozen=True, slots=True)
class World:
    """The gradients of one world size; the text of ``numerics.spread`` says what each number is."""

    workers: int
    made_up: int
    cosine: float
    cancellation: float
    noise_relative: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One world size, type and algorithm; ``numerics.spread`` says what each number is."""

    workers: int
    inputs: str
    sums: str
    result: str
    algorithm: str
    num_orders: int
    all_orders: bool
    distinct_results: int
    distinct_per_element: PerElement
    share_differing: float
    share_not_finite: float
    spread_ulp: Ulps
    spread_relative: float
    difference_relative: float
    error_relative: float
    error_ulp: Ulps
    predicted_relative: float
    bound_relative: float


@dataclass(frozen=True, slots=True)
class LayerError:
    """One layer, type and algorithm; the text of ``numerics.spread`` says what each number is."""

    layer: str
    num_elements: int
    workers: int
    inputs: str
    sums: str
    result: str
    algorithm: str
    error_relative: float
    error_ulp: Ulps
    predicted_relative: float
    bound_relative: float
    cosine: float
