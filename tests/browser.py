"""Chromium without a window, moved by its own driver over the WebDriver protocol."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.processes import wait_for

# https://www.w3.org/TR/webdriver2/#elements
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
OPTIONS = {
    # Containers have neither Chromium's sandbox nor much shared memory.
    "args": ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
}


def missing() -> str | None:
    """Why there is no browser to test with."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


class Browser:
    """One session of chromedriver."""

    def __init__(self, address: str) -> None:
        self._client = httpx.Client(base_url=address, timeout=60)
        log = {"goog:loggingPrefs": {"browser": "WARNING"}, "goog:chromeOptions": OPTIONS}
        self._session = ""
        found = self._post("/session", {"capabilities": {"alwaysMatch": log}})
        self._session = f"/session/{found['sessionId']}"

    def open(self, address: str) -> None:
        self._post("/url", {"url": address})

    def type(self, selector: str, text: str) -> None:
        """Replace what is in a field, as a person does."""
        self._element(selector, "clear", {})
        self._element(selector, "value", {"text": text})

    def click(self, selector: str) -> None:
        self._element(selector, "click", {})

    def run(self, script: str) -> Any:
        """What a script's `return` gives."""
        return self._post("/execute/sync", {"script": script, "args": []})

    def text(self, selector: str) -> str:
        return str(self.run(f"return document.querySelector({selector!r}).textContent"))

    def wait_for(self, condition: str) -> None:
        """Wait until an expression of JavaScript is true."""
        wait_for(lambda: self.run(f"return Boolean({condition})"))

    def console(self) -> list[str]:
        """The warnings and errors there since the last time."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def screenshot(self, file: Path) -> None:
        answer = self._client.get(f"{self._session}/screenshot")
        file.write_bytes(b64decode(answer.raise_for_status().json()["value"]))

    def resize(self, width: int, height: int) -> None:
        self._post("/window/rect", {"width": width, "height": height})

    def devtools(self, command: str, **parameters: Any) -> Any:
        """One command of Chromium's own protocol, where WebDriver has none."""
        return self._post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def close(self) -> None:
        self._client.delete(self._session)
        self._client.close()

    def _element(self, selector: str, action: str, body: dict[str, Any]) -> None:
        found = self._post("/element", {"using": "css selector", "value": selector})
        self._post(f"/element/{found[_ELEMENT]}/{action}", body)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._client.post(self._session + path, json=body)
        value = answer.json()["value"]
        if answer.is_error:
            raise RuntimeError(f"{path}: {value['error']}: {value['message']}")
        return value


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, closed at the end."""
    log = folder / "chromedriver.txt"
    with log.open("w") as out:
        driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=out, stderr=out)
    try:
        found: list[str] = []

        def started() -> bool:
            found.extend(re.findall(r"started successfully on port (\d+)", log.read_text()))
            return bool(found)

        wait_for(started)
        session = Browser(f"http://127.0.0.1:{found[0]}")
        try:
            yield session
        finally:
            session.close()
    finally:
        driver.terminate()
        driver.wait(30)
