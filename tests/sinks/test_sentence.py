"""How sinks put a finding into one sentence."""

from rankscope.bus.finding import FindingEvent
from rankscope.sinks.base import sentence
from sinks.findings import FINDING, finding


def test_the_sentence_names_ranks_steps_and_what_to_do():
    text = sentence(FINDING, FindingEvent.OPENED)
    assert text.startswith("warning: data.duplicate_batches opened on rank 1, 3 (steps 2 to 5).")
    assert text.endswith("Next: Look at the sampler.")
    assert "0, 1, 2, 3, 4, 5, 6, 7 and 92 more" in sentence(finding(ranks=tuple(range(100))))
    assert " on rank" not in sentence(finding(ranks=()))
