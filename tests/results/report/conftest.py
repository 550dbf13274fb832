"""A headless Chromium, Debian's: `.ci/run` installs it. Where there is none, tests that need it are skipped, visibly."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_AXE = Path(__file__).parents[2] / "data" / "axe-4.14.1.min.js.gz"  # npm's axe-core, MPL-2.0, as it is published
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


class Browser:
    """One tab, with what the tests ask of a page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, width: int = 1600, dark: bool = False) -> None:
        """Opens the file at a width in CSS pixels; everything that was said before is forgotten."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": theme})
        self.driver.get_log("browser")
        self.driver.get(page.resolve().as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """What is shown there."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def shown(self, selector: str) -> int:
        """How many such elements are shown."""
        script = "return [...document.querySelectorAll(arguments[0])].filter(e => e.getClientRects().length).length"
        return int(self.run(script, selector))

    def click(self, selector: str) -> None:
        """As a person does; what is out of sight is scrolled to."""
        from selenium.webdriver.common.by import By

        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def type(self, selector: str, text: str) -> None:
        from selenium.webdriver.common.by import By

        self.driver.find_element(By.CSS_SELECTOR, selector).send_keys(text)

    def complaints(self) -> list[str]:
        """Errors of the console, and requests that were refused."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def serious(self) -> list[str]:
        """What axe-core finds that keeps people out."""
        self.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
        self.driver.refresh()
        self.run(gzip.decompress(_AXE.read_bytes()).decode())
        found = self.driver.execute_async_script(
            "axe.run(document, {resultTypes: ['violations']}).then(arguments[0], e => arguments[0]({error: String(e)}))"
        )
        self.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})
        assert "error" not in found, found
        return [
            f"{one['id']}: {json.dumps([node['html'][:150] for node in one['nodes'][:3]])}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not chromedriver:
        pytest.skip("no chromium: apt-get install chromium chromium-driver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    driver.set_script_timeout(180)
    try:
        yield Browser(driver)
    finally:
        driver.quit()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The page of a kind of study, made once."""
    from tests.results.report import kinds

    folder, made = tmp_path_factory.mktemp("pages"), dict[str, Path]()

    def page(kind: str) -> Path:
        if kind not in made:
            made[kind] = kinds.KINDS[kind](folder / kind)
        return made[kind]

    return page
