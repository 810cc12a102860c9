"""Which samples each worker draws: identity, amounts, order over epochs and restarts."""

import numpy as np

from rankscope.bus.evidence import (
    Array,
    Compared,
    Compares,
    DType,
    Evidence,
    Source,
    Table,
    Tail,
    declare,
)

# fmt: off
COLUMNS = (
    *declare(
        Table.STEPS,
        ("samples_drawn", DType.INT, "samples", Source.DERIVED, Tail.NONE, "samples in the global batch"),
        ("samples_distinct", DType.INT, "samples", Source.DERIVED, Tail.LOW, "different samples in the global batch"),
    ),
    *declare(
        Table.WORKERS,
        ("num_samples", DType.INT, "samples", Source.LOCAL, Tail.NONE, "samples in the local batch", Compared("number of samples", observed=False, by=Compares.AMOUNTS)),
        ("sequence_length", DType.FLOAT, "tokens", Source.LOCAL, Tail.NONE, "tokens per sample that enter the model, padding included: the mean over samples; null unless token ids do", Compared("sequence length", observed=False, by=Compares.AMOUNTS)),
        ("padding", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "share of these tokens that the attention mask leaves out; null without a mask", Compared("share of padding", relative=False, observed=False, by=Compares.AMOUNTS)),
        ("padded_left", DType.FLOAT, "", Source.LOCAL, Tail.NONE, "share of the padded samples that are padded on the left and not on the right; null where none is padded on one side alone"),
        ("micro_batches", DType.INT, "micro-batches", Source.LOCAL, Tail.NONE, "forward passes behind the local gradient"),
        ("idle_passes", DType.INT, "forward passes", Source.LOCAL, Tail.NONE, "forward passes in training that have no part in the gradient: one whose loss is NaN and is left out, or the first of sharpness-aware minimisation"),
        ("samples_named", DType.BOOL, "", Source.LOCAL, Tail.NONE, "whether the training names its samples, or their rows in the data set are known and the workers have the same; else digests of their content stand for them"),
        ("loader_repeats", DType.INT, "batches", Source.LOCAL, Tail.NONE, "batches that each process of the worker's data loader has yielded; null unless it has several, with a data set that is a stream"),
        ("loader_goes_on", DType.BOOL, "", Source.LOCAL, Tail.NONE, "whether a data loader of torch's feeds the training, and was not read to its end with this step"),
        ("rows_digest", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of the rows that the data set of the worker's loader stores; null unless the row of each sample is known"),
        ("batch_digest", DType.INT, "", Source.LOCAL, Tail.NONE, "digest of the set of samples in the local batch"),
    ),
    *declare(
        Table.SAMPLES,
        ("samples", DType.INTS, "", Source.SEQUENCE, Tail.NONE, "one id or content digest per sample of the local batch"),
    ),
)
# fmt: on

ARRAYS = (
    Array("samples_B", np.int64),  # ids or digests of the samples
    Array("rows_B", np.int64),  # their rows in the data set; empty where these are unknown
)

INPUTS = "inputs"
"""Key of the model's inputs that stay the same."""

EVIDENCE = Evidence("samples", __name__, COLUMNS, arrays=ARRAYS, held=INPUTS)
