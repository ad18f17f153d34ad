"""The live page: what a browser shows of a server at work."""

import threading
from contextlib import suppress

import pytest
import torch

from hiddenstate.errors import ServeError
from hiddenstate.serve import Engine
from tests.support import browser
from tests.support.models import Deep
from tests.support.web import serving

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="there is no chromium on this machine"),
]


class Load(threading.Thread):
    """Inputs for some sessions, until told to stop."""

    def __init__(self, engine: Engine, names: list[str]) -> None:
        super().__init__(daemon=True)
        self._engine, self._names, self.enough = engine, names, threading.Event()

    def run(self) -> None:
        with suppress(ServeError):  # the server takes the engine with it when it ends
            while not self.enough.wait(0.02):
                self._engine.push_many(self._names, torch.randn(len(self._names), 3))


@pytest.fixture
def engine():
    torch.manual_seed(0)
    with Engine(Deep()) as made:
        for name in ("sensor-1", "sensor-2", "<img src=x onerror=alert(1)>"):
            made.open(name)
        load = Load(made, made.sessions())
        load.start()
        yield made
        load.enough.set()
        load.join()


@pytest.mark.sample(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_shows_numbers_sessions_and_a_moving_state(engine, tmp_path, scheme, request):
    errors = []
    with (
        serving(engine) as url,
        browser.page(tmp_path / "profile", color_scheme=scheme, viewport={"width": 1200, "height": 820}) as page,
    ):
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        asked = []
        page.on("request", lambda asking: asked.append(asking.url))
        page.goto(url)
        page.get_by_role("button", name="sensor-1").click()
        page.wait_for_function("Number(document.getElementById('heat').dataset.columns) > 6", timeout=20_000)
        page.wait_for_function("parseFloat(document.getElementById('rate').textContent) > 1", timeout=20_000)
        assert page.locator("#chosen").inner_text() == "sensor-1"
        assert page.locator("#hot").inner_text() == "3"
        assert int(page.locator("#seq").inner_text()) > 1
        assert page.locator("#part option").all_inner_texts() == ["encoder.lstm.h", "encoder.lstm.c", "gru.h"]
        first = page.evaluate("document.getElementById('heat').toDataURL()")
        count = page.evaluate("document.getElementById('heat').dataset.columns")
        page.wait_for_function(f"document.getElementById('heat').dataset.columns !== '{count}'", timeout=20_000)
        assert page.evaluate("document.getElementById('heat').toDataURL()") != first
        page.select_option("#part", "gru.h")
        assert page.locator("#units").inner_text() == "4"
        # A name is shown as it is, and never run.
        assert page.get_by_role("button", name="<img src=x").count() == 1
        page.fill("#prefix", "sensor-2")
        page.wait_for_function("document.querySelectorAll('#sessions button').length === 1", timeout=20_000)
        assert all(address.startswith((url, "data:")) for address in asked)
        page.screenshot(path=tmp_path / f"{scheme}.png")
    assert errors == []


def test_where_tokens_are_needed_the_page_asks_for_one(tmp_path):
    torch.manual_seed(0)
    with Engine(Deep()) as engine:
        engine.open("alice:mine")
        engine.open("bob:his")
        with (
            serving(engine, tokens={"alice": "secret", "bob": "other"}) as url,
            browser.page(tmp_path / "profile") as page,
        ):
            page.goto(url)
            page.locator("#token").wait_for(state="visible", timeout=20_000)
            page.fill("#token", "secret")
            page.press("#token", "Enter")
            page.get_by_role("button", name="mine").wait_for(timeout=20_000)
            assert page.locator("#sessions button").all_inner_texts() == ["mine"]
