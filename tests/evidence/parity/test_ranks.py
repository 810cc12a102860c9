from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import rankscope
from rankscope.bus.parity import OUTPUT, OUTPUT_GRADIENT, RankStep
from rankscope.evidence.parity.figures import FigureMeter, Labels, elements_among
from rankscope.evidence.parity.inside import LayerOutputs
from rankscope.evidence.parity.probe import ParityRecorder, RecordPlace
from rankscope.evidence.parity.start import load_tensors, save_tensors
from rankscope.tools.parity.reading import read_side
from support.loops import watch
from support.models import PassedOn
from support.ranks import on_ranks, run_ranks

SHAPES = {"wide": (6, 10), "odd": (5, 3, 2), "line": (7,)}


def whole_tensors():
    draw = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def layouts(tensor, mesh):
    last = tensor.dim() - 1
    yield distribute_tensor(tensor, mesh, [Shard(0), Replicate()])
    yield distribute_tensor(tensor, mesh, [Replicate(), Shard(last)])
    if last:
        yield distribute_tensor(tensor, mesh, [Shard(0), Shard(last)])
    term = tensor * (1 + mesh.get_local_rank(0)) / 3
    yield DTensor.from_local(term, mesh, [Partial(), Replicate()], run_check=False)


def measured_in_layouts(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    wholes = whole_tensors()
    meter = FigureMeter({n: t.numel() for n, t in wholes.items()}, torch.device("cpu"))
    found = []
    for name, tensor in wholes.items():
        for laid in layouts(tensor, mesh):
            figures = meter.measure([(name, laid)])
            rows = zip(figures.places, figures.squares_PQ, figures.sketches_PQK, strict=True)
            found.append((name, isinstance(laid.placements[0], Partial), list(rows)))
    return found


def test_figures_of_shards_add_up_to_those_of_the_whole(in_layouts):
    of_ranks = [measured for measured, _ in in_layouts[0]]
    wholes = whole_tensors()
    meter = FigureMeter({n: t.numel() for n, t in wholes.items()}, torch.device("cpu"))
    for cases in zip(*of_ranks, strict=True):
        name, partial, _ = cases[0]
        parts = {}
        for _, _, rows in cases:
            for place, squares, sketch in rows:
                known = parts.setdefault(place, (squares, sketch))
                np.testing.assert_array_equal(known[1], sketch)  # copies agree
        expected = meter.measure([(name, wholes[name])])
        sketch = sum(each[1] for each in parts.values())
        np.testing.assert_allclose(sketch, expected.sketches_PQK[0], atol=1e-5)
        if not partial:
            squares = sum(each[0] for each in parts.values())
            np.testing.assert_allclose(squares, expected.squares_PQ[0], rtol=1e-6)


def cut_flat(tensor, rank):
    """Return a parameter as ZeRO 3 keeps it: a part of the flat tensor, which is padded."""
    size, world = tensor.numel(), dist.get_world_size()
    length = -(-size // world)
    parameter = nn.Parameter(torch.empty(0))
    padded = torch.cat([tensor.flatten(), torch.zeros(length * world - size)])
    parameter.ds_tensor = padded[rank * length : (rank + 1) * length].clone()
    parameter.ds_shape, parameter.ds_numel = tensor.shape, size
    parameter.partition_numel = lambda: length
    parameter.ds_process_group = dist.group.WORLD
    return parameter


def saved_and_loaded(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2))
    wholes = whole_tensors()
    ok = []
    for number, shard in enumerate(([Shard(0), Replicate()], [Shard(0), Shard(0)])):
        place = folder / str(number)
        laid = {n: distribute_tensor(t, mesh, shard) for n, t in wholes.items()}
        save_tensors(place, rank, laid)
        dist.barrier()
        plain = {n: torch.zeros(s) for n, s in SHAPES.items()}
        load_tensors(place, plain)
        ok.append(all(torch.equal(plain[n], t) for n, t in wholes.items()))
        other = {
            n: distribute_tensor(torch.zeros(s), mesh, [Replicate(), Shard(len(s) - 1)])
            for n, s in SHAPES.items()
        }
        load_tensors(place, other)
        ok.append(all(torch.equal(other[n].full_tensor(), t) for n, t in wholes.items()))
        flat = {n: cut_flat(torch.zeros(s), rank) for n, s in SHAPES.items()}
        load_tensors(place, flat)
        expected = {n: cut_flat(t, rank) for n, t in wholes.items()}
        ok.append(all(torch.equal(flat[n].ds_tensor, expected[n].ds_tensor) for n in SHAPES))
        save_tensors(folder / f"flat {number}", rank, flat)
        dist.barrier()
        for target in (plain, other):
            for tensor in target.values():
                tensor.zero_()
            load_tensors(folder / f"flat {number}", target)
        ok.append(all(torch.equal(plain[n], t) for n, t in wholes.items()))
        ok.append(all(torch.equal(other[n].full_tensor(), t) for n, t in wholes.items()))
    return ok


def both(rank, folder):
    return measured_in_layouts(rank), saved_and_loaded(rank, Path(folder))


in_layouts = on_ranks(both, 4)


def test_a_start_goes_from_one_layout_to_another(in_layouts):
    assert all(all(loaded) for _, loaded in in_layouts[0])


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 4))


@pytest.mark.parametrize("size", [200, 1 << 21])
def test_rounding_of_the_norm_that_clips_is_measured(tmp_path, size):
    vector = nn.Linear(size, 1, bias=False)
    recorder = ParityRecorder(vector, RecordPlace(tmp_path), 1)
    optimizer = torch.optim.SGD(vector.parameters(), lr=0.1)
    recorder.on_inputs((torch.zeros(1),), {})
    vector.weight.grad = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
    recorder.see_update(optimizer)
    optimizer.step()
    recorder.after_update(optimizer)
    recorder.close()
    error = abs(vector.weight.grad.norm().double() / vector.weight.grad.double().norm() - 1)
    [step] = [RankStep.unpack(file.read_bytes()) for file in tmp_path.rglob("step-*.bin")]
    assert step.facts["norm rounding"] == pytest.approx(float(error), rel=0.05, abs=1e-7)


def train(rank, folder, watched):
    torch.manual_seed(rank)
    wrapped = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    scope = None
    if watched:
        scope = watch(wrapped, optimizer, run_dir=folder / "run", parity=2)
    for _ in range(4):
        wrapped(torch.randn(3, 6)).square().mean().backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    if scope is not None:
        scope.close()
    state = [value for each in optimizer.state.values() for value in each.values()]
    kept = [*wrapped.parameters(), *state, torch.get_rng_state()]
    return [each.detach().numpy().copy() for each in kept]


def together(name, pieces):
    labels = Labels()
    for piece in pieces:
        labels = labels.plus(elements_among((), {name: piece})[name])
    return labels


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_elements_of_pieces_are_those_of_the_whole_and_of_nothing_else(kind):
    whole = (torch.arange(96).reshape(4, 24) * 7 % 64).to(kind)
    of_whole = together("tokens", [whole])
    assert of_whole.num_tokens == 96
    front, *middle, back = whole.chunk(4, dim=1)
    assert together("tokens", [torch.cat([front, back], dim=1), *middle]) == of_whole
    other = whole.clone()
    other[2, 5] += 1
    assert together("tokens", other.chunk(2, dim=1)) != of_whole


def test_masks_and_places_that_all_samples_share_do_not_count():
    mask, tokens = torch.ones(4, 4, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.int64)
    assert [*elements_among((tokens, torch.arange(4)), {"mask": mask})] == ["0"]


def train_twice(rank, folder):
    return [train(rank, folder, watched) for watched in (False, True)]


@pytest.mark.ranks
def test_a_watched_training_keeps_its_bits_and_leaves_a_record(tmp_path):
    for plain, watched in run_ranks(train_twice, 2, tmp_path):
        assert all(np.array_equal(one, two) for one, two in zip(plain, watched, strict=True))
    side = read_side(tmp_path / "run", "A")
    assert sorted(side.steps) == [0, 1]
    assert side.world == 2
    assert side.drawn
    assert side.steps[0].facts["limits"] == [0.1]
    assert set(side.steps[0].counters.values()) == {1.0}
    assert not side.steps[0].unequal
    norms = [w.norm for w in side.steps[0].figures["gradient"].values()]
    assert np.hypot.reduce(norms) == pytest.approx(0.1, rel=1e-3)


def test_a_failure_ends_the_record_and_not_the_training(tmp_path, caplog):
    recorder = ParityRecorder(model(), RecordPlace(tmp_path / "parity"), 3)
    recorder._meter = None
    recorder.on_inputs((torch.ones(2, 6),), {})
    assert not recorder.active
    assert "parity records no more of this training" in caplog.text
    with pytest.raises(rankscope.RankscopeError, match="rank 0 of A could not be recorded"):
        read_side(tmp_path, "A")


def test_an_output_that_the_loss_leaves_alone_has_no_gradient():
    torch.manual_seed(0)
    heads = nn.ModuleDict({"used": nn.Linear(3, 2), "alone": nn.Linear(3, 2)})
    taken = []
    LayerOutputs(heads, lambda *found: taken.append(found), lambda: True)
    batch = torch.randn(4, 3)
    used, _ = PassedOn.apply(*(head(batch) for head in heads.values()))
    used.sum().backward()
    kinds = [(OUTPUT, "used"), (OUTPUT, "alone"), (OUTPUT_GRADIENT, "used")]
    assert [found[:2] for found in taken] == kinds
    assert all(isinstance(tensor, torch.Tensor) for _, _, tensor in taken)
