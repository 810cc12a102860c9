"""The live page in a browser: the distribution's Chromium, without a window.

With ``RANKSCOPE_SCREENSHOTS=1`` the test of the looks also writes the pictures of ``docs/live.md``.
"""

import os
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from report.live.serving import PATIENCE, Training, serving

FIGURES = Path(__file__).parents[3] / "docs" / "figures"
HOSTILE = "<script>alert(1)</script>"
IN_VIEW = "e => e.getBoundingClientRect().top < innerHeight && e.getBoundingClientRect().bottom > 0"

OVERHANG = """() => [...document.querySelectorAll("[data-figure]")].filter((place) => {
  const drawn = place.querySelector("svg, canvas").getBoundingClientRect();
  return drawn.right > place.getBoundingClientRect().right + 1;
}).map((place) => place.dataset.figure)"""
"""The figures that are wider than their place."""

CUT_OFF = """() => [...document.querySelectorAll("figure.panel, .timeline a, .tools")].filter(
  ({ scrollWidth, clientWidth, scrollHeight, clientHeight }) =>
    scrollWidth > clientWidth + 1 || scrollHeight > clientHeight + 1
).map((place) => place.className + " " + place.textContent.trim().slice(0, 40))"""
"""What is cut off in its place."""


class Site:
    def __init__(self, root):
        self.root = root
        runs = (("healthy", "sharded", 40), ("forgotten-sampler", "replicated", 30))
        for name, reading, steps in runs:
            config = {"optimizer": {"lr": 0.1 * steps}, "layers": 2}
            training = Training(root / "sft" / name, num_workers=8, reading=reading, config=config)
            training.steps(steps)
            training.close()
        training = Training(root / HOSTILE.replace("/", ""), name=HOSTILE, reading="replicated")
        training.steps(6)
        training.close()
        self.live = Training(root / "pretrain" / "live")
        self.live.steps(12)
        self.url = ""


@pytest.fixture(scope="module")
def site(tmp_path_factory, browser):
    made = Site(tmp_path_factory.mktemp("site") / "runs")
    with serving(made.root) as server:
        made.url = server.url
        yield made


@pytest.fixture
def page(browser, site):
    """A page that must not complain, and must not ask anyone but this server."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE)
    complaints = []
    asked = []
    opened.on("console", lambda m: complaints.extend([m.text] * (m.type in ("error", "warning"))))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    opened.on("request", lambda request: asked.append(request.url))
    yield opened
    context.close()
    local = (site.url, "data:", "blob:")
    assert [url for url in asked if not url.startswith(local)] == []
    assert complaints == []


def opened(page, site, path):
    page.goto(site.url + path)
    expect(page.locator("#link")).to_have_text("Live")
    return page


def figure(page, name):
    place = page.locator(f'[data-figure="{name}"]')
    place.scroll_into_view_if_needed()
    expect(place.locator(".stage:not(.next) :is(svg, canvas)").first).to_be_visible()
    return place


def test_all_runs_at_a_glance(page, site):
    site.live.steps(1)
    opened(page, site, "")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(4)
    expect(rows.nth(0)).to_contain_text("Error")
    expect(rows.filter(has_text="pretrain/live")).to_contain_text("Running")
    expect(page.locator("svg.spark")).to_have_count(4)
    page.get_by_role("link", name="sft/forgotten-sampler").click()
    expect(page.locator("h1")).to_contain_text("train on the same batches")


def test_steps_appear_while_the_run_writes_and_the_reader_keeps_their_place(page, site):
    site.live.steps(1)
    first = site.live.step
    opened(page, site, "run/pretrain/live")
    expect(page.locator("#strip")).to_contain_text("Running")
    figure(page, "workers-loss")
    second = page.get_by_role("button", name="2", exact=True)
    second.click()
    heatmap = figure(page, "heatmap")
    slider = page.locator("[data-slider]")
    slider.focus()
    slider.press("End")
    expect(page.locator("output")).to_have_text(f"step {first - 1}")
    before = slider.bounding_box()
    drawn = int(heatmap.get_attribute("data-drawn") or 0)

    site.live.steps(3)
    expect(page.locator("#strip")).to_contain_text(f"step {first + 2}")
    expect(page.locator("output")).to_have_text(f"step {first + 2}")
    expect(heatmap).to_have_attribute("data-drawn", str(drawn + 1))
    expect(heatmap.locator(".stage")).to_have_count(1)
    expect(slider).to_be_focused()
    after = slider.bounding_box()
    assert before is not None
    assert after is not None
    assert abs(after["y"] - before["y"]) < 5
    expect(second).to_have_attribute("aria-pressed", "true")

    slider.press("Home")
    slider.press("ArrowRight")
    expect(page.locator("output")).to_have_text("step 0")
    site.live.steps(2)
    expect(page.locator("#strip")).to_contain_text(f"step {first + 4}")
    expect(page.locator("output")).to_have_text("step 0")


def test_a_fault_that_begins_is_found_in_the_open_page(page, site):
    opened(page, site, "run/pretrain/live")
    expect(page.locator(".verdict .badge")).not_to_have_text("Error")
    site.live.steps(8, reading="replicated")
    expect(page.locator(".verdict .badge")).to_have_text("Error")
    details = page.locator("article.finding details").first
    details.locator("summary").click()
    site.live.steps(2, reading="replicated")
    expect(page.locator("#strip")).to_contain_text(f"step {site.live.step - 1}")
    expect(details).to_have_attribute("open", "")


def test_print_has_every_figure(page, site):
    opened(page, site, "run/sft/forgotten-sampler")
    expect(page.locator("[data-drawn]")).to_have_count(page.locator("[data-figure]").count())
    page.emulate_media(media="print")
    page.evaluate("document.querySelector('main').style.width = '600px'")  # as paper is narrower
    assert page.evaluate(OVERHANG) == []
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") > 1


def test_a_phone_shows_all_without_scrolling_sideways(page, site):
    page.set_viewport_size({"width": 400, "height": 800})
    opened(page, site, "run/sft/forgotten-sampler")
    page.evaluate("document.querySelector('.next').append('module.' + 'long_name'.repeat(12))")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    for place in page.locator("[data-figure]").all():
        box = place.bounding_box()
        assert box is not None
        assert 0 <= box["x"] < box["x"] + box["width"] <= 400
    for name in ("heatmap", "timeline"):
        if page.locator(f'[data-figure="{name}"]').count():
            figure(page, name)
    assert page.evaluate(CUT_OFF) == []


def names(page):
    return page.locator("tbody tr:visible [data-item-link]").all_inner_texts()


def test_runs_are_filtered_sorted_and_shown_with_their_settings(page, site):
    site.live.steps(1)
    opened(page, site, "")
    first = names(page)
    page.get_by_role("button", name="Run", exact=True).click()
    assert names(page) == sorted(first)
    page.locator("#filter").fill("no run is called so")
    expect(page.locator("#shown")).to_contain_text("Nothing matches")
    expect(page.get_by_role("region", name="Runs")).to_be_hidden()  # no table without rows
    page.locator("#filter").fill("")
    expect(page.get_by_role("region", name="Runs")).to_be_visible()
    page.get_by_role("button", name="Run", exact=True).click()
    assert names(page) == sorted(first, reverse=True)
    page.get_by_text("Columns").click()
    offered = page.locator("[data-column]").evaluate_all("all => all.map((e) => e.dataset.column)")
    assert offered == ["samples per step", "optimizer.lr", "layers"]
    page.get_by_label("optimizer.lr").check()
    expect(page.locator("tbody td:visible", has_text="4")).not_to_have_count(0)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="optimizer.lr").click()
    assert names(page)[:2] == ["sft/forgotten-sampler", "sft/healthy"]
    before = names(page)
    steps = site.live.step
    site.live.steps(2)
    live = page.locator("tbody tr", has_text="pretrain/live")
    expect(live.locator('[data-of="Steps"]')).to_have_text(str(steps + 2))
    assert names(page) == before  # nothing moves when the list is renewed
    expect(page.get_by_role("button", name="optimizer.lr")).to_be_visible()
    page.get_by_label("Filter runs").fill("error sft")
    assert names(page) == ["sft/forgotten-sampler"]
    expect(page.locator("#shown")).to_have_text("1 shown")
    page.get_by_label("Filter runs").fill("optimizer.lr=4")
    assert names(page) == ["sft/healthy"]
    page.get_by_label("Filter runs").fill("no such run")
    expect(page.locator("#shown")).to_contain_text(f"Nothing matches. Here are {len(before)} runs")
    expect(page.locator("#order")).to_have_text("by optimizer.lr")


def test_a_name_that_is_a_script_is_only_a_name(page, site):
    opened(page, site, "")
    page.locator("tbody a", has_text="<script>").click()
    expect(page.locator("#crumb")).to_have_text(HOSTILE)
    figure(page, "loss")
    assert page.evaluate("document.querySelectorAll('main script, main img').length") == 0


def test_everything_is_reached_with_the_keyboard(page, site):
    opened(page, site, "")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    expect(page.locator("[data-item-link]").first).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".verdict")).to_be_visible()
    expect(page.locator("#link")).to_have_text("Live")
    page.keyboard.press("j")
    expect(page.locator("article.finding").first).to_be_focused()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("g")
    expect(page.locator("tbody tr")).to_have_count(4)
    outlines = []
    for _ in range(6):
        page.keyboard.press("Tab")
        outlines.append(page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))
    assert "none" not in outlines


@pytest.mark.parametrize(
    ("name", "path", "mode", "reach"),
    [
        ("runs", "", "light", None),
        ("run", "run/sft/forgotten-sampler", "light", None),
        ("workers", "run/sft/forgotten-sampler", "dark", "map-loss"),
        ("compare", "compare?a=sft/forgotten-sampler&b=sft/healthy", "light", "compare-loss"),
    ],
)
def test_looks(page, site, name, path, mode, reach):
    page.emulate_media(color_scheme=mode, reduced_motion="reduce")
    site.live.steps(1)
    opened(page, site, path)
    if reach:
        figure(page, reach)
        page.locator("section", has=page.locator(f'[data-figure="{reach}"]')).evaluate(
            "section => section.scrollIntoView({block: 'start'})"
        )
        for place in page.locator("[data-figure]").all():
            if place.evaluate(IN_VIEW):
                expect(place.locator(".stage:not(.next) :is(svg, canvas)").first).to_be_visible()
    picture = page.screenshot(animations="disabled")
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    if os.environ.get("RANKSCOPE_SCREENSHOTS") == "1":
        (FIGURES / f"live-{name}.png").write_bytes(picture)
        print(f"wrote {FIGURES / f'live-{name}.png'}", file=sys.stderr)
