"""``rankscope replay``: the batches of a finding, run again on every rank."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from rankscope.bus.bundles import (
    ReplayBundle,
    load_bundle,
    results_to_json,
    verdict_to_json,
)
from rankscope.bus.canary import (
    CanaryCause,
    CanaryResults,
    CanaryVerdict,
    describe_size,
    why,
)
from rankscope.bus.words import all_workers, count, name_ranks, ranks_of_job
from rankscope.cli.output import (
    JsonOption,
    function_option,
    labelled,
    labels,
    plain,
    print_json,
    show,
    table,
    terminal,
)
from rankscope.errors import RunError, UsageError
from rankscope.files import to_plain
from rankscope.record import Run
from rankscope.record.stores import at_hand
from rankscope.stats.arrays import MISSING_INT

if TYPE_CHECKING:
    from rankscope.tools.replay import Replayed

_IGNORED = -100  # the label that torch's losses leave out
_LOOK = {True: ("●", "AGREES", "green"), False: ("◆", "DIFFERS", "red")}


def replay(
    bundle: Annotated[
        Path,
        typer.Argument(metavar="BUNDLE", help="A bundle: a directory under RUN/replay."),
    ],
    model: Annotated[
        str | None,
        function_option(
            "A function without arguments that returns the model to run the batches on."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The model's state dict: safetensors, or a file of torch.save."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the batches that a finding has saved, or run them again on every rank.

    Without --model: what the bundle holds, and what the canary inside the run has shown. With it,
    the suspect's batch runs twice and a peer's once, on every rank of torchrun or in this process:
    what follows the batch is data, what stays with a rank is its code, its state or its hardware.
    Exit code: 0 all ranks agree; 1 they do not; 2 bad usage or input.
    """
    if checkpoint is not None and model is None:
        raise UsageError("--checkpoint needs --model MODULE:FUNCTION: the model to load it into")
    bundle = at_hand(bundle)
    loaded = load_bundle(bundle)
    if model is None:
        with ranks_of_job(_info(bundle)):
            verdict = _show_saved(bundle, loaded, as_json=as_json)
    else:
        replayed = _run(loaded, model, checkpoint)
        if replayed is None:
            return
        verdict = replayed.verdict
        with ranks_of_job(_info(bundle)):
            _show_replayed(bundle, loaded, replayed, as_json=as_json)
    if verdict is not None and verdict.verdict is not CanaryCause.DATA:
        raise typer.Exit(1)


def _info(bundle: Path) -> Mapping[str, Any]:
    """Return ``run.json`` of the run that saved a bundle; empty where the bundle lies alone."""
    folder = bundle if bundle.is_dir() else bundle.parent
    try:
        return Run.open(folder.absolute().parent.parent).info
    except RunError:
        return {}


def _run(bundle: ReplayBundle, model: str, checkpoint: Path | None) -> "Replayed | None":
    """Run the batches on all ranks; None on all ranks but 0."""
    from rankscope.tools.replay import join_ranks, load_model
    from rankscope.tools.replay import replay as run  # torch is not needed to look at a bundle

    with join_ranks():
        return run(bundle, load_model(model, checkpoint))


def verdict_in_words(verdict: CanaryVerdict, results: CanaryResults, *, here: bool = False) -> str:
    """Return the meaning of a verdict on results, in one to three sentences.

    ``here``: the results are of the ranks of this job, not of the run's workers.
    """
    num_workers = len(results.losses_W)
    ranks = name_ranks(verdict.ranks, of_job=here)
    alone = len(verdict.ranks) == 1
    if verdict.verdict is CanaryCause.DATA:
        same = "in every bit" if verdict.exact else "up to rounding"
        if num_workers == 1:
            return (
                f"This process repeats its own result {same}. One process cannot tell data from "
                "code, parameters or hardware: run it under torchrun on the hosts of the run."
            )
        return (
            f"{all_workers(num_workers).capitalize()} agree on both batches {same}. If "
            f"{name_ranks([results.suspect])} differs in training, it differs by its data."
        )
    if verdict.distance != verdict.distance:
        return f"There is no result of {ranks}, so nothing can be concluded."
    size = describe_size(results, verdict.ranks)
    reason = why(verdict.verdict, verdict.reasons, verdict.hooks, compared=verdict.compared)
    if verdict.verdict is CanaryCause.NONDETERMINISTIC:
        repeats = "does not repeat its own result" if alone else "do not repeat their own results"
        some = num_workers > len(verdict.ranks) and verdict.compared
        others = f" The others repeat theirs, and {reason}." if some else ""
        return (
            f"{ranks.capitalize()} {repeats} on the same batch with the same random numbers: "
            f"{size}.{others or ' Something computes at random.'}"
        )
    if verdict.verdict is CanaryCause.INCONCLUSIVE:
        return (
            f"The workers compute different results from the same batch, and no majority shows "
            f"which of {ranks} is wrong: {size}. It is not the data; {reason}."
        )
    computes = "computes a different result" if alone else "compute different results"
    reason = f"{reason[:1].upper()}{reason[1:]}."
    return f"{ranks.capitalize()} {computes} from the same batch: {size}. {reason}"


def _show_saved(path: Path, bundle: ReplayBundle, *, as_json: bool) -> CanaryVerdict | None:
    if as_json:
        print_json(_described(path, bundle))
        return bundle.verdict
    console = terminal()
    _head(console, path, bundle)
    if bundle.results is None or bundle.verdict is None:
        show(console, plain("The run has not replayed these batches."))
        how = "Run them here"
    else:
        _show_verdict(console, bundle.verdict, bundle.results)
        _table(console, "The canary inside the run", bundle.results)
        console.print()
        how = "Run it again"
    command = f"rankscope replay {shlex.quote(str(path))} --model MODULE:FUNCTION"
    console.print(labelled(f"  {how}", command), soft_wrap=True)  # to be pasted
    console.print()
    return bundle.verdict


def _show_replayed(
    path: Path, bundle: ReplayBundle, replayed: "Replayed", *, as_json: bool
) -> None:
    if as_json:
        samples = [
            {"index": s.index, "digest": s.digest, "loss": to_plain(s.loss)} for s in replayed.worst
        ]
        here = {
            "results": results_to_json(replayed.results),
            "verdict": verdict_to_json(replayed.verdict),
            "worst_samples": samples,
            "peer_median_loss": to_plain(replayed.peer_median),
            "note": replayed.note,
        }
        print_json(_described(path, bundle) | {"replayed": here})
        return
    console = terminal()
    _head(console, path, bundle)
    _show_verdict(console, replayed.verdict, replayed.results, here=True)
    _table(console, "Replayed here", replayed.results, here=True)
    if bundle.results is not None:
        _table(console, "The canary inside the run", bundle.results)
    _samples(console, bundle, replayed)
    console.print()


def _head(console: Console, path: Path, bundle: ReplayBundle) -> None:
    console.print()
    show(console, plain(str(path), "dim"))
    on_suspicion = bundle.finding is not None
    first, second = ("Suspect", "Peer") if on_suspicion else ("One batch", "The other")
    rows = [
        ("Saved for", _reason(bundle)),
        ("Step", f"{bundle.step:,} of a run of {count(bundle.num_workers, 'worker')}"),
        (first, f"{name_ranks([bundle.suspect])}: {_contents(bundle, 0)}"),
        (second, f"{name_ranks([bundle.peer])}: {_contents(bundle, 1)}"),
        ("Autocast", bundle.autocast or "none"),
        ("Versions", ", ".join(f"{k} {v}" for k, v in sorted(bundle.versions.items()))),
    ]
    show(console, labels(rows))
    console.print()


def _reason(bundle: ReplayBundle) -> str:
    if bundle.finding is None:
        return {
            "scheduled": "a canary on schedule",
            "asked-for": "a canary that was asked for",
        }.get(bundle.reason, bundle.reason)
    return f"{bundle.finding.id} ({bundle.finding.severity}): {bundle.finding.explanation}"


def _contents(bundle: ReplayBundle, which: int) -> str:
    batch = bundle.batches[which]
    samples = count(len(batch.samples), "sample") if len(batch.samples) else "samples unknown"
    shapes = ", ".join("×".join(map(str, array.shape)) or "scalar" for array in batch.arrays[:6])
    more = ", …" if len(batch.arrays) > 6 else ""
    size = batch.num_bytes
    words = f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
    tensors = f"{count(len(batch.arrays), 'tensor')} ({shapes}{more})"
    return f"{samples}, {tensors}, {words}{_labels(bundle, which)}"


def _labels(bundle: ReplayBundle, which: int) -> str:
    """Return how many labels of a batch count: those of tensors that have -100 in either batch."""
    marked = {
        place
        for batch in bundle.batches
        for place, array in enumerate(batch.arrays)
        if array.dtype.kind == "i" and (array == _IGNORED).any()
    }
    arrays = bundle.batches[which].arrays
    counted = [(arrays[at] != _IGNORED) for at in sorted(marked) if at < len(arrays)]
    return "".join(f", {own.sum():,} of {own.size:,} labels count" for own in counted)


def _show_verdict(
    console: Console, verdict: CanaryVerdict, results: CanaryResults, *, here: bool = False
) -> None:
    agrees = verdict.verdict is CanaryCause.DATA
    sign, word, colour = _LOOK[agrees]
    cause = f"  {verdict.verdict}"
    if agrees and len(results.losses_W) == 1:  # which shows nothing of the others
        word = "REPEATS"
        cause = ""
    show(console, Text.assemble((f"{sign} {word}", f"bold {colour}"), (cause, "dim")))
    show(console, plain(verdict_in_words(verdict, results, here=here)))


def _table(console: Console, title: str, results: CanaryResults, *, here: bool = False) -> None:
    console.print()
    show(console, Text(title, style="bold underline"))
    numbers = ["On\nrank"]
    heads = [*numbers]
    for rank in (results.suspect, results.peer):
        name = name_ranks([rank]).capitalize()
        value = "output" if results.projected else "loss"
        numbers += [f"{name}'s\nbatch:\n{value}", f"{name}:\ngradient\nnorm"]
        heads += [*numbers[-2:], "\n\nbits"]
    grid = table(*heads, "Repeats\nitself", right=numbers)
    for rank, digest in enumerate(results.digests_W):
        missing = digest == MISSING_INT
        grid.add_row(
            name_ranks([rank], of_job=here).removeprefix("rank "),
            f"{results.losses_W[rank]:.6g}",
            f"{results.norms_W[rank]:.6g}",
            _bits(results.digests_W, rank),
            f"{results.peer_losses_W[rank]:.6g}",
            f"{results.peer_norms_W[rank]:.6g}",
            _bits(results.peer_digests_W, rank),
            "no result" if missing else "yes" if digest == results.again_W[rank] else "no",
        )
    show(console, grid)
    what = "loss"
    if results.projected:
        what = "output"
        show(console, plain("Output: a projection of what the model returns, not a loss.", "dim"))
    show(console, plain(f"Equal letters: equal bits of {what} and gradient.", "dim"))


def _samples(console: Console, bundle: ReplayBundle, replayed: "Replayed") -> None:
    if not replayed.worst:
        if replayed.note:
            console.print()
            show(console, plain(replayed.note[0].upper() + replayed.note[1:] + "."))
        return
    console.print()
    who = name_ranks([bundle.suspect]).capitalize()
    value = "projection of the outputs" if replayed.results.projected else "loss"
    title = f"{who}'s samples with the largest {value}, each alone, in evaluation mode"
    show(console, Text(title, style="bold underline"))
    heads = ("Place in the batch", value.split()[0].capitalize(), "Digest")
    grid = table(*heads, right=heads)
    for sample in replayed.worst:
        grid.add_row(str(sample.index), f"{sample.loss:.4g}", str(sample.digest))
    show(console, grid)
    show(
        console,
        plain(f"Median of {name_ranks([bundle.peer])}'s samples: {replayed.peer_median:.4g}"),
    )


def _bits(digests_W: Any, rank: int) -> str:
    """Return a letter that equal digests share; ``a`` for the most usual."""
    digests = [int(digest) for digest in digests_W]
    order = sorted(dict.fromkeys(digests), key=lambda digest: -digests.count(digest))
    place = order.index(digests[rank])
    return chr(ord("a") + place) if place < 26 else str(place)


def _described(path: Path, bundle: ReplayBundle) -> dict[str, Any]:
    batches = [
        ("suspect", bundle.suspect, bundle.batches[0]),
        ("peer", bundle.peer, bundle.batches[1]),
    ]
    return {
        "kind": "replay",
        "path": str(path),
        "reason": bundle.reason,
        "step": bundle.step,
        "num_workers": bundle.num_workers,
        "seed": bundle.seed,
        "autocast": bundle.autocast,
        "versions": dict(bundle.versions),
        "finding": None if bundle.finding is None else to_plain(bundle.finding.to_json()),
        "batches": [
            {
                "role": role,
                "rank": rank,
                "bytes": batch.num_bytes,
                "tensors": [[str(array.dtype), list(array.shape)] for array in batch.arrays],
                "samples": batch.samples.tolist(),
            }
            for role, rank, batch in batches
        ],
        "results": None if bundle.results is None else results_to_json(bundle.results),
        "verdict": None if bundle.verdict is None else verdict_to_json(bundle.verdict),
    }
