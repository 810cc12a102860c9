"""The live page in a browser, and its server: links with a token, tabs unseen, late news."""

import shutil
from pathlib import Path

from playwright.sync_api import Browser, expect

from report.live.chromium import PATIENCE
from report.live.serving import Training, serving


def test_a_link_with_the_token_works_on_another_site(browser: Browser, tmp_path: Path):
    Training(tmp_path / "run").steps(3)
    elsewhere = "http://chat.example/"
    with serving(tmp_path, token="s3cret") as server, browser.new_context() as context:
        link = f'<a href="{server.url}">look at this</a>'
        context.route(elsewhere, lambda route: route.fulfill(body=link, content_type="text/html"))
        page = context.new_page()
        page.goto(elsewhere)
        page.get_by_text("look at this").click()
        expect(page.locator("#link")).to_have_text("Live")
        assert page.url == server.url.partition("?")[0]
        assert page.evaluate("document.referrer") == ""
        page.go_back()
        assert page.url == elsewhere  # the address with the token is not in the history


LINK, STEPS = "#link", "tbody td:nth-child(7)"


def test_numbers_that_are_late_are_not_called_live(browser: Browser, tmp_path: Path):
    training = Training(tmp_path / "run")
    training.steps(3)
    news, stream = "**/api/**", "**/events?**"
    with serving(tmp_path) as server, browser.new_context() as context:
        page = context.new_page()
        page.clock.install()
        page.goto(server.url)
        expect(page.locator(LINK)).to_have_text("Live")

        page.route(news, lambda route: None)  # no answer ever comes
        with page.expect_request(news, timeout=PATIENCE):
            training.steps(1)
        page.clock.fast_forward(5_000)
        expect(page.locator(LINK)).to_have_text("Updating")
        page.clock.fast_forward(61_000)
        expect(page.locator(LINK)).to_contain_text("retrying")

        page.unroute(news)
        page.route(news, lambda route: route.fulfill(status=500))
        page.clock.fast_forward(10_000)
        expect(page.locator(LINK)).to_contain_text("Not up to date since")
        expect(page.locator(STEPS)).to_have_text("3")
        page.unroute(news)
        page.clock.fast_forward(10_000)
        expect(page.locator(LINK)).to_have_text("Live")
        expect(page.locator(STEPS)).to_have_text("4")

        page.route(stream, lambda route: route.abort())
        page.clock.fast_forward(61_000)  # in which the stream is silent
        expect(page.locator(LINK)).to_contain_text("Not connected since")


def test_a_server_that_goes_and_comes_back(browser: Browser, tmp_path: Path):
    training = Training(tmp_path / "run")
    training.steps(3)
    page = browser.new_page()
    with serving(tmp_path) as server:
        port = server.port
        page.goto(f"{server.url}run/run")
        expect(page.locator("#link")).to_have_text("Live")
    expect(page.locator("#link")).to_contain_text("Not connected since")
    expect(page.locator("h1")).to_be_visible()
    training.steps(2)
    with serving(tmp_path, port=port):
        expect(page.locator("#link")).to_have_text("Live")
        expect(page.locator("#strip")).to_contain_text("step 4")
        shutil.rmtree(tmp_path / "run")
        expect(page.locator("#strip")).to_contain_text("is not there any more")
        expect(page.locator(".verdict")).to_be_visible()
    page.close()
