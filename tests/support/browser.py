"""A real browser without a window, driven by its debugging protocol over two pipes."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any, Final

PROGRAM: Final = "chromium"
_PATIENCE_S: Final = 60.0
_FLAGS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe"),
)
_DRAWN: Final = """new Promise(done => {
  const state = () => document.documentElement?.dataset.charts;
  const look = () => state() ? done(state()) : setTimeout(look, 20);
  look();
})"""


class Browser:
    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []

    def open(self, page: Path, width: int, *, dark: bool = False) -> str:
        """Open a page with a width in pixels, wait for its charts, and return their state."""
        if self._session is None:
            target = self._do("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._do(f"{domain}.enable")
        self._do("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = "dark" if dark else "light"
        self._do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        self._do("Page.navigate", url=page.as_uri())
        return str(self.evaluate(_DRAWN))

    def evaluate(self, expression: str) -> Any:
        result = self._do("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        self._do("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click_at(self, x: float, y: float) -> None:
        self.point_at(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self._do("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def complaints(self) -> list[str]:
        messages = []
        for event in self._events:
            method, parameters = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                messages.append(json.dumps(parameters["exceptionDetails"]))
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("warning", "error"):
                messages.append(parameters["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("warning", "error", "assert"):
                messages.append(json.dumps(parameters["args"]))
        return messages

    def requests(self) -> list[str]:
        return [event["params"]["request"]["url"] for event in self._events if event["method"] == "Network.requestWillBeSent"]

    def _do(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            if "method" in answer:
                self._events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._received:
            ready, _, _ = select([self._answers], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._answers, 2**20)
            assert piece, "the browser has ended"
            self._received += piece
        message, _, self._received = self._received.partition(b"\0")
        received: dict[str, Any] = json.loads(message)
        return received


@contextmanager
def running_browser() -> Iterator[Browser]:
    from_us, commands = os.pipe()
    answers, to_us = os.pipe()
    with tempfile.TemporaryDirectory(prefix="kp-scorer-browser-", ignore_cleanup_errors=True) as profile:
        # The browser reads from descriptor 3 and writes to 4, whatever these are.
        script = f'exec {PROGRAM} "$@" 3<&{from_us} 4>&{to_us}'
        with subprocess.Popen(
            ["bash", "-c", script, PROGRAM, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            os.close(from_us)
            os.close(to_us)
            try:
                yield Browser(commands, answers)
            finally:
                # The browser ends when its pipe of commands is closed.
                os.close(commands)
                os.close(answers)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
