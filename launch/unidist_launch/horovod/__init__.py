"""Horovod's ways to start ranks, its command line and `horovod.run`, on those of unidist.

Both end in the command `unidist launch`. `rank` and `launcher` are the programs of the processes that `run` starts.
Imports `options` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_launch.horovod.arguments import translated
    from unidist_launch.horovod.call import run

__all__ = [
    "run", "translated",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "arguments": "translated",
        "call": "run",
    },
)
