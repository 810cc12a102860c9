"""The browser of the tests that need one, without a window."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from report.live.chromium import QUIET, chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=QUIET)
        yield started
        started.close()
