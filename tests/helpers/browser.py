"""A real browser for the tests of pages."""

import os
import shutil

import pytest

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str:
    """Debian's Chromium or Google Chrome; without one the test is skipped, or fails where one is required."""
    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None and os.environ.get("SKIPLESS_REQUIRE_BROWSER"):
        pytest.fail(f"SKIPLESS_REQUIRE_BROWSER is set, and none of {', '.join(CHROMIUMS)} is installed")
    if path is None:
        pytest.skip(f"none of {', '.join(CHROMIUMS)} is installed")
    return path


def settle(page) -> None:
    """Wait for the frame in which a change of size is drawn."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))")
