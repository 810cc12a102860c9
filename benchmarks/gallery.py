"""Every fault of the bench as it looks: a picture, its first finding and what to do.

It draws runs that the fault bench has kept, whose scores are in ``docs/fault-bench.json``, and
writes ``docs/gallery.json`` and ``docs/figures/gallery/``, from which the site makes a page::

    python -m benchmarks.faults --all --keep runs/faults --json docs/fault-bench.json
    python benchmarks/gallery.py runs/faults

Entries without a kept run stay as they are.
"""

import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

from faults.bench import Score
from faults.catalogue import Fault, catalogue
from PIL import Image
from rich.progress import track

from rankscope import Finding, Run
from rankscope.report.document import png_of
from rankscope.report.page import OWN_COLOURS, assessed, panel, run_view
from rankscope.report.parts import Tables
from rankscope.verdict.rules import section_of

DOCS = Path(__file__).parents[1] / "docs"
SCORES = DOCS / "fault-bench.json"
PAGE = DOCS / "gallery.json"
PICTURES = DOCS / "figures" / "gallery"
NUM_WORKERS, SEED = 4, 0

MAPS = {
    "data": "map-cosine_rest",
    "loss": "map-loss",
    "rng": "map-cosine_rest",
    "time": "map-step_seconds",
}
"""What shows each family of causes best; the gradient norm shows the others."""


def main(folder: Path) -> None:
    """Renew the gallery from kept runs."""
    known = catalogue()
    entries: dict[str, Any] = json.loads(PAGE.read_text("utf-8"))
    PICTURES.mkdir(parents=True, exist_ok=True)
    scores = [Score.from_json(one, known) for one in json.loads(SCORES.read_text("utf-8"))]
    for score in track(scores, "Faults"):
        fault = score.fault
        runs = sorted(folder.glob(f"{fault.id}-w{NUM_WORKERS}-s{SEED}*"))
        if (score.num_workers, score.seed) == (NUM_WORKERS, SEED) and runs:
            first = score.findings[0] if score.findings else None
            write_picture(Run.open(runs[-1]), first, PICTURES / f"{fault.id}.png")
            entries[fault.id] = entry(fault, score, first)
    ordered = {one: entries[one] for one in known if one in entries}
    PAGE.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", "utf-8")


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
    [given] = sys.argv[1:]
    main(Path(given))
