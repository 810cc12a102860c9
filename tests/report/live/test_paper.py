"""Pages of a file in a browser: on a phone, on paper, and at a step that the address names."""

import pytest
from playwright.sync_api import expect

from rankscope.report import write_comparison, write_report, write_study_report
from report.live.chromium import PATIENCE

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
