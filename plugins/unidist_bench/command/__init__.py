"""The command `unidist bench`: its options, and the table, file and plot that come of it.

Imports `measurement` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_bench.command.measure import bench

__all__ = [
    "bench",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "measure": "bench",
    },
)
