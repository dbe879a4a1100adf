"""A headless Chromium, and the page of a trace that is open in it.

The browser and its driver are programs of the system (Debian: `chromium` and `chromium-driver`), and nothing is ever
downloaded for them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
)


def missing() -> str | None:
    """What is not installed; None: all is there."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        return "Chromium and its driver are not installed (Debian's packages chromium and chromium-driver)"
    try:
        import selenium  # noqa: F401  (here: an extra)
    except ImportError:
        return "selenium is not installed (pip install 'selenium>=4.20')"
    return None


def prefer(driver: Any, scheme: str = "light", motion: str = "reduce") -> None:
    """What the browser's user prefers: light or dark colours; motion: reduce or no-preference."""
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": motion},
    ]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@contextmanager
def chromium() -> Iterator[Any]:
    """A fresh one, driven by selenium; it logs what its pages print and which requests they make.

    Its user wants light colours and no motion, until `prefer` says otherwise.
    """
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for flag in (*FLAGS, "--window-size=1280,800", f"--user-data-dir={folder}"):
            options.add_argument(flag)
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        driver = webdriver.Chrome(options=options, service=service)
        try:
            prefer(driver)
            yield driver
        finally:
            driver.quit()


needs_browser = pytest.mark.skipif(missing() is not None, reason=missing() or "")


class Page:
    """A page that is open."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def js(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def open(self, path: Path) -> None:
        """Open a page, and go to the last step."""
        self.open_at_beginning(path)
        self.seek(self.js("return Number(document.getElementById('time').max)"))

    def open_at_beginning(self, path: Path) -> None:
        self.driver.get_log("performance")
        self.driver.get(path.as_uri())
        self.wait("document.documentElement.dataset.ready === 'yes'")

    def wait(self, condition: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 20, 0.02).until(lambda _: self.js(f"return {condition}"))

    def press(self, key: str, times: int = 1) -> None:
        from selenium.webdriver import ActionChains

        for _ in range(times):
            ActionChains(self.driver).send_keys(key).perform()
        self.settle()

    def settle(self) -> None:
        """After the next picture."""
        self.driver.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => setTimeout(done))")

    def point(self, position: int, click: bool = False) -> None:
        from selenium.webdriver import ActionChains

        span = self.js("return document.querySelectorAll('#text span')[arguments[0]]", position)
        chain = ActionChains(self.driver).move_to_element(span)
        (chain.click() if click else chain).perform()

    def seek(self, step: int) -> None:
        self.js(
            "const e = document.getElementById('time'); e.value = arguments[0]; e.dispatchEvent(new Event('input'))",
            step,
        )
        self.settle()

    def colour(self, mode: str) -> None:
        from selenium.webdriver.support.ui import Select

        Select(self.driver.find_element("id", "mode")).select_by_value(mode)
        self.settle()

    @property
    def now(self) -> str:
        return self.text("now")

    def text(self, name: str) -> str:
        return str(self.js("return document.getElementById(arguments[0]).innerText", name))

    def classes(self) -> list[str]:
        return list(self.js("return [...document.querySelectorAll('#text span')].map((e) => e.className)"))

    def cells(self, name: str) -> list[str]:
        return list(
            self.js("return [...document.querySelectorAll(`#${arguments[0]} td`)].map((e) => e.innerText)", name)
        )

    def requests(self) -> list[str]:
        """Addresses that the page asked for, but for the page itself.

        The browser's first tab (chrome:, chrome-untrusted:) may still load files of its own.
        """
        log = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [m["params"] for m in log if m["method"] == "Network.requestWillBeSent"]
        asked = [one["request"]["url"] for one in sent if not one["documentURL"].startswith("chrome")]
        return [url for url in asked if not url.startswith("file:")]
