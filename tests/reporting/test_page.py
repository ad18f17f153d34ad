"""The page in a real browser: it draws, answers the mouse, opens its findings, and fits on a phone."""

import itertools
import json

import pytest

from tests.support.browser import browser, needs_browser

pytestmark = [pytest.mark.browser, pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as context:
        yield context


@pytest.fixture
def opened(chromium, pages):
    """Open a page at a width, and collect every complaint of the browser."""
    tabs = []

    def open_page(name="healthy", *, width=1280, scheme="light"):
        page = chromium.new_page()
        tabs.append(page)
        page.complaints = []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: request.url.startswith("http") and page.complaints.append(request.url))
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto(pages[name].as_uri())
        return page

    yield open_page
    for page in tabs:
        page.close()


def scroll_through(page):
    for holder in page.locator(".plot:visible").all():
        holder.scroll_into_view_if_needed()
        page.wait_for_function("holder => holder.dataset.drawn", arg=holder.element_handle())


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_all_is_drawn_without_a_complaint_and_fits(opened, width, scheme):
    page = opened("sick", width=width, scheme=scheme)
    scroll_through(page)
    assert page.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for holder in page.locator(".plot:visible").all():
        box = holder.bounding_box()
        assert box["width"] > 0.75 * min(width - 40, 600)
        assert box["x"] + box["width"] <= width
        assert holder.locator(".main-svg").count() > 0


def test_hovering_over_a_heatmap_shows_unit_step_token_and_value(opened):
    page = opened()
    plot = page.locator("#track-lstm-l0-h")
    plot.scroll_into_view_if_needed()
    page.wait_for_function("document.getElementById('track-lstm-l0-h').dataset.drawn")
    area = plot.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(area["x"] + area["width"] * 0.1, area["y"] + area["height"] * 0.35)
    page.wait_for_selector("#track-lstm-l0-h .hovertext")
    said = plot.locator(".hovertext").text_content()
    assert "unit " in said
    assert "step 3 · w" in said
    assert any(character.isdigit() for character in said.split("h ")[-1])


def test_units_are_drawn_alike_together_and_in_the_order_that_is_chosen(opened):
    page = opened()
    plot = page.locator("#track-lstm-l0-h")
    plot.scroll_into_view_if_needed()
    page.wait_for_function("document.getElementById('track-lstm-l0-h').dataset.drawn")
    source = json.loads(page.locator("#track-lstm-l0-h-data").text_content())
    choice = page.locator('select[data-orders="track-lstm-l0-h"]')
    assert choice.locator("option").all_text_contents() == ["alike together", "by peak", "by size", "by number"]
    for name, order in (*source["orders"].items(), ("by number", source["data"][0]["y"])):
        choice.select_option(name)
        drawn = page.wait_for_function(
            """order => { const drawn = document.getElementById("track-lstm-l0-h").data[0];
                return String(drawn.y) === String(order) && drawn.z }""",
            arg=order,
        ).json_value()
        assert drawn == [source["data"][0]["z"][unit] for unit in order]


def test_a_link_leads_to_its_section_before_anything_was_drawn(opened):
    page = opened()
    height = page.evaluate("document.documentElement.scrollHeight")
    page.locator('nav a[href="#spectrum"]').click()
    page.wait_for_function("Math.abs(document.getElementById('spectrum').getBoundingClientRect().top) < 100")
    scroll_through(page)
    assert page.evaluate("document.documentElement.scrollHeight") == height


def test_a_finding_opens_and_closes_by_mouse_and_by_keyboard(opened):
    page = opened("sick")
    first = page.locator("details.finding").first
    assert first.locator("dd").first.is_visible()
    first.locator("summary").click()
    assert not first.locator("dd").first.is_visible()
    first.locator("summary").focus()
    page.keyboard.press("Enter")
    assert first.locator("dd").first.is_visible()


def test_parts_are_chosen_by_keyboard(opened):
    page = opened()
    page.locator("#track-lstm-l0-parts-0").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#track-lstm-l0-c").is_visible()
    assert not page.locator("#track-lstm-l0-h").is_visible()
    page.wait_for_function("document.getElementById('track-lstm-l0-c').dataset.drawn")


def test_dark_paper_is_dark_and_light_paper_is_light(opened):
    def brightness(scheme):
        color = opened(scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in color[4:-1].split(","))

    assert brightness("dark") < 150
    assert brightness("light") > 600


def test_a_screen_reader_finds_words_for_every_picture(opened):
    page = opened()
    names = page.eval_on_selector_all(
        ".plot", "all => all.map(one => [one.getAttribute('role'), one.getAttribute('aria-label')])"
    )
    assert names
    assert all(role == "img" and len(label) > 20 and "<strong" not in label for role, label in names)
    levels = page.eval_on_selector_all("h1, h2, h3", "all => all.map(one => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert page.locator("nav[aria-label=Contents] a").count() >= 7


def test_it_prints_with_every_finding_open(opened, tmp_path):
    page = opened("sick")
    page.locator("details.finding summary").first.click()
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details.finding:not([open])").count() == 0
    page.emulate_media(media="print")
    assert not page.locator("nav.contents").is_visible()


def test_a_screenshot_is_no_blank_sheet(opened, tmp_path):
    import numpy
    from PIL import Image

    for width in (1280, 400):
        page = opened(width=width)
        scroll_through(page)
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        pixels = numpy.asarray(Image.open(tmp_path / "page.png").convert("RGB")).reshape(-1, 3)
        # The heatmaps' blue and red, and ink: a page whose pictures failed would be almost white.
        blue = (pixels[:, 2].astype(int) - pixels[:, 0] > 60).mean()
        red = (pixels[:, 0].astype(int) - pixels[:, 2] > 60).mean()
        assert blue > 0.015
        assert red > 0.015
