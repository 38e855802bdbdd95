"""Drives a headless Chromium through its DevTools protocol, over a pair of pipes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
TIMEOUT_S = 60.0
# Without these it looks for updates and fails on a closed network.
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)


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


class Browser:
    """One Chromium with one page."""

    def __init__(self, directory: Path) -> None:
        assert CHROMIUM is not None
        directory.mkdir(parents=True, exist_ok=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
        argv = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", CHROMIUM, *QUIET]
        argv += [f"--user-data-dir={directory / 'profile'}", "about:blank"]
        self._process = subprocess.Popen(
            argv, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        """Addresses that the page has asked for, without data: addresses."""
        self.messages: list[str] = []
        """Errors and warnings on the console, and exceptions of scripts."""
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self.resize(1440, 900)

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._session = ""
            self._call("Browser.close")
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        """Set the size of the page."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def prefer(self, scheme: str) -> None:
        """Set the system's theme: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, which may be a promise."""
        result = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            with contextlib.suppress(AssertionError):  # the page is being replaced
                if value := self.run(script):
                    return value
            assert time.monotonic() < deadline, f"{script} stays false:\n{self.text()[:3000]}\n{self.messages}"
            time.sleep(0.05)

    def text(self) -> str:
        """Return the text of the page as a reader sees it."""
        return str(self.run("document.body.innerText"))

    def shows(self, text: str) -> None:
        """Wait until the page shows a text."""
        self.until(f"document.body.innerText.includes({json.dumps(text)})")

    def open_run(self, name: str, tab: str = "") -> None:
        """Open a run of the list, and one of its tabs."""
        self.click("td.name a", name)
        self.until(f"document.querySelector('h1')?.textContent === {json.dumps(name)}")
        if tab:
            self.open_tab(tab)

    def open_tab(self, tab: str) -> None:
        """Open a tab of the run that is shown, and wait for its content."""
        self.click(".tabs a", tab)
        self.until(f"document.querySelector('.tabs [aria-current]')?.textContent === {json.dumps(tab)}")
        self.until("!document.getElementById('panel').textContent.includes('Loading')")

    def check_privacy(self, origin: str) -> None:
        """Check that the page asked only this server, and that no script failed or broke the policy of the page."""
        assert self.requests and [url for url in self.requests if not url.startswith(origin)] == []
        assert self.messages == []

    def click(self, selector: str, text: str = "") -> None:
        """Wait for an element that contains a text, and click it."""
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        find = f"{elements}.find(e => e.textContent.includes({json.dumps(text)}))"
        self.until(f"!!{find}")
        self.run(f"{find}.click()")

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field, as if typed."""
        self.until(f"!!document.querySelector({json.dumps(selector)})")
        self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(text)};"
            "e.dispatchEvent(new Event('input', {bubbles: true}));"
            "e.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key, such as Tab or Enter."""
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        more = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
        values = {"key": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 if shift else 0}
        self._call("Input.dispatchKeyEvent", type="keyDown", **values, **more)
        self._call("Input.dispatchKeyEvent", type="keyUp", **values)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of what is visible, or of the whole page."""
        path.parent.mkdir(parents=True, exist_ok=True)
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        for answer in self._messages():
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
        raise AssertionError(f"{method}: Chromium does not answer")

    def _messages(self) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            line, found, rest = self._buffer.partition(b"\0")
            if found:
                self._buffer = rest
                message = json.loads(line)
                self._note(message)
                yield message
            elif select.select([self._in], [], [], 1.0)[0]:
                data = os.read(self._in, 1 << 20)
                assert data, "Chromium has ended"
                self._buffer += data

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith("data:"):
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.messages.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
            case "Log.entryAdded":
                self.messages.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.messages.append(str(params["args"]))
