"""Packs reports of steps for the training, without sketches."""

from dataclasses import fields, replace
from typing import Any

from numpy.typing import NDArray

from rankscope.bus.packing import pack_arrays, unpack_arrays
from rankscope.bus.replicas import StateDifference, StateKind
from rankscope.bus.step import GatheredStep, StepReport
from rankscope.errors import RankscopeError
from rankscope.record.states import put_back, take_out

_LEFT_OUT = {"sketches_WK", "group_sketches_WGK", "consensus", "trace", "differences"}
_TUPLES = {"samples", "micro_losses", "micro_weights", "micro_norms", "micro_scales", "groups"}


def pack_report(report: StepReport) -> bytes:
    """Return a report's bytes, without sketches, traces and the consensus."""
    gathered = report.gathered
    kept = {f.name: getattr(gathered, f.name) for f in fields(gathered) if f.name not in _LEFT_OUT}
    arrays: list[NDArray[Any]] = []
    state = {
        "gathered": kept,
        "differences": [
            [str(one.kind), one.name, one.digests_W, one.unchanged_W]
            for one in gathered.differences
        ],
        "values": dict(report.values),
        "derived": dict(report.derived),
        "cosines": report.cosines_WW,
        "group_cosines": report.group_cosine_rest_WG,
    }
    return pack_arrays(take_out(state, arrays), arrays)


def unpack_report(content: bytes) -> StepReport:
    """Return the report that :func:`pack_report` has packed.

    Raises:
        RankscopeError: It is damaged.
    """
    try:
        tree, arrays = unpack_arrays(bytearray(content))  # users may write into them
        packed: dict[str, Any] = put_back(tree, arrays.__getitem__)
        kept: dict[str, Any] = {
            n: tuple(v) if n in _TUPLES else v for n, v in packed["gathered"].items()
        }
        gathered = GatheredStep(sketches_WK=None, **kept)
        differences = tuple(
            StateDifference(StateKind(kind), name, digests_W, unchanged_W)
            for kind, name, digests_W, unchanged_W in packed["differences"]
        )
        return StepReport(
            replace(gathered, differences=differences),
            packed["values"],
            packed["derived"],
            packed["cosines"],
            packed["group_cosines"],
        )
    except (LookupError, TypeError, ValueError) as error:
        raise RankscopeError(f"a step's report cannot be read ({error!r})") from error
