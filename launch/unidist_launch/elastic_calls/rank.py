"""The program of a rank: runs the job's function, and leaves its answer for who has started the agent.

python -m unidist_launch.elastic_calls.rank FOLDER
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

from unidist.control.elastic import present
from unidist.jobs import run_program
from unidist.jobs.pool import Record, answer_of, is_error

CALL_FILE = "call"
_ANSWER = "answer-"


def main() -> None:
    """Run the function; exits with 1 if it raises, as a script does."""
    folder = call_folder()

    def run() -> Any:
        function, args, kwargs = pickle.loads((folder / CALL_FILE).read_bytes())
        return function(*args, **kwargs)

    reply = answer_of(run)
    member = present()
    rank = member.topology.rank if member is not None else int(os.environ.get("UNIDIST_RANK", "0"))
    whole = folder / f"{_ANSWER}{rank}-{os.getpid()}"
    part = whole.with_name(f"part-{os.getpid()}")
    part.write_bytes(reply)
    part.rename(whole)
    if is_error(reply):
        _, _, text, _ = pickle.loads(reply)
        print(text, file=sys.stderr, end="", flush=True)
        sys.exit(1)


def call_folder() -> Path:
    """Return the folder that this rank shares with who has started the agent of its host."""
    return Path(sys.argv[1])


def records(folder: Path) -> list[Record]:
    """Return the answers that ranks have left in a folder."""
    found: list[Record] = []
    for file in folder.glob(f"{_ANSWER}*"):
        rank = int(file.name.removeprefix(_ANSWER).partition("-")[0])
        found.append((rank, file.read_bytes(), ""))
    return found


if __name__ == "__main__":
    run_program(main)
