"""A headless Chromium, for tests of the page of a trace.

The browser and its driver are programs of the system (Debian: `chromium` and `chromium-driver`), and nothing is ever
downloaded for them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


@contextmanager
def chromium() -> Iterator[Any]:
    """A fresh one, driven by selenium; it logs what its pages print and which requests they make."""
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
            scheme = {"name": "prefers-color-scheme", "value": "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver
        finally:
            driver.quit()
