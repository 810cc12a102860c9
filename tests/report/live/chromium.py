"""Where the tests' browser is, the distribution's Chromium, and how long they wait for it."""

import os
import shutil

import pytest
from playwright.sync_api import expect

QUIET = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic",
)  # fmt: skip
PATIENCE = 60_000

expect.set_options(timeout=PATIENCE)


def chromium() -> str:
    """Return the browser's path; without one, skip, or fail where CI has promised one."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        words = "Chromium is not installed: apt-get install chromium (or your distribution's way)"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(words)
        pytest.skip(words)
    return path
