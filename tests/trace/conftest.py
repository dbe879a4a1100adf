"""The browser that tests of pages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trace.browser import Page, chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium() as driver:
        yield Page(driver)
