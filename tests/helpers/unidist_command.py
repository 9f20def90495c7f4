"""Runs the `unidist` command as a user does: a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

TIMEOUT_SEC = 120


class Command:
    """The `unidist` command in a folder of its own, and a mark on every process that it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex

    def script(self, code: str, name: str = "script.py") -> str:
        """Write a script and return its name."""
        (self.folder / name).write_text(
            "import os, signal, sys, time\nrank = int(os.environ.get('RANK', 0))\n" + textwrap.dedent(code)
        )
        return name

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `unidist ARGUMENTS` to its end."""
        with self.start(*arguments, env=env) as process:
            try:
                out, err = process.communicate(timeout=TIMEOUT_SEC)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start `unidist ARGUMENTS`."""
        return self.start_words([sys.executable, "-m", "unidist_launch", *arguments], env={**os.environ, **(env or {})})

    def start_words(self, words: list[str], *, env: dict[str, str]) -> subprocess.Popen[str]:
        """Start any command, in this very environment."""
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env={**env, "TEST_MARK": self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
            # A test run in the background of a shell has SIGINT ignored, which children would inherit.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
        )

    def alive(self) -> list[psutil.Process]:
        """Return every living process with this command's mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TEST_MARK") == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    @staticmethod
    def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
        """Poll until `condition` holds; False if it never does."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    made = Command(tmp_path)
    yield made
    left = made.alive()
    for process in left:
        process.kill()
    assert not left, f"left behind: {left}"
