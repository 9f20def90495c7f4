"""The process that a tracker lives in: `python -m unidist_track.writer PATH`, with one JSON object a line on its input.

The first line is the job and the target, each later one a point, the last one the exit code. Without a last one, the
launcher has died.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import IO

from unidist.jobs import run_program
from unidist.registry import load_object
from unidist_track.tracker import TrackedJob


def record(path: str, lines: IO[str]) -> None:
    """Make the tracker at "module:Class", and tell it what the lines say."""
    first = json.loads(next(lines))
    job = TrackedJob(first["title"], tuple(first["command"]), first["num_proc"])
    tracker = load_object(path, "tracker")(first["target"], job)
    exit_code = None
    try:
        for line in lines:
            point = json.loads(line)
            if "exit_code" in point:
                exit_code = point["exit_code"]
                break
            tracker.log(point["step"], point["time"], point["values"])
    finally:
        tracker.close(exit_code)


def main() -> None:
    """Record until the input ends; exits with one line on standard error when the tracker fails."""
    # The launcher's end is the end of the input; a Ctrl-C that reaches the whole terminal must not cut the record.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        record(sys.argv[1], sys.stdin)
    except Exception as exc:
        sys.exit(f"{type(exc).__name__}: {exc}")


if __name__ == "__main__":
    run_program(main)
