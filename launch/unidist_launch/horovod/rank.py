"""The program of a rank that `horovod.run` starts: calls the function, and leaves what it returns in the folder."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from unidist.jobs.pool import answer
from unidist.runtime import context
from unidist_launch.horovod.call import CALL, REPLIES


def main() -> None:
    """Run the call in the folder that the first argument names. Exits with 1 if it raises, as a script does."""
    folder = Path(sys.argv.pop(1))
    number = os.environ.get("UNIDIST_WORKER") or os.environ["UNIDIST_RANK"]
    rank = int(os.environ["UNIDIST_RANK"])
    reply = answer((folder / CALL).read_bytes())
    if context.is_initialized():
        rank = context.current().topology.rank  # it may have changed in an elastic job
    unfinished = folder / f"unfinished.{number}"
    unfinished.write_bytes(pickle.dumps((rank, reply)))
    unfinished.replace(folder / f"{REPLIES}{number}")
    kind, *content = pickle.loads(reply)
    if kind == "error":
        sys.exit(content[1])
