"""How fast the live page opens: ``rankscope serve`` and headless Chromium, on synthetic runs.

Run as ``python benchmarks/live_page.py`` (about five minutes, 2 GB of disk), or with sizes of its
own: ``--sizes 8x1000``. Needs Chromium from the distribution's packages.

Printed are seconds from the address being opened until the verdict stands there, and until all
figures in the window are drawn; then, for scrolling through the whole page, the longest time that a
figure was in the window and not yet drawn. Each size is opened by a server that has just started
and never read the run, because younger ones stand before it (first), and again (then).
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from live_run import make_run
from playwright.sync_api import Browser, Page, sync_playwright

from rankscope.report.live.board import READ_AHEAD

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic",
)  # fmt: skip
REST = 1.0
"""Seconds without work after which a server that has started is asked: it has prepared its scripts
and read ahead what stands first."""
_DRAWN = """() => [...document.querySelectorAll("[data-figure]")].every((place) => {
  const box = place.getBoundingClientRect();
  const seen = place.offsetParent !== null && box.top < innerHeight && box.bottom > 0;
  return !seen || place.querySelector("svg, canvas");
})"""


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve a directory by the command line, and yield its address."""
    command = [sys.executable, "-m", "rankscope", "serve", str(directory), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        url = ""
        while not url:
            line = server.stdout.readline()
            assert line, "the server ended"
            url = "".join(re.findall(r"http://[^\s]+", line))
        _wait_for_rest(server.pid)
        try:
            yield url.rstrip("/")
        finally:
            server.terminate()
            server.wait()


def _wait_for_rest(pid: int) -> None:
    before = -1.0
    while (now := _work_of(pid)) > before:
        before = now
        time.sleep(REST)


def _work_of(pid: int) -> float:
    """Return the processor time that a process has taken, in ticks of the system's clock."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return float(fields[11]) + float(fields[12])


def make_younger_runs(folder: Path) -> None:
    """Make runs that the server reads ahead in place of the one that is measured."""
    shutil.rmtree(folder, ignore_errors=True)
    for number in range(READ_AHEAD):
        make_run(folder / str(number), 8, 100)


def opened(browser: Browser, url: str, name: str) -> dict[str, float]:
    """Return seconds by what was waited for, in a window of a laptop's size."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    begin = time.perf_counter()
    page.goto(f"{url}/run/{name}", wait_until="commit")
    page.wait_for_selector("#verdict")
    times = {"verdict": time.perf_counter() - begin}
    page.wait_for_function(_DRAWN)
    times["figures in the window"] = time.perf_counter() - begin
    times["longest wait while scrolling"] = _scrolled(page)
    context.close()
    return times


def _scrolled(page: Page) -> float:
    longest = 0.0
    height = int(page.evaluate("document.documentElement.scrollHeight"))
    for top in range(0, height, 600):
        page.evaluate(f"scrollTo(0, {top})")
        begin = time.perf_counter()
        page.wait_for_function(_DRAWN)
        longest = max(longest, time.perf_counter() - begin)
    return longest


def main() -> None:
    """Make what is missing, open all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["8x1000", "64x10000", "1024x100000"])
    parser.add_argument("--folder", type=Path, help="where the runs are made; kept if given")
    options = parser.parse_args()
    results: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = options.folder or Path(temporary)
        path = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        for size in options.sizes:
            if not (folder / size).exists():
                make_run(folder / size, *map(int, size.split("x")))
            make_younger_runs(folder / "younger")
            with served(folder) as url:
                results[size] = opened(browser, url, size), opened(browser, url, size)
        browser.close()
    print(f"| seconds, first / then | {' | '.join(results)} |")
    print(f"|---|{'---|' * len(results)}")
    for what in next(iter(results.values()))[0]:
        cells = [f"{first[what]:.2f} / {then[what]:.2f}" for first, then in results.values()]
        print(f"| {what} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
