import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.core.step import MISSING_INT
from rankscope.exchange import Goodbye, Layout, PayloadError, WorkerStep

finite = st.floats(allow_nan=False, width=64)


def gather(layout: Layout, steps: list[WorkerStep]):
    return np.stack([layout.pack(step) for step in steps])


@given(
    loss=finite,
    digest=st.integers(-(2**62), 2**62),
    sketch=st.lists(st.floats(width=32, allow_nan=False), min_size=5, max_size=5),
    samples=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8),
    micro=st.lists(st.floats(-1e300, 1e300), max_size=4),
)
def test_what_is_packed_is_unpacked(loss, digest, sketch, samples, micro):
    layout = Layout(sketch_width=5, num_samples=8, num_micro=4)
    step = WorkerStep(
        step=7,
        values={"loss": loss, "batch_digest": digest, "nonfinite": True},
        sketch=np.array(sketch, np.float32),
        samples=np.array(samples, np.int64),
        micro_losses=np.array(micro),
        micro_weights=np.array(micro) * 2,
    )
    gathered = layout.unpack(gather(layout, [step, WorkerStep(7)]), step=7, time=1.0)
    assert not gathered.observed  # the second worker measured nothing
    assert gathered.workers["loss"][0] == loss
    assert gathered.workers["batch_digest"].tolist() == [digest, MISSING_INT]
    assert gathered.workers["nonfinite"].tolist() == [True, False]
    assert np.isnan(gathered.workers["loss"][1])
    assert gathered.samples[0].tolist() == samples
    assert gathered.micro_losses[0].tolist() == micro
    assert len(gathered.samples[1]) == len(gathered.micro_losses[1]) == 0
    both = layout.unpack(gather(layout, [step, step]), step=7, time=1.0)
    assert both.observed
    assert both.sketches_WK.tolist() == [np.array(sketch, np.float32).tolist()] * 2


def test_a_layout_grows_to_what_did_not_fit_and_says_so():
    layout = Layout(sketch_width=3, num_samples=4, num_micro=2)
    big = WorkerStep(0, samples=np.arange(9), micro_losses=np.ones(3), micro_weights=np.ones(3))
    messages = gather(layout, [WorkerStep(0), big])
    assert layout.unpack(messages, step=0, time=0).samples[1].tolist() == [0, 1, 2, 3]
    grown = layout.grown(messages)
    assert (grown.num_samples, grown.num_micro) == (16, 4)
    assert grown.unpack(gather(grown, [big]), step=0, time=0).samples[0].tolist() == list(range(9))
    assert grown.grown(gather(grown, [big])) == grown


def test_messages_of_another_step_or_schema_are_refused():
    layout = Layout(sketch_width=3)
    messages = gather(layout, [WorkerStep(4), WorkerStep(5)])
    with pytest.raises(PayloadError, match=r"expected step 4 .* got 5 from ranks \[1\]"):
        layout.unpack(messages, step=4, time=0)
    messages = gather(layout, [WorkerStep(4), WorkerStep(4)])
    messages[1, 0] ^= 1
    with pytest.raises(PayloadError, match=r"expected schema .* ranks \[1\]"):
        layout.unpack(messages, step=4, time=0)


def test_a_leaving_worker_is_named():
    layout = Layout(sketch_width=3)
    with pytest.raises(Goodbye, match=r"ranks \[1\] stopped monitoring at step 4"):
        layout.unpack(gather(layout, [WorkerStep(4), WorkerStep(4, leaving=True)]), step=4, time=0)
