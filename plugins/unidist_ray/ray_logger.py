"""Logging from ranks for the callbacks of `RayExecutor.run`; with the names of Horovod's module."""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["configure", "log"]

_queue: Any = None
_has_warned = False


def configure(queue: Any) -> None:
    """Have `log` put values there: called by the executor. None: nowhere."""
    global _queue
    _queue = queue


def log(info_dict: Any) -> None:
    """Hand a value to the callbacks of `run` or `execute`. On any rank; one that has none says so once.

    Args:
        info_dict: a dict, or anything else that can be pickled.
    """
    global _has_warned
    if _queue is not None:
        _queue.put(info_dict)
    elif not _has_warned:
        _has_warned = True
        warnings.warn(
            "ray_logger.log: nobody gets this value; give callbacks to run or execute of RayExecutor", stacklevel=2
        )
