"""Anonymous memory that a rank inherits from its launcher, found again where a wrapper has closed the descriptor."""

from __future__ import annotations

import os
from collections.abc import Mapping


def path_of_inherited(env: Mapping[str, str], variable: str, name: str) -> str | None:
    """Return a path at which inherited memory can be opened; None if it is not to be found.

    Args:
        env: the environment.
        variable: holds the number of the descriptor.
        name: of the memory (`memfd_create`).
    """
    number = env.get(variable)
    if number is None:
        return None
    for path in (f"/proc/self/fd/{number}", f"/proc/{env.get('UNIDIST_LAUNCHER_PID', '')}/fd/{number}"):
        try:
            if os.readlink(path).startswith(f"/memfd:{name}"):
                return path
        except OSError:
            continue
    return None
