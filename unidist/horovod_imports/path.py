"""The folder that makes `import horovod` mean unidist in every Python process that has it on its path."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

AS_HOROVOD = "UNIDIST_AS_HOROVOD"
"""The variable that asks for it in all ranks of a job."""

PATH_ENTRY = str(Path(__file__).resolve().parent / "path_entry")
"""The folder. It holds the module `horovod`, and nothing else that a script could import by accident."""


def is_asked_for(env: Mapping[str, str]) -> bool:
    """Return whether these variables ask for it."""
    return env.get(AS_HOROVOD, "0") not in ("", "0")


def with_path_entry(python_path: str) -> str:
    """Return a PYTHONPATH with the folder in front, once."""
    others = [entry for entry in python_path.split(os.pathsep) if entry and entry != PATH_ENTRY]
    return os.pathsep.join([PATH_ENTRY, *others])
