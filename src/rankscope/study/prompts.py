"""The two prompt templates of the Alpaca instruction format.

A record with an input is shown as instruction, input and response; a record whose input is empty
leaves the input section out. The response follows the last heading directly. Placeholders such as
``<noinput>`` that some data sets hold are inputs like any other.
"""

from typing import Protocol

INSTRUCTION_HEAD = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n"
)
INSTRUCTION_HEAD_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
)
INPUT_HEAD = "\n\n### Input:\n"
RESPONSE_HEAD = "\n\n### Response:"

FIXED_TEXTS = (INSTRUCTION_HEAD, INSTRUCTION_HEAD_WITH_INPUT, INPUT_HEAD, RESPONSE_HEAD)
"""The parts of the templates that do not depend on the record."""


class Instructed(Protocol):
    """Anything with an instruction and an input."""

    @property
    def instruction(self) -> str:
        """What to do."""

    @property
    def input(self) -> str:
        """What to do it with; may be empty."""


def prompt(record: Instructed) -> str:
    """Return everything that a model sees before the response begins.

    >>> from rankscope.study.data import Record
    >>> prompt(Record(0, "Add them.", "1, 2", "3")).splitlines()[-4:]
    ['### Input:', '1, 2', '', '### Response:']
    """
    if record.input.strip():
        head = INSTRUCTION_HEAD_WITH_INPUT + record.instruction + INPUT_HEAD + record.input
    else:
        head = INSTRUCTION_HEAD + record.instruction
    return head + RESPONSE_HEAD
