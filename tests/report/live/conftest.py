"""The browser of the tests that need one: the distribution's Chromium, without a window."""

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from report.live.serving import PATIENCE

QUIET = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic",
)  # fmt: skip

expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start the browser; without one, skip, or fail where CI has promised one."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        words = "Chromium is not installed: apt-get install chromium (or your distribution's way)"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(words)
        pytest.skip(words)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=QUIET)
        yield started
        started.close()
