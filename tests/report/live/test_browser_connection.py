import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from rankscope.report import write_comparison, write_report, write_study_report
from report.live.serving import PATIENCE, Training, serving


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


EMPTY = """() => [...document.querySelectorAll("[data-figure]")].filter(
  (place) => place.offsetParent && !place.querySelector(".stage:not(.next) :is(svg, canvas)")
).map((place) => place.dataset.figure)"""
"""The figures that are empty boxes."""


@pytest.fixture(scope="module")
def pages(study, copied_run, healthy_run):
    return {
        "study": write_study_report(study),
        "run": write_report(copied_run),
        "comparison": write_comparison(healthy_run, copied_run, study / "comparison.html"),
    }


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 400, "height": 800}, color_scheme="light")
    context.set_default_timeout(PATIENCE)
    yield context.new_page()
    context.close()


def test_an_address_may_name_a_step(page, pages):
    page.goto(pages["run"].as_uri() + "#step-4")
    shown = page.locator("#frame-name")
    expect(shown).to_have_text("step 4")
    expect(shown.locator("a")).to_have_attribute("href", "#step-4")
    page.locator(".where a").first.click()
    expect(shown).to_have_text("step 0")
    expect(page.locator("[data-figure=heatmap]")).to_be_in_viewport()


SCALES = """() => [...document.querySelectorAll("[data-figure] .stage:not(.next) svg")].filter(
  (drawing) => drawing.getClientRects().length
).map((drawing) => drawing.getBoundingClientRect().width / drawing.viewBox.baseVal.width)"""
"""How much the page scales each figure that is shown, and the words in it."""


def test_words_in_figures_are_as_large_on_paper_as_on_a_screen(page, pages):
    """Also from a phone, whose figures are as wide as the window, three of them in a row."""
    page.goto(pages["study"].as_uri())
    expect(page.locator("[data-figure=dashboard] svg")).to_be_visible()
    page.set_viewport_size({"width": 717, "height": 1000})  # of A4 between a browser's margins
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function(f"({EMPTY})().length === 0")
    page.wait_for_function(f"Math.min(...({SCALES})()) > 0.9")
    assert len(page.evaluate(SCALES)) > 10
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(255, 255, 255)"  # no ink
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.className") == ""
