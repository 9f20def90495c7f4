"""An elastic job of a script without a framework, and what a test sees and does of it.

Every step adds up the same 12 numbers, whoever shares them, in float64: so the total tells whether each step of each
rank counted once.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rank_lines import ranks_of

SCRIPT = """
import array, os, sys, time
from unidist import elastic
from unidist.runtime import context
from unidist.buffer import Buffer

steps, pace = int(sys.argv[1]), float(sys.argv[2])

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

{setup}
context.init()
state = elastic.ObjectState(step=0, total=0.0, stop=False)

@elastic.run
def train(state):
    place = context.current().topology
    say("enter", place.rank, place.world_size, state.step, os.getpid())
    while state.step < steps and not state.stop:
        mine = range(state.step * 12 + place.rank, state.step * 12 + 12, place.world_size)
        stop = place.rank == 0 and os.path.exists("stop")  # so that a test can end it; all ranks learn of it alike
        part = array.array("d", [sum(i * i * 0.25 for i in mine), stop])
        context.current().world.allreduce(Buffer.of(part), Buffer.of(part)).wait()
        time.sleep(pace)
        {in_step}
        state.total += part[0]
        state.stop = part[1] > 0
        state.step += 1
        state.commit()
        say("step", state.step, place.rank, os.getpid(), time.time())
    return state.total

say("done", train(state), state.step, os.getpid())
"""


def script(*, setup: str = "", in_step: str = "pass") -> str:
    """Return the script, with lines added before `init()` and inside of a step."""
    return SCRIPT.format(setup=setup, in_step=in_step)


def total(steps: int) -> float:
    """Return what one process would compute."""
    return sum(i * i * 0.25 for i in range(steps * 12))


class ElasticJob:
    """A running `unidist launch`; reads what it prints. A context manager, which ends it.

    Args:
        process: the launcher, with its outputs as pipes of text.
        events: the file of its events.
    """

    def __init__(self, process: subprocess.Popen[str], events: Path) -> None:
        self.process = process
        self.lines: list[str] = []
        self._events = events
        self._threads = [
            threading.Thread(target=self._read, args=(stream,)) for stream in (process.stdout, process.stderr)
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def start(
        cls, folder: Path, options: Sequence[str], script: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> ElasticJob:
        """Start `unidist launch` with some options in a folder, where it writes its events.

        Args:
            folder: to start it in.
            options: `-np` and `--min-np` among them.
            script: the script's file, and its arguments.
            environment: variables that are added.
        """
        launch = [sys.executable, "-m", "unidist_launch", "launch", *options, "--event-log", "events"]
        process = subprocess.Popen(
            [*launch, sys.executable, *script],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return cls(process, folder / "events")

    def _read(self, stream: Any) -> None:
        for line in stream:
            self.lines.append(line.rstrip("\n"))

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def said(self, pattern: str) -> list[tuple[str, ...]]:
        """Return the groups of each line of a rank that matches, folded lines once for each rank."""
        found = []
        for line in list(self.lines):
            match = re.fullmatch(r"\[([\d,-]+)\] " + pattern, line)
            if match:
                found += [match.groups()[1:]] * len(ranks_of(match[1]))
        return found

    def wait_for(self, pattern: str, *, seconds: float = 240.0) -> tuple[str, ...]:
        """Wait for a line of a rank, and return its groups."""
        deadline = time.monotonic() + seconds
        while not (found := self.said(pattern)):
            has_time = time.monotonic() < deadline and self.process.poll() is None
            assert has_time, f"no {pattern!r} in:\n" + "\n".join(self.lines)
            time.sleep(0.01)
        return found[0]

    def wait_for_event(self, kind: str, count: int = 1, *, seconds: float = 240.0) -> dict[str, Any]:
        """Wait until the job's log tells of so many events of a kind, and return the last of them."""
        deadline = time.monotonic() + seconds
        while len(found := self.events(kind)) < count:
            has_time = time.monotonic() < deadline and self.process.poll() is None
            assert has_time, f"{len(found)} of {count} {kind!r} in:\n" + "\n".join(self.lines)
            time.sleep(0.01)
        return found[count - 1]

    def pid(self, rank: int, size: int) -> int:
        """Return the process that was this rank when the world first had this size."""
        return int(self.wait_for(rf"enter {rank} {size} \d+ (\d+)")[0])

    def end(self, *, seconds: float = 240.0) -> int:
        """Wait for the end of the job, and return its exit code."""
        code = self.process.wait(seconds)
        for thread in self._threads:
            thread.join()
        return code

    def totals(self) -> set[float]:
        """Return what the ranks computed."""
        return {float(text) for (text,) in self.said(r"done (\S+) \d+ \d+")}

    def steps(self) -> set[int]:
        """Return how many steps the ranks took."""
        return {int(text) for (text,) in self.said(r"done \S+ (\d+) \d+")}

    def survivors(self) -> set[int]:
        """Return the processes that came to the end of the script, if all of them are of one host."""
        return {int(pid) for (pid,) in self.said(r"done \S+ \d+ (\d+)")}

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the events of the job's log."""
        if not self._events.exists():
            return []
        found = [json.loads(line) for line in self._events.read_text().splitlines()]
        return [event for event in found if kind in (None, event["event"])]
