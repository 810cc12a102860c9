"""What sets apart the workers whose canary differs."""

from collections.abc import Mapping
from typing import Any

from rankscope.bus.messages import Columns, Combiner, Layout, Messages
from rankscope.bus.step import MISSING_INT
from rankscope.evidence.canary.compare import NAMES, compare_programs
from rankscope.evidence.canary.verdict import CanaryCause, judge, results_in


class ComparedPrograms(Combiner):
    """Compares the programs of all workers in a step whose canary differs."""

    def combine(self, messages: Messages, columns: Columns) -> Mapping[str, Any]:
        """Return what sets the differing workers apart, as differences."""
        results = results_in(columns)
        if results is None or (columns["canary_program"] == MISSING_INT).any():
            return {}
        verdict = judge(results)
        if verdict.verdict is CanaryCause.DATA:
            return {}
        programs_W = [names[NAMES] for names in messages.named]
        return {"differences": compare_programs(programs_W, verdict.ranks)}


def make_combiner(layout: Layout) -> ComparedPrograms:
    """Return the combiner of programs."""
    return ComparedPrograms()
