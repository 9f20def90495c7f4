"""Functions that run as ranks: `unidist.run` and `RankPool`. Imports `jobs` and the folders below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.jobs.pool.pool import RankPool, run

__all__ = [
    "RankPool", "run",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "pool": "RankPool run",
    },
)
