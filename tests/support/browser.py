# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium, driven by chromedriver over the W3C WebDriver protocol."""

import base64
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nodocker_cluster.ports import free_ports
from support.engine_processes import wait_for

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
requires_chromium = pytest.mark.skipif(
    None in (CHROMIUM, CHROMEDRIVER), reason="needs a browser: apt-get install chromium chromium-driver"
)


class Browser:
    """One window."""

    def __init__(self, driver_url: str, profile: Path) -> None:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        arguments += [
            f"--user-data-dir={profile}",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
        ]
        options = {"args": arguments, "binary": CHROMIUM}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._url = f"{driver_url}/session"
        session = self._call("", {"capabilities": {"alwaysMatch": capabilities}})
        self._url += f"/{session['sessionId']}"

    def open(self, url: str) -> None:
        """Load a page."""
        self._call("/url", {"url": url})

    def run(self, script: str, *args: object) -> Any:
        """Run a script in the page and return the value that it returns."""
        return self._call("/execute/sync", {"script": script, "args": args})

    def wait(self, expression: str, what: str) -> Any:
        """Wait until an expression of the page is true, and return it."""
        return wait_for(lambda: self.run(f"return {expression}"), what=what)

    def type(self, text: str) -> None:
        """Enter a text where the focus is."""
        self.command("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        """Press one of the keys with a name."""
        code = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowUp": 38}[key]
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self.command("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        self.command("Input.dispatchKeyEvent", type="keyUp", **fields)

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the page and its colour scheme."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def command(self, name: str, **params: object) -> Any:
        """Run a command of Chromium's own protocol."""
        return self._call("/goog/cdp/execute", {"cmd": name, "params": params})

    def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        result = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(result["data"]))

    def problems(self) -> list[str]:
        """Return what the browser has reported since the last call: errors of scripts, violations of the policy."""
        entries = self._call("/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if "favicon" not in entry["message"]]

    def close(self) -> None:
        """End the browser."""
        self._call("", None, "DELETE")

    def _call(self, path: str, body: object, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["value"]


@contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """Start chromedriver and a browser with a new profile."""
    [port] = free_ports(1)
    with (folder / "chromedriver.log").open("wb") as log:
        driver = subprocess.Popen([str(CHROMEDRIVER), f"--port={port}"], stdout=log, stderr=log)
    try:
        wait_for(lambda: b"started successfully" in (folder / "chromedriver.log").read_bytes(), what="chromedriver")
        browser = Browser(f"http://127.0.0.1:{port}", folder / "profile")
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(10)
