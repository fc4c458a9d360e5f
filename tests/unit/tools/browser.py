"""A headless Chromium for tests of pages, spoken to over its own protocol (Chrome DevTools Protocol) through two pipes."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    *("--headless=new", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
_WAIT_SECONDS = 60.0


def find_browser() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser of its own. `complaints` are errors and warnings of its console, and exceptions in its scripts."""

    def __init__(self, path: str, folder: Path, *, width: int = 1280, height: int = 900) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
        command = (path, *_FLAGS, *sandbox, f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank")
        # The browser takes descriptor 3 to read from and 4 to write to.
        script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._received = b""
        self._number = 0
        self._session = ""
        self.complaints: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.size(width, height)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path) -> None:
        """Load a file, and wait until it is there."""
        self._loaded = False
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not self._loaded:
            self._note(self._next())

    def ask(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        sizes = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1}
        self.call("Emulation.setDeviceMetricsOverride", **sizes, mobile=phone)

    def media(self, *, scheme: str = "light", kind: str = "screen") -> None:
        """Have the page think that the user prefers a color scheme, or prints it."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)

    def mouse(self, kind: str, x: float, y: float, count: int = 1) -> None:
        """Move, press or release the mouse: `mouseMoved`, `mousePressed`, `mouseReleased`."""
        button, clicks = ("none", 0) if kind == "mouseMoved" else ("left", count)
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=clicks)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _WAIT_SECONDS
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self._read, 1 << 20) if ready else b""
            if not more:
                raise RuntimeError("the browser has ended, or does not answer")
            self._received += more
        line, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, values = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(values["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.complaints.append(values["entry"]["text"])

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._session = ""
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


OUTSIDE = """[...document.querySelectorAll("body *")].filter((each) => !each.closest(".scroll, svg, details:not([open])"))
    .filter((each) => each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.outerHTML.slice(0, 200))"""
CUT = """[...document.querySelectorAll(".legendtext")].filter((each) => each.getBoundingClientRect().right >
    each.closest("figure").getBoundingClientRect().right).map((each) => each.textContent)"""
BROKEN = """[...document.querySelectorAll("td code")].filter((each) => !/[ ]/.test(each.textContent))
    .filter((each) => each.getClientRects().length > 1).map((each) => each.textContent)"""


def looks_of(browser: Browser, path: Path) -> list[str]:
    """What is wrong with the looks of a page: on a phone and on a wide screen, light and dark."""
    found = []
    for width in (390, 1400):
        browser.size(width, 844, phone=width < 500)
        browser.open(path)
        for scheme in ("light", "dark"):
            browser.media(scheme=scheme)
            for name, script in {"outside": OUTSIDE, "cut": CUT, "broken": BROKEN}.items():
                found += [f"{name} at {width}, {scheme}: {each}" for each in browser.ask(script)]
        if browser.ask("document.querySelectorAll('.modebar').length"):
            found.append(f"buttons over charts at {width}")
        # All charts of a row together fill it.
        edges = browser.ask("[...document.querySelectorAll('figure')].map((one) => one.getBoundingClientRect().right)")
        if edges and edges[-1] < max(edges) - 1:
            found.append(f"the last chart stands alone at {width}")
    browser.media()
    return found
