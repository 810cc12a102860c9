"""Every fault of the bench as it looks: a picture, its first finding and what to do.

``python benchmarks/gallery.py`` injects each fault of the catalogue into a training on four ranks,
and writes ``docs/gallery.json`` and ``docs/figures/gallery/``, from which the site makes a page.
Ids of faults (``python benchmarks/gallery.py D5 T2``) renew these only.
"""

import json
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

from faults.bench import Bench, Score
from faults.catalogue import Fault, catalogue, select
from PIL import Image
from rich.progress import track

from rankscope import Finding, Run
from rankscope.report.document import png_of
from rankscope.report.page import OWN_COLOURS, assessed, panel, run_view
from rankscope.report.parts import Tables
from rankscope.verdict.rules import section_of

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "gallery.json"
PICTURES = DOCS / "figures" / "gallery"
NUM_WORKERS = 4

MAPS = {
    "data": "map-cosine_rest",
    "loss": "map-loss",
    "rng": "map-cosine_rest",
    "time": "map-step_seconds",
}
"""What shows each family of causes best; the gradient norm shows the others."""


def main(ids: list[str]) -> None:
    """Renew the gallery."""
    known = catalogue()
    chosen = select(ids) if ids else list(known.values())
    entries: dict[str, Any] = json.loads(PAGE.read_text()) if ids and PAGE.exists() else {}
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder)) as bench:
        for fault in track([one for one in chosen if not one.missing], "Faults"):
            score = bench.run(fault, num_workers=NUM_WORKERS)
            [run_dir, *_] = sorted(Path(folder).glob(f"{fault.id}-*"), reverse=True)
            first = score.findings[0] if score.findings else None
            write_picture(Run.open(run_dir), first, PICTURES / f"{fault.id}.png")
            entries[fault.id] = entry(fault, score, first)
    ordered = {one: entries[one] for one in known if one in entries}
    PAGE.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def entry(fault: Fault, score: Score, first: Finding | None) -> dict[str, Any]:
    """Return what the page says of a fault."""
    told: dict[str, Any] = {"what": fault.mechanism, "seen": list(fault.seen)}
    if first is None:
        return told
    return {
        **told,
        "cause": first.cause,
        "section": section_of(first.id, first.cause),
        "severity": str(first.severity),
        "says": first.explanation,
        "next": first.next_check,
        "delay": score.delay,
    }


def write_picture(run: Run, first: Finding | None, path: Path) -> None:
    """Draw the averaged loss and, of all workers, what shows the fault best."""
    tables = Tables()
    view = run_view(tables, run, assessed(run))
    family = "" if first is None else first.cause.partition(".")[0]
    names = ["loss", MAPS.get(family, "map-grad_norm")]
    names = [name for name in names if name in view.figures]
    panels = [panel(view.figures[name], view.titles[name], name, len(names)) for name in names]
    parameters = [one for drawn in panels for one in drawn.pop("params", ())]
    row = [{**drawn, "height": 150} for drawn in panels]
    spec = {"params": parameters, "hconcat": row, "spacing": 40, "resolve": OWN_COLOURS}
    picture = Image.open(BytesIO(png_of(spec, tables, scale=1.0)))
    picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
