"""Functions that run as ranks: `unidist.run` and `RankPool`. Imports `jobs` and the folders below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.jobs.pool._pickling import dump_call
    from unidist.jobs.pool.pool import RankPool, run
    from unidist.jobs.pool.worker import answer

__all__ = [
    "RankPool", "answer", "dump_call", "run",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "_pickling": "dump_call",
        "pool": "RankPool run",
        "worker": "answer",
    },
)
