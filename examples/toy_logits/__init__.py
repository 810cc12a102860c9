"""How large the logits are: a kind of evidence of one's own.

PYTHONPATH=examples RANKSCOPE_EVIDENCE=toy_logits torchrun --nproc-per-node 2 train.py
"""

from rankscope.bus.evidence import DType, Evidence, Source, Table, Tail, declare

COLUMNS = declare(
    Table.WORKERS,
    ("logit_max", DType.FLOAT, "", Source.LOCAL, Tail.HIGH, "largest magnitude of a logit"),
)
EVIDENCE = Evidence("toy_logits", __name__, COLUMNS)
