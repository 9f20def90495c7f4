"""A headless Chromium that a test drives over a pipe, by the DevTools protocol. Nothing listens on a port."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
"""The program; None: there is none here."""

_ANSWER_SEC = 60.0


class Browser:
    """One browser with one page. A context manager.

    Args:
        folder: for its files.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        commands, self._write = (_above_ten(each) for each in os.pipe())
        self._read, answers = (_above_ten(each) for each in os.pipe())
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "--window-size=1100,1000"]
        # The protocol's pipes are descriptors 3 and 4 of the browser.
        script = f'exec "$0" "$@" 3<&{commands} 4>&{answers} {commands}<&- {answers}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *options, "about:blank"],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self._received = b""
        self._number = 0
        self._session = ""

    def __enter__(self) -> Self:
        try:
            targets = self._call("Target.getTargets")["targetInfos"]
            page = next(each["targetId"] for each in targets if each["type"] == "page")
            self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
            self._call("Page.enable")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def open(self, url: str) -> None:
        """Go to an address."""
        self._call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, *, seconds: float = 60.0) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + seconds
        while not (found := self.value(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}\n{self.value('document.body.innerText')}"
            time.sleep(0.05)
        return found

    def screenshot(self, path: Path, *, width: int, height: int, is_dark: bool) -> None:
        """Write a PNG of the page as a window of this size shows it, in pixels."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_SEC
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 16)
            assert data, f"the browser has ended with {self._process.wait(10)}"
            self._received += data
        line, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _end(self) -> None:
        os.close(self._write)
        os.close(self._read)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)  # it ends when its pipe does
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # and what it has started
        self._process.wait()


def _above_ten(descriptor: int) -> int:
    """Return the same under a number that is in nobody's way."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
