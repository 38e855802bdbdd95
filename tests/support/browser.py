"""A page in a headless Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import ConsoleMessage, expect, sync_playwright

from tests.support.cli import ROOT
from tests.support.unmeasured import unmeasured

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here (scripts/test_programs.sh installs it in CI)"
)
SCREENSHOTS = Path(ROOT, "build", "screenshots")
# True if at least twelve charts are visible and all have pixels.
DRAWN = """(all => all.length >= 12 && all.every(chart => {
  const copy = new OffscreenCanvas(chart.width, chart.height).getContext('2d', {willReadFrequently: true});
  copy.drawImage(chart, 0, 0);
  return copy.getImageData(0, 0, chart.width, chart.height).data.some(Boolean);
}))([...document.querySelectorAll('.chart:not([hidden]) canvas')])"""
TIMEOUT_MS = 60_000.0
expect.set_options(timeout=TIMEOUT_MS)


@contextlib.contextmanager
def dashboard(runs: Path) -> Iterator[str]:
    """Serve the dashboard of a directory. Yield its address with its token."""
    argv = [sys.executable, "-m", "primeslurm", "dashboard", str(runs)]
    env = {**unmeasured(), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@contextlib.contextmanager
def start_chromium() -> Iterator[Chromium]:
    """Start a Chromium. Tests that use it must be plain functions: Playwright blocks the event loop of their thread."""
    # Playwright adds --headless, --no-sandbox and what keeps Chromium from looking for updates.
    quiet = ["--disable-gpu", "--disable-sync", "--disable-quic"]
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=quiet) as chromium,
    ):
        yield chromium


class Browser:
    """A page with a new profile."""

    def __init__(self, chromium: Chromium) -> None:
        self._chromium = chromium
        self.requests: list[str] = []
        """Addresses that the page has asked for, without data: addresses."""
        self.messages: list[str] = []
        """Errors and warnings on the console, and exceptions of scripts."""
        self._open_page()

    def _open_page(self, **options: Any) -> None:
        context = self._chromium.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        context.set_default_timeout(TIMEOUT_MS)
        context.on("request", lambda request: self.requests.append(request.url))
        context.on("console", self._note)
        context.on("weberror", lambda error: self.messages.append(str(error.error)))
        self.page = context.new_page()

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.messages.append(f"{message.text} {message.location['url']}")

    def close(self) -> None:
        self.page.context.close()

    def become_phone(self) -> None:
        """Open the address again on a phone, with the same cookies."""
        url, state = self.page.url, self.page.context.storage_state()
        self.close()
        self._open_page(viewport={"width": 390, "height": 844}, is_mobile=True, storage_state=state)
        self.open(url)

    def prefer(self, scheme: Literal["light", "dark"]) -> None:
        """Set the system's theme."""
        self.page.emulate_media(color_scheme=scheme)

    def open(self, url: str) -> None:
        self.page.goto(url)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, which may be a promise."""
        return self.page.evaluate(script)

    def until(self, script: str) -> Any:
        """Wait until an expression is true, and return its value."""
        # The policy of the page lets Playwright compile a script once. It compiles a bare expression at each poll.
        return self.page.wait_for_function(f"() => {script}").json_value()

    def shows(self, text: str) -> None:
        """Wait until the page shows a text."""
        expect(self.page.locator("body")).to_contain_text(text, use_inner_text=True)

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements."""
        return self.page.locator(selector).all_text_contents()

    def open_run(self, name: str, tab: str = "") -> None:
        """Open a run of the list, and one of its tabs."""
        self.click("td.name a", name)
        expect(self.page.locator("h1")).to_have_text(name)
        if tab:
            self.open_tab(tab)

    def open_tab(self, tab: str) -> None:
        """Open a tab of the run that is shown, and wait for its content."""
        self.click(".tabs a", tab)
        expect(self.page.locator(".tabs [aria-current]")).to_have_text(tab)
        expect(self.page.locator("#panel")).not_to_contain_text("Loading")

    def check_page(self) -> None:
        """Check that the page fits the width of its window, and that the panel shows no error."""
        # A phone zooms out until a wide page fits: its innerWidth is then the width of the page.
        width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert self.run(width) <= 0, self.page.url
        expect(self.page.locator("#panel > .note.error")).to_have_count(0)

    def check_privacy(self, origin: str) -> None:
        """Check that the page asked only this server, and that no script failed or broke the policy of the page."""
        self.page.title()  # everything that the page did before is recorded when Chromium answers
        foreign = [url for url in self.requests if not url.startswith(origin)]
        assert self.requests and not foreign and not self.messages, f"asked {foreign}, said {self.messages}"

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element that contains a text."""
        self.page.locator(selector).filter(has_text=text).first.click()

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field, and leave it."""
        field = self.page.locator(selector)
        field.fill(text)
        field.blur()

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of what is visible, or of the whole page."""
        self.page.screenshot(path=path, full_page=whole)
