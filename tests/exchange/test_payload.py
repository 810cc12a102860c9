from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.core.groups import group_parameters
from rankscope.core.replicas import StateDigests, StateKind
from rankscope.core.sections import cut_sections
from rankscope.core.step import MISSING_INT, MeasuredGradient
from rankscope.exchange import Goodbye, Layout, PayloadError, WorkerStep
from rankscope.exchange.payload import MAX_DIGESTS

SECTIONS = cut_sections(
    {"embedding": 3, "head": 5}, group_parameters(["embedding", "head"]), section_elements=4
)

finite = st.floats(allow_nan=False, width=64)


def gradient(sketch, norms=(), groups=(), residuals=(), gram=()):
    return MeasuredGradient(
        group_norms_G=np.array(norms),
        sketch_K=np.array(sketch, np.float32),
        group_sketches_GK=np.array(groups, np.float32).reshape(len(norms), -1 if len(norms) else 0),
        gram=np.array(gram),
        residuals=np.array(residuals),
    )


def test_the_product_with_the_reduced_gradient_travels_where_there_is_room():
    steps = [WorkerStep(7, gradient=replace(gradient([]), reduced_product=x)) for x in (2.5, -1e60)]
    layout = Layout(sketch_width=0, num_products=1)
    gathered = layout.unpack(gather(layout, steps), step=7, time=1.0)
    assert gathered.reduced_products_W.tolist() == [2.5, -1e60]
    layout = Layout(sketch_width=0)
    assert layout.unpack(gather(layout, steps), step=7, time=1.0).reduced_products_W is None


def gather(layout: Layout, steps: list[WorkerStep]):
    return np.stack([layout.pack(step) for step in steps])


@settings(deadline=None)
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
        gradient=gradient(sketch),
        samples=np.array(samples, np.int64),
        micro=np.array([micro, np.array(micro) * 2, np.array(micro) / 2, np.array(micro) + 1]),
    )
    gathered = layout.unpack(gather(layout, [step, WorkerStep(7)]), step=7, time=1.0)
    assert not gathered.observed  # the second worker measured nothing
    assert gathered.workers["loss"][0] == loss
    assert gathered.workers["batch_digest"].tolist() == [digest, MISSING_INT]
    assert gathered.workers["nonfinite"].tolist() == [True, False]
    assert np.isnan(gathered.workers["loss"][1])
    assert gathered.samples[0].tolist() == samples
    assert gathered.micro_losses[0].tolist() == micro
    assert gathered.micro_weights[0].tolist() == [value * 2 for value in micro]
    assert gathered.micro_norms[0].tolist() == [value / 2 for value in micro]
    assert gathered.micro_scales[0].tolist() == [value + 1 for value in micro]
    assert len(gathered.samples[1]) == len(gathered.micro_losses[1]) == 0
    both = layout.unpack(gather(layout, [step, step]), step=7, time=1.0)
    assert both.observed
    assert both.sketches_WK.tolist() == [np.array(sketch, np.float32).tolist()] * 2


def test_all_that_is_measured_of_a_gradient_travels():
    layout = Layout(
        sketch_width=3,
        groups=("embedding", "head"),
        group_width=2,
        sections=SECTIONS,
        audit_width=3,
        reduced_copies=2,
        gram_size=3,
    )
    steps = [
        WorkerStep(
            4, gradient=gradient([1, 2, 3], [0.5, 1.5], [[1, 2], [3, 4]], [2, 4, 6.5], [1, 2, 3])
        ),
        WorkerStep(4, gradient=gradient([4, 5, 6], [2.5, 3.5], [[5, 6], [7, 8]], [], [10, 20, 30])),
    ]
    gathered = layout.unpack(gather(layout, steps), step=4, time=0)
    assert gathered.groups == ("embedding", "head")
    assert gathered.group_norms_WG.tolist() == [[0.5, 1.5], [2.5, 3.5]]
    assert gathered.group_sketches_WGK.tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    np.testing.assert_array_equal(gathered.total_residuals_W, [2.0, np.nan])  # one knows nothing
    np.testing.assert_array_equal(gathered.residuals_WG, [[4.0, 6.5], [np.nan, np.nan]])
    assert gathered.reduced_copies == 2
    assert gathered.gram_WW.tolist() == [[11, 22], [22, 33]]
    silent = layout.without_gradient()
    assert silent.num_bytes < layout.num_bytes
    unmeasured = silent.unpack(gather(silent, steps), step=4, time=0)
    assert not unmeasured.observed
    assert unmeasured.sketches_WK is unmeasured.group_norms_WG is unmeasured.gram_WW is None
    assert unmeasured.residuals_WG is unmeasured.total_residuals_W is None


def test_a_layout_grows_to_what_did_not_fit_and_says_so():
    layout = Layout(sketch_width=3, num_samples=4, num_micro=2)
    big = WorkerStep(0, samples=np.arange(9), micro=np.arange(12.0).reshape(4, 3))
    messages = gather(layout, [WorkerStep(0), big])
    cut = layout.unpack(messages, step=0, time=0)
    assert cut.samples[1].tolist() == [0, 1, 2, 3]
    assert cut.micro_scales[1].tolist() == [9, 10]
    grown = layout.grown(messages)
    assert (grown.num_samples, grown.num_micro) == (16, 4)
    whole = grown.unpack(gather(grown, [big]), step=0, time=0)
    assert whole.samples[0].tolist() == list(range(9))
    assert whole.micro_scales[0].tolist() == [9, 10, 11]
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


class TestStateDigests:
    """What should be equal on several workers travels as digests; differences are told by name."""

    KINDS = (StateKind.PARAMETER, StateKind.BUFFER, StateKind.REDUCED)
    NAMES = ("weight", "mean", "weight")

    def state(self, digests, unchanged=(False, False, False), names=NAMES):
        return StateDigests(
            self.KINDS, names, np.array(digests, np.int64), np.array(unchanged, bool)
        )

    def unpack(self, states, replicas, own=None, layout=None):
        """Return the step that workers with such digests, and such replicas, make together."""
        layout = layout or Layout(sketch_width=3)
        steps = [
            WorkerStep(5, values={} if replica is None else {"replica": replica}, state=state)
            for state, replica in zip(states, replicas, strict=True)
        ]
        return layout.unpack(gather(layout, steps), step=5, time=0, state=own or states[0])

    def differences(self, *arguments, **options):
        found = self.unpack(*arguments, **options).differences
        return [(d.kind, d.name, d.digests_W.tolist(), d.unchanged_W.tolist()) for d in found]

    def test_equal_digests_are_no_difference(self):
        states = [self.state([2**63 - 1, -(2**63), 0]) for _ in range(3)]
        assert self.differences(states, [0, 0, 0]) == []

    def test_each_difference_has_its_kind_its_name_and_everybodys_digest(self):
        states = [
            self.state([2**63 - 1, -5, 7]),
            self.state([-(2**63), -5, 8], unchanged=[False, False, True]),
            self.state([2**63 - 1, -5, 7]),
        ]
        expected = [
            (StateKind.PARAMETER, "weight", [2**63 - 1, -(2**63), 2**63 - 1], [False] * 3),
            (StateKind.REDUCED, "weight", [7, 8, 7], [False, True, False]),
        ]
        for own in states:  # everybody learns the same
            assert self.differences(states, [0, 0, 0], own=own) == expected
        [parameter, _] = self.unpack(states, [0, 0, 0]).differences
        assert parameter.odd_ones_out(np.zeros(3, np.int64)) == (1,)

    def test_only_replicas_are_compared_but_buffers_are_compared_between_all(self):
        states = [self.state([shard, shard, shard]) for shard in (1, 2, 1, 2)]
        found = self.differences(states, [0, 1, 0, 1])
        assert found == [(StateKind.BUFFER, "mean", [1, 2, 1, 2], [False] * 4)]

    def test_workers_whose_items_differ_are_not_compared(self):
        states = [self.state([1, 2, 3]), self.state([9, 9, 9], names=("weight", "mean", "other"))]
        assert self.differences(states, [0, 0]) == []
        assert self.differences([self.state([1, 2, 3]), StateDigests()], [0, 0]) == []
        assert self.differences([self.state([1, 2, 3]), self.state([9, 2, 3])], [0, 0]) != []

    def test_they_travel_in_steps_without_a_measured_gradient(self):
        states = [self.state([1, 2, 3]), self.state([1, 2, 4])]
        silent = Layout(sketch_width=3).without_gradient()
        assert [d[0] for d in self.differences(states, [0, 0], layout=silent)] == ["reduced"]

    def test_there_is_room_for_as_many_as_a_step_may_have(self):
        names = tuple(f"layers.{number}" for number in range(MAX_DIGESTS))
        kinds = (StateKind.OPTIMIZER,) * MAX_DIGESTS
        one, other = (np.arange(MAX_DIGESTS, dtype=np.int64) for _ in range(2))
        other[-1] = -1
        flags = np.zeros(MAX_DIGESTS, bool)
        states = [StateDigests(kinds, names, digests, flags) for digests in (one, other)]
        last = (StateKind.OPTIMIZER, names[-1], [MAX_DIGESTS - 1, -1], [False, False])
        assert self.differences(states, [0, 0]) == [last]
