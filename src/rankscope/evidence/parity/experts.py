"""Experts that are dealt out over ranks, each rank's under the same names: which of all they are.

Megatron-core and DeepSpeed mark the parameters of such experts by ``allreduce = False``. A rank's
experts are numbered from 0, or lie in one tensor, one after the other. The layer around them holds
the ranks over which all experts are dealt out in order (``ep_group``).
"""

import re
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from rankscope.errors import UnsupportedError
from rankscope.evidence.parity.held import size_of
from rankscope.evidence.parity.naming import Portion
from rankscope.gradients.names import canonical_name


class _Share(NamedTuple):
    """The experts of this rank, ``own`` of them, among those of ``num_ranks`` ranks."""

    layer: str  # the layer around them
    rank: int
    num_ranks: int
    own: int


class DealtExperts:
    """Which of all experts a rank's are.

    Attributes:
        pieces: What the parameters of this rank's experts are among those of all experts, by name.

    Raises:
        UnsupportedError: It is not known over which ranks the experts are dealt out.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._shares = {
            name: _Share(
                name,
                dist.get_rank(each.ep_group),
                dist.get_world_size(each.ep_group),
                int(each.num_local_experts),
            )
            for name, each in module.named_modules()
            if isinstance(getattr(each, "ep_group", None), dist.ProcessGroup)
            and hasattr(each, "num_local_experts")
        }
        self.pieces: dict[str, Portion] = {}
        for name, parameter in module.named_parameters():
            if not is_dealt_out(parameter):
                continue
            share = self._share_of(name)
            if share is None:
                raise UnsupportedError(
                    f"{name} stands for another expert on each rank, by one name for all, and no "
                    "layer around it holds their ranks as ep_group"
                )
            own = size_of(parameter)
            if _number_in(name, module, share):
                piece = Portion(canonical_name(self.name(name)), own, 0)
            else:
                whole = (own[0] * share.num_ranks, *own[1:])
                piece = Portion(canonical_name(name), whole, own[0] * share.rank)
            self.pieces[canonical_name(name)] = piece

    def name(self, own: str) -> str:
        """Return the name of a rank's layer or parameter with its expert's number among all."""
        share = self._share_of(own)
        number = None if share is None else _number_in(own, self._module, share)
        if share is None or number is None:
            return own
        start, stop = number.span()
        return f"{own[:start]}{int(number.group()) + share.rank * share.own}{own[stop:]}"

    def _share_of(self, name: str) -> _Share | None:
        around = [each for each in self._shares if not each or f"{name}.".startswith(f"{each}.")]
        return self._shares[max(around, key=len)] if around else None


def is_dealt_out(parameter: Tensor) -> bool:
    """Return whether other ranks may have another expert under the name of a parameter."""
    return not getattr(parameter, "allreduce", True)


def _number_in(name: str, module: nn.Module, share: _Share) -> re.Match[str] | None:
    """Return where a name has the number of an expert among a rank's own; None: nowhere.

    It is the index in a list of modules, or the end of a parameter's name, as in ``weight0``. A
    list around the layer of the experts, such as that of all layers, has no such number.
    """
    at: Any = module.get_submodule(share.layer)
    count = share.own
    for part in re.compile(r"[^.]+").finditer(name, len(share.layer)):
        if isinstance(at, nn.ModuleList) and len(at) == count and _holds_experts(at):
            return part
        if part.end() == len(name):
            ending = re.compile(r"\d+$").search(name, part.start())
            stem = name[part.start() : ending.start()] if ending else ""
            numbered = stem and all(
                isinstance(getattr(at, f"{stem}{number}", None), Tensor) for number in range(count)
            )
            return ending if numbered else None
        at = getattr(at, part.group())
    return None


def _holds_experts(modules: nn.Module) -> bool:
    return any(is_dealt_out(parameter) for parameter in modules.parameters())
