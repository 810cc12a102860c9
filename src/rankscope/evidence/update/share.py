"""One worker's share of an audited update: numbers, by parameter."""

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from rankscope.bus.packing import PackedError, pack_arrays, unpack_arrays

FIELDS = (
    *("elements", "expected", "actual", "product", "distance", "spread", "weights", "largest"),
    *("along_weights", "turned_weights", "resting", "driven", "rows", "still_rows"),
    *("moved", "copied", "later"),
)
"""Numbers of one parameter's part on one worker, see :class:`PartOfUpdate`."""


@dataclass(frozen=True, slots=True)
class PartOfUpdate:
    """What is known of one parameter's update on one worker.

    Attributes:
        name: The parameter's name.
        optimizer: The name of the optimizer's class.
        dtype: The parameter's type.
        shared: Whether ranks hold parts of it.
        learning_rate: Of its group; NaN if unknown.
        decay: The weight decay of its group; NaN if unknown.
        copied_to: The type of the model's own copy; empty where the optimizer holds the model's
            parameter itself.
        random: Whether the optimizer draws random numbers.
        alone: Axes of the mesh along which each rank's part was updated by itself, as a trial.
        numbers: Sums over the elements, in the order of :data:`FIELDS`. ``expected`` and ``actual``
            are squared norms of the update, ``product`` their inner product, ``distance`` that of
            their difference, ``spread`` that of the effect of rounding, ``weights`` that of the
            parameter, ``largest`` its largest magnitude; ``along_weights`` and ``turned_weights``
            are the products of it with the difference and with the expected update. ``resting`` of
            ``driven`` elements other than 0 with a gradient do not move; ``still_rows`` of ``rows``
            rows are not moved, and should be. ``moved`` is the squared change of the parameter
            between the forward pass and the update, ``later`` that between the update and the end
            of the step, ``copied`` the squared distance of the model's own copy there.
        trials: For each of ``alone``, the squared distance of the update from that trial.
    """

    name: str
    optimizer: str
    dtype: str
    shared: bool
    learning_rate: float
    decay: float
    copied_to: str
    random: bool
    alone: tuple[str, ...]
    numbers: NDArray[np.float64]
    trials: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class UpdateShare:
    """One worker's share of an audited update.

    Attributes:
        parts: Parts of the parameters, in order.
        num_parameters: How many parameters the optimizers train.
        hooks: What runs after the optimizer's own step, and may change its result.
        declined: Why the update of some optimizer was not computed again, by its class.
    """

    parts: tuple[PartOfUpdate, ...] = ()
    num_parameters: int = 0
    hooks: tuple[str, ...] = ()
    declined: dict[str, str] = field(default_factory=dict)

    def pack(self) -> bytes:
        """Return its bytes."""
        plain = [
            {f.name: getattr(one, f.name) for f in fields(one) if f.name != "numbers"}
            for one in self.parts
        ]
        header = {
            "parts": plain,
            "num_parameters": self.num_parameters,
            "hooks": list(self.hooks),
            "declined": self.declined,
        }
        numbers = [one.numbers for one in self.parts] or [np.empty(0)]
        return pack_arrays(header, [np.stack(numbers)])

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> "UpdateShare":
        """Read a share.

        Raises:
            PackedError: These bytes hold none.
        """
        header, arrays = unpack_arrays(content)
        try:
            (numbers_PF,) = arrays
            parts = tuple(
                PartOfUpdate(**{**one, "alone": tuple(one["alone"])}, numbers=numbers)
                for one, numbers in zip(header["parts"], numbers_PF, strict=False)
            )
            share = cls(
                parts,
                int(header["num_parameters"]),
                tuple(map(str, header["hooks"])),
                {str(name): str(why) for name, why in header["declined"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PackedError(f"these bytes hold no part of an update ({error})") from error
        if any(len(one.numbers) != len(FIELDS) for one in share.parts):
            raise PackedError("these bytes hold an update of another kind")
        return share
