"""Functions that run as ranks: `unidist.run` and `RankPool`. Imports `jobs` and the folders below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.jobs.pool._pickling import dump_call
    from unidist.jobs.pool.answers import Answers, Record, call_name
    from unidist.jobs.pool.pool import RankPool, run
    from unidist.jobs.pool.worker import answer, answer_of, is_error

__all__ = [
    "Answers", "RankPool", "Record", "answer", "answer_of", "call_name", "dump_call", "is_error", "run",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "_pickling": "dump_call",
        "answers": "Answers Record call_name",
        "pool": "RankPool run",
        "worker": "answer answer_of is_error",
    },
)
