"""Runs the `unidist` command as a user does: a process of its own, or this one where the command starts nothing."""

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
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from unidist.launcher import Job

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

    def run_here(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `unidist ARGUMENTS` in this process, in a fifth of the time: for what is refused, or only printed.

        Where the command starts a process, handles a signal or needs variables that the interpreter reads, that is an
        error. Each command also has tests in a process of its own (`run`).
        """
        import command_here

        return command_here.run(arguments, folder=self.folder, env=env or {})

    def job_here(
        self, *arguments: str, env: dict[str, str] | None = None
    ) -> tuple[Job, subprocess.CompletedProcess[str]]:
        """Return the job that `unidist ARGUMENTS` would start on this host, and how the command ended; nothing starts.

        What has to reach the ranks themselves, by their launcher, is tested with `run`.
        """
        import command_here

        with command_here.jobs_not_started() as jobs:
            done = self.run_here(*arguments, env=env)
        assert done.returncode == 0, done.stderr
        (job,) = jobs
        return job, done

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
