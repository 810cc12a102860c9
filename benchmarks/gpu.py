"""``make gpu``: what only a machine with an accelerator can tell, into ``docs/performance.md``.

Every part takes less than 9 minutes, runs alone (``--parts kernels,steps``), in a process of its
own, and writes its rows as soon as it has them. With ``--seconds 8`` all parts but the study take
6 minutes on an H200. Nothing is installed: it runs with the torch that
is there, and leaves out parts that lack a package. Without an accelerator it says so, and that is
all. ``--dry-run`` goes through every part on the CPU with tiny sizes, and writes nothing.
"""

import argparse
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gpu_page
from gpu_page import PARTS, Results, Row
from gpu_processes import begin, context, end_with_parent

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
SEVERAL = "nccl"
"""The part for several GPUs: it writes no page, but prints a block for an issue."""
PART_SECONDS = 500  # and up to 20 to end it
_MODULES = {
    "environment": "gpu_kernels",
    "kernels": "gpu_kernels",
    "bandwidth": "gpu_bandwidth",
    "launches": "gpu_steps",
    "steps": "gpu_steps",
    "fsdp2": "gpu_steps",
    "bits": "gpu_training",
    "answers": "gpu_answers",
    "study": "gpu_training",
}


def main(arguments: list[str] | None = None) -> int:
    """Measure what can be measured here; return 1 if a part failed."""
    options = _options(arguments)
    _use_this_checkout()
    if options.dry_run:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        os.environ.setdefault("RANKSCOPE_AGENT", "thread")  # starts sooner than a process
        if options.parts != [SEVERAL]:
            begin(options.parts)
    reason = _reason_not_to(dry=options.dry_run)
    if reason:
        print(f"Nothing was measured: {reason}.")
        return 0
    if options.parts == [SEVERAL]:
        return _several(options)
    failed = [part for part in options.parts if not _do(part, options)]
    print(f"failed: {', '.join(failed)}" if failed else "all parts that can run here have run")
    return 1 if failed else 0


def _do(part: str, options: argparse.Namespace) -> bool:
    """Run a part, print and save its rows as they come; return False if something failed."""
    missing = [name for name in PARTS[part].needs if importlib.util.find_spec(name) is None]
    if missing:
        print(f"[{part}] left out, since packages are missing: {', '.join(missing)}")
        return True
    start, number, well = time.monotonic(), 0, True
    for values in _run(part, dry=options.dry_run, seconds=options.seconds):
        if isinstance(values, str):
            well = False
            print(f"[{part}] failed: {values}")
            continue
        rows = _rows(part, values, dry=options.dry_run)
        for row in rows:
            print(f"[{part}] {row['what']}: {gpu_page.text_of(row)}", flush=True)
            well = well and not str(row["value"]).startswith("failed")
        number += len(rows)
        if not options.dry_run:
            _save(options.output, part, rows)
    print(f"[{part}] {number} rows, {time.monotonic() - start:.0f} s", flush=True)
    return well


def _several(options: argparse.Namespace) -> int:
    """Start a rank on each GPU of this host, all of which say what they see, in one block."""
    import torch

    ranks = 2 if options.dry_run else torch.cuda.device_count()
    if ranks < 2:
        print("Nothing was measured: there is one device; this part needs 2 or more.")
        return 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = ["--dry-run"] if options.dry_run else []
    seconds = min(options.seconds, 60)
    script = [str(ROOT / "benchmarks/several_gpus.py"), *words, "--seconds", str(seconds)]
    return subprocess.run([*launcher, f"--nproc-per-node={ranks}", *script], check=False).returncode


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU; writes nothing")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas")
    parser.add_argument("--seconds", type=float, default=100, help="to time one thing for")
    parser.add_argument(
        "--output", type=Path, default=PAGE,
        help="the page to write, with its results beside it; from those of docs/ if it is new",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    options.parts = [part.strip() for part in options.parts.split(",") if part.strip()]
    unknown = sorted({*options.parts} - {*PARTS})
    if unknown and options.parts != [SEVERAL]:
        parser.error(
            f"there is no part {', '.join(unknown)}; choose from {', '.join(PARTS)}, or {SEVERAL} "
            "alone"
        )
    return options


def _use_this_checkout() -> None:
    """Have this process and those that it starts find rankscope, installed or not.

    A checkout that was never installed gets its kernels in C here, if there is a compiler.
    """
    source = str(ROOT / "src")
    sys.path.insert(0, source)
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([source, others] if others else [source])
    kernels = ROOT / "src/rankscope/gradients/kernels"
    if not any(kernels.glob("*.so")):
        subprocess.run([sys.executable, kernels / "build.py"], check=False)


def _reason_not_to(*, dry: bool) -> str:
    """Return why nothing can be measured here; empty if something can."""
    for package in ("torch", "numpy"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed for {sys.executable}"
    if dry:
        return ""
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device here"
    if torch.version.hip is not None:
        return "the kernels are for CUDA, and this torch is for ROCm"
    return ""


def _run(part: str, *, dry: bool, seconds: float) -> Iterator[dict[str, Any] | str]:
    """Run a part in a process of its own; yield its values by row, or what went wrong."""
    receiving, sending = context().Pipe(duplex=False)
    process = context().Process(target=_work, args=(part, dry, seconds, sending))
    process.start()
    sending.close()
    end = time.monotonic() + PART_SECONDS
    try:
        while True:
            if not receiving.poll(max(0, end - time.monotonic())):
                yield f"it took longer than {PART_SECONDS} s"
                process.terminate()
                break
            values = receiving.recv()
            if values is None:
                break
            yield values
    except EOFError:
        yield "its process died"
    finally:
        process.join(timeout=20)
        if process.is_alive():
            process.kill()
            process.join()


def _work(part: str, dry: bool, seconds: float, pipe: Connection) -> None:
    """Be the process of a part."""
    from gpu_common import Setup, as_fields

    if dry:
        gc.freeze()  # nothing then looks through, and so copies, what all parts and ranks share
    end_with_parent()
    try:
        module = importlib.import_module(_MODULES[part])
        for values in getattr(module, f"measure_{part}")(Setup(dry, seconds)):
            pipe.send({what: as_fields(value) for what, value in values.items()})
    except BaseException as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")
    pipe.send(None)


def _rows(part: str, values: dict[str, Any], *, dry: bool) -> list[Row]:
    """Return a row for each value, in the page's order."""
    unknown = [what for what in values if what not in PARTS[part].rows]
    assert not unknown, f"the page does not know of {unknown}"
    device, torch_version = ("CPU", importlib.metadata.version("torch")) if dry else _in_use()
    date = datetime.now(UTC).date().isoformat()
    facts = {"device": device, "torch": torch_version, "date": date}
    rows = []
    for what, unit in PARTS[part].rows.items():
        if what in values:
            rows.append({"what": what, **values[what], "unit": unit, **facts})
    return rows


def _in_use() -> tuple[str, str]:
    """Return the name of the device, and the version of torch with that of its build."""
    import torch

    return torch.cuda.get_device_name(0), torch.__version__


def _save(page: Path, part: str, rows: list[Row]) -> None:
    """Put rows into a page and its results, beside all others that are there."""
    file = page.with_suffix(".json")
    known = file if file.exists() else PAGE.with_suffix(".json")
    text = (page if page.exists() else PAGE).read_text(encoding="utf-8")
    results: Results = json.loads(known.read_text(encoding="utf-8"))
    gpu_page.merge(results, part, rows)
    file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    page.write_text(gpu_page.put_into(text, results), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
